"""libfuse, by way of mfusepy: no other module needs either."""

import ctypes
import os
from typing import Any

import mfusepy

from moepack.pack.mounting.file_system import FileSystem

# The kernel's read-ahead stays as it is, 128 KiB: with 1 MiB or more, reading from start to end
# takes a third less of the processor's time, but parts at random by mmap take twice as long.
_OPTIONS: dict[str, Any] = {
    "foreground": True,
    "ro": True,
    "fsname": "moepack",
    "subtype": "moepack",
    "kernel_cache": True,  # nothing here ever changes
    "attr_timeout": 86400,
    "entry_timeout": 86400,
    "negative_timeout": 86400,
}
_IDLE_THREAD_COUNT = 10
"""libfuse's former default, https://github.com/libfuse/libfuse/issues/1003."""


class FuseServer(mfusepy.FUSE):  # type: ignore[misc]
    """Mounts a FileSystem at a path and serves it, until it is unmounted, in its constructor.

    libfuse ends on SIGINT, SIGTERM and SIGHUP unless somebody handles them. Raises RuntimeError
    with libfuse's code, after a signal too.
    """

    def __init__(self, system: FileSystem, path: str) -> None:
        options = dict(_OPTIONS)
        if mfusepy.fuse_version_major > 2:  # which does not know it
            options["max_idle_threads"] = _IDLE_THREAD_COUNT
        super().__init__(system, path, **options)

    def read(self, path: bytes, buffer: Any, length: int, offset: int, _info: Any) -> int:
        """Read into libfuse's own memory.

        mfusepy would pass bytes objects, which takes three times the processor's time.
        """
        memory = (ctypes.c_char * length).from_address(ctypes.addressof(buffer.contents))
        view = memoryview(memory).cast("B")
        system: FileSystem = self.operations
        return system.read(os.fsdecode(path), view, offset)
