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
_NEW = 0xAA00
"""USERFAULTFD_IOC_NEW, of the device."""
_DEVICE = "/dev/userfaultfd"
_ALTERNATIVES = (
    "the GGUF runs without them: `moepack restore` or `moepack export gguf` writes it. Containers "
    f"allow them by another seccomp profile, or by the device (`docker run --device {_DEVICE}`)"
)
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
    try:
        descriptor = _open()
        try:
            fcntl.ioctl(descriptor, _API, bytearray(struct.pack("QQQ", 0xAA, _FEATURES, 0)))
        finally:
            os.close(descriptor)
    except OSError as error:
        raise MachineError(
            f"the system refuses to report page faults (userfaultfd): {error.strerror}",
            hint=f"a pack needs page faults, and Linux 5.14; {_ALTERNATIVES}",
        ) from None


def program_refusal(code: int) -> MachineError:
    """Return the error for a program that may not do what `check_page_faults` did, by its errno."""
    return MachineError(
        "the system reports page faults (userfaultfd) to moepack, but refuses it to the program: "
        f"{os.strerror(code)}",
        hint=f"is it started in a sandbox? A pack needs page faults there; {_ALTERNATIVES}",
    )


def _open() -> int:
    """Open a userfaultfd by the system call, or by the device if the call is forbidden.

    Raises the system call's OSError.
    """
    number = _SYSTEM_CALLS.get(platform.machine())
    if number is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    flags = os.O_CLOEXEC | _USER_MODE_ONLY
    descriptor: int = ctypes.CDLL(None, use_errno=True).syscall(number, flags)
    if descriptor >= 0:
        return descriptor
    error = OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    try:
        device = os.open(_DEVICE, os.O_RDWR | os.O_CLOEXEC)
        try:
            return fcntl.ioctl(device, _NEW, flags)
        finally:
            os.close(device)
    except OSError:
        raise error from None


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
