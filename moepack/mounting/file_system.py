"""The answers to what the kernel asks of a mounted pack: one folder of read-only files.

Method names, and the keys of attributes, are those of libfuse's operations (fuse.h), as mfusepy
passes them on; only `read` is given the memory to fill.
"""

from __future__ import annotations

import errno
import os
import stat
from typing import TYPE_CHECKING

from moepack.errors import MoepackError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from moepack.mounting.shard_view import ShardView

_BLOCK_LENGTH = 512
"""What st_blocks counts in."""


class FileSystem:
    """The shards of one pack as files.

    `time_ns` is the time that all of them show. `started` is called once, when the kernel sends its
    first request; `failed` with what could not be read, once for each part or tensor. Both come
    from a thread of libfuse's.
    """

    use_ns = True  # mfusepy asks whether times are in nanoseconds

    def __init__(
        self,
        shards: Sequence[ShardView],
        time_ns: int,
        started: Callable[[], None],
        failed: Callable[[MoepackError], None],
    ) -> None:
        self._shards = {f"/{shard.name}": shard for shard in shards}
        self._times = dict.fromkeys(("st_atime", "st_mtime", "st_ctime"), time_ns)
        self._owner = {"st_uid": os.getuid(), "st_gid": os.getgid()}
        self._started = started
        self._failed = failed
        self._reported: set[tuple[str | None, str | None]] = set()
        self.has_started = False

    def init(self, path: str) -> None:
        """Take note that the kernel has mounted it."""
        self.has_started = True
        self._started()

    def getattr(self, path: str, handle: int | None = None) -> dict[str, int]:
        """Return what stat(2) says of the folder or a file."""
        if path == "/":
            return {"st_mode": stat.S_IFDIR | 0o555, "st_nlink": 2, **self._owner, **self._times}
        length = self._shard(path).length
        return {
            "st_mode": stat.S_IFREG | 0o444,
            "st_nlink": 1,
            "st_size": length,
            "st_blocks": -(-length // _BLOCK_LENGTH),
            **self._owner,
            **self._times,
        }

    def readdir(self, path: str, handle: int) -> list[str]:
        """List the folder."""
        return [".", "..", *(name[1:] for name in self._shards)]

    def read(self, path: str, view: memoryview, offset: int) -> int:
        """Read bytes of a shard into `view` and return how many; EIO for what cannot be read."""
        try:
            return self._shard(path).read_into(view, offset)
        except MoepackError as error:
            self._report(error)
            raise OSError(errno.EIO, os.strerror(errno.EIO), path) from None

    def _shard(self, path: str) -> ShardView:
        try:
            return self._shards[path]
        except KeyError:
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT), path) from None

    def _report(self, error: MoepackError) -> None:
        """Pass an error on, but not for each of the pages that a reader tries again."""
        what = (error.path, error.place)
        if what not in self._reported:
            self._reported.add(what)
            self._failed(error)
