"""Files opened for reading, through the page cache or past it, with the alignment that they need.

`O_DIRECT` is Linux's; macOS has F_NOCACHE, which needs no alignment. Other systems have neither.
"""

import ctypes
import errno
import os
import struct
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from moepack.common.paths import AnyPath
from moepack.storage import libc
from moepack.storage.regular_file import open_addressable

_AT_EMPTY_PATH = 0x1000
_STATX_DIOALIGN = 0x2000
_STATX_LENGTH = 256
_STATFS_LENGTH = 256
_MEMORY_FILE_SYSTEMS = {0x01021994, 0x858458F6}
"""tmpfs and ramfs (statfs(2))."""
_MASK = struct.Struct("<I") if sys.byteorder == "little" else struct.Struct(">I")
_DIOALIGN_AT = 152
"""Of stx_dio_mem_align, with stx_dio_offset_align behind it, in struct statx (statx(2))."""


class Alignment(NamedTuple):
    """The multiples of bytes that reads of a file need: of addresses, of offsets and lengths."""

    memory: int
    offset: int


ANY = Alignment(1, 1)
USUAL = Alignment(4096, 4096)
"""If the kernel reports none: enough for every drive with sectors of 512 or 4096 bytes."""


class OpenFile(NamedTuple):
    """An open file, the alignment of its reads, and whether it surely lies in memory."""

    descriptor: int
    alignment: Alignment
    is_in_memory: bool = False


class OpenFiles:
    """The open files of a backend, each opened when it is first read. Safe for threads."""

    def __init__(self, open_file: Callable[[Path], OpenFile]) -> None:
        self._open_file = open_file
        self._files: dict[Path, OpenFile] = {}
        self._lock = threading.Lock()

    def get(self, path: Path) -> OpenFile:
        """Return the open file at `path`. Raises OSError if it cannot be opened."""
        try:
            return self._files[path]
        except KeyError:
            pass
        with self._lock:
            if path not in self._files:
                self._files[path] = self._open_file(path)
            return self._files[path]

    def close(self) -> None:
        """Close all files."""
        with self._lock:
            while self._files:
                os.close(self._files.popitem()[1].descriptor)


def open_buffered(path: Path) -> OpenFile:
    """Open a file to be read through the page cache."""
    return OpenFile(open_addressable(path), ANY, lies_in_memory(path))


def lies_in_memory(path: Path) -> bool:
    """Return whether a file is on tmpfs or ramfs.

    These take O_DIRECT without meaning it, and cannot report whether a read has to wait: none has.
    """
    return file_system_type(path) in _MEMORY_FILE_SYSTEMS


def file_system_type(path: AnyPath) -> int | None:
    """Return Linux's number of the type of a file's file system (statfs(2)); None if unknown."""
    if sys.platform != "linux":
        return None
    statfs = libc.function("statfs", ctypes.c_char_p, ctypes.c_char_p)
    buffer = ctypes.create_string_buffer(_STATFS_LENGTH)
    if statfs is None or statfs(os.fsencode(path), buffer):
        return None
    return ctypes.c_long.from_buffer(buffer).value & 0xFFFFFFFF


def open_direct(path: Path) -> OpenFile:
    """Open a file to be read past the page cache; raises OSError where that is not possible."""
    if sys.platform == "darwin":
        import fcntl

        descriptor = open_addressable(path)
        fcntl.fcntl(descriptor, getattr(fcntl, "F_NOCACHE", 48), 1)
        return OpenFile(descriptor, ANY)
    flag = getattr(os, "O_DIRECT", None)
    if flag is None:
        raise OSError(errno.EOPNOTSUPP, "this system has no O_DIRECT")
    descriptor = open_addressable(path, os.O_RDONLY | flag)
    try:
        return OpenFile(descriptor, _direct_alignment(descriptor))
    except OSError:
        os.close(descriptor)
        raise


def _direct_alignment(descriptor: int) -> Alignment:
    """Return the alignment of direct I/O on an open file, by statx.

    Kernels before 6.1, and file systems like tmpfs, do not report it: then it is a guess. A memory
    alignment of 0 means that this file cannot be read directly (statx(2)).
    """
    statx = libc.function(
        "statx", ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_uint, ctypes.c_char_p
    )
    buffer = ctypes.create_string_buffer(_STATX_LENGTH)
    if statx is None or statx(descriptor, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, buffer):
        return USUAL
    if not _MASK.unpack_from(buffer)[0] & _STATX_DIOALIGN:
        return USUAL
    memory, offset = (_MASK.unpack_from(buffer, _DIOALIGN_AT + at)[0] for at in (0, 4))
    if not memory or not offset:
        raise OSError(errno.EINVAL, "this file cannot be read with O_DIRECT")
    return Alignment(memory, offset)
