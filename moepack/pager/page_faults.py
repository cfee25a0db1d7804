"""Page faults of a program on an image, through userfaultfd: reading them, and ending them.

The structs and numbers are those of linux/userfaultfd.h.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import struct
from collections.abc import Iterator

_PAGE = mmap.PAGESIZE
_COPY, _WAKE, _CONTINUE = 0xC028AA03, 0x8010AA02, 0xC020AA07
_MESSAGE_LENGTH = 32
_PAGEFAULT = 0x12
_GONE = {errno.ENOENT, errno.ESRCH, errno.EFAULT}
"""The range is not mapped any more, or the process has ended."""


def read_faults(descriptor: int) -> Iterator[int]:
    """Yield the addresses of pages that threads wait for, and that were not read yet."""
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
    """Put a page there, whole and at once, and wake who waits for it."""
    buffer = ctypes.create_string_buffer(page, _PAGE)
    request = struct.pack("QQQQq", address, ctypes.addressof(buffer), _PAGE, 0, 0)
    if _ended(descriptor, _COPY, request) == errno.EEXIST:
        wake(descriptor, address)


def proceed(descriptor: int, address: int) -> None:
    """Let who waits for a page go on with that which the file has there."""
    _ended(descriptor, _CONTINUE, struct.pack("QQQq", address, _PAGE, 0, 0))
    wake(descriptor, address)


def wake(descriptor: int, address: int) -> None:
    """Let who waits for a page look again."""
    _ended(descriptor, _WAKE, struct.pack("QQ", address, _PAGE))


def _ended(descriptor: int, request: int, argument: bytes) -> int:
    """Do it; return 0, EEXIST or EAGAIN, or what says that the range is gone."""
    try:
        fcntl.ioctl(descriptor, request, bytearray(argument))
    except OSError as error:
        if error.errno in _GONE or error.errno in (errno.EEXIST, errno.EAGAIN):
            return error.errno or 0
        raise
    return 0
