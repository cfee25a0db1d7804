"""System calls that the kernel refuses to a process from now on, as containers have it do."""

import ctypes
import errno
import os
import platform
import struct

IO_URING_SETUP = 425
USERFAULTFD = {"x86_64": 323, "aarch64": 282}
OPENAT = {"x86_64": 257, "aarch64": 56}
_NO_NEW_PRIVILEGES, _SET_SECCOMP, _FILTER = 38, 22, 2
_LOAD, _EQUAL, _ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06
_ALLOW, _FAIL = 0x7FFF0000, 0x00050000
_OPEN_FLAGS_AT = 16 + 2 * 8
_libc = ctypes.CDLL(None, use_errno=True)


def forbid(number: int, code: int, open_flags: int = 0) -> None:
    """Have the kernel answer a system call with an error from now on, in this process.

    With `open_flags`, only where one of them is in the third argument.
    """
    steps = [(_LOAD, 0, 0, 0), (_EQUAL, 0, 3 if open_flags else 1, number)]
    if open_flags:
        steps += [(_LOAD, 0, 0, _OPEN_FLAGS_AT), (_ANY_BIT, 0, 1, open_flags)]
    steps += [(_RETURN, 0, 0, _FAIL | code), (_RETURN, 0, 0, _ALLOW)]
    program = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *one) for one in steps))
    header = struct.pack("@HP", len(steps), ctypes.addressof(program))
    assert not _libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    if _libc.prctl(_SET_SECCOMP, _FILTER, ctypes.create_string_buffer(header), 0, 0):
        raise OSError(ctypes.get_errno(), "this kernel has no seccomp filters")


def contain() -> None:
    """Forbid what Docker's own filter forbids, and readers of experts might use."""
    for number in (USERFAULTFD[platform.machine()], IO_URING_SETUP):
        forbid(number, errno.EPERM)


def forbid_direct() -> None:
    forbid(OPENAT[platform.machine()], errno.EINVAL, os.O_DIRECT)
