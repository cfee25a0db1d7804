"""Page faults of a program on an image, through userfaultfd: reading and resolving them.

The structs and numbers are those of linux/userfaultfd.h.
"""

import ctypes
import errno
import fcntl
import mmap
import os
import platform
import struct
from collections.abc import Iterator

from moepack.common.errors import MachineError

_PAGE = mmap.PAGESIZE
_API, _COPY, _WAKE = 0xC018AA3F, 0xC028AA03, 0x8010AA02
_FEATURES = 1 << 5 | 1 << 10
"""UFFD_FEATURE_MISSING_SHMEM and UFFD_FEATURE_MINOR_SHMEM."""
_USER_MODE_ONLY = 1
_SYSTEM_CALLS = {"x86_64": 323, "aarch64": 282}
_MESSAGE_LENGTH = 32
_PAGEFAULT = 0x12
_EXPECTED_ERRORS = {errno.EEXIST, errno.EAGAIN, errno.ENOENT, errno.ESRCH, errno.EFAULT}
"""The page is there already; or the range is not mapped any more, or the process has ended."""


def check_page_faults() -> None:
    """Raise MachineError if the system hands no page faults to this user's processes."""
    number = _SYSTEM_CALLS.get(platform.machine())
    descriptor = -1
    if number is not None:
        libc = ctypes.CDLL(None, use_errno=True)
        descriptor = libc.syscall(number, os.O_CLOEXEC | _USER_MODE_ONLY)
    try:
        if descriptor < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        fcntl.ioctl(descriptor, _API, bytearray(struct.pack("QQQ", 0xAA, _FEATURES, 0)))
    except OSError as error:
        raise MachineError(
            f"the system refuses to report page faults (userfaultfd): {error.strerror}",
            hint="a pack needs them, and Linux 5.14; a GGUF does not: run that. "
            "Containers allow them with another seccomp profile",
        ) from None
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def read_faults(descriptor: int) -> Iterator[int]:
    """Yield the addresses of pages that threads wait for, each once."""
    while True:
        try:
            message = os.read(descriptor, _MESSAGE_LENGTH)
        except (BlockingIOError, InterruptedError):
            return
        if len(message) < _MESSAGE_LENGTH:
            return
        if message[0] == _PAGEFAULT:
            (address,) = struct.unpack_from("Q", message, 16)
            yield address // _PAGE * _PAGE


def copy_page(descriptor: int, address: int, page: bytes) -> None:
    """Put a whole page at an address at once, and wake the threads that wait for it."""
    buffer = ctypes.create_string_buffer(page, _PAGE)
    request = struct.pack("QQQQq", address, ctypes.addressof(buffer), _PAGE, 0, 0)
    if _request(descriptor, _COPY, request) == errno.EEXIST:
        wake(descriptor, address)


def wake(descriptor: int, address: int) -> None:
    """Wake the threads that wait for a page."""
    _request(descriptor, _WAKE, struct.pack("QQ", address, _PAGE))


def _request(descriptor: int, code: int, argument: bytes) -> int:
    """Make a request; return 0, or one of the errors that are no failure."""
    try:
        fcntl.ioctl(descriptor, code, bytearray(argument))
    except OSError as error:
        if error.errno in _EXPECTED_ERRORS:
            return error.errno or 0
        raise
    return 0
