"""The file system of a mounted pack: one folder of read-only files, the shards of the source.

Method names, and the keys of attributes, are those of libfuse's operations (fuse.h), as mfusepy
passes them on; only `read` is given the memory to fill. Reads go through the page cache and their
digests are not compared: the kernel asks for ranges that are shorter than a part.
"""

from __future__ import annotations

import errno
import os
import stat
from bisect import bisect_right
from typing import TYPE_CHECKING

from moepack.common.errors import MoepackError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from moepack.pack.reading.shard_map import ShardMap
    from moepack.storage.extents import Extent
    from moepack.storage.inputs import Inputs

_BLOCK_LENGTH = 512
"""The unit of st_blocks."""


class ShardView:
    """The bytes of one shard; may be read from several threads.

    `inputs` are the files of the pack, in the order of its index.
    """

    def __init__(self, shard: ShardMap, inputs: Inputs) -> None:
        self.name = shard.name
        self.length = shard.length
        self._pieces = shard.pieces
        self._starts = [piece.offset for piece in shard.pieces]
        self._inputs = inputs

    def read_into(self, view: memoryview, offset: int) -> int:
        """Fill `view` with the bytes from `offset` of the shard, as far as that goes.

        Returns their count, less than the length of the view only where the shard ends. Raises
        PackError or MachineError, naming the part or tensor that cannot be read.
        """
        length = max(0, min(len(view), self.length - offset))
        done, number = 0, max(0, bisect_right(self._starts, offset) - 1)
        while number < len(self._pieces) and self._starts[number] < offset + length:
            piece = self._pieces[number]
            first = max(piece.offset - offset, 0)
            last = max(first, min(piece.end - offset, length))
            view[done:first] = bytes(first - done)
            place = piece.input_offset + offset + first - piece.offset
            self._fill(view[first:last], piece, place)
            done, number = last, number + 1
        view[done:length] = bytes(length - done)
        return length

    def _fill(self, view: memoryview, piece: Extent, place: int) -> None:
        try:
            while view:
                length = self._inputs.read_into(piece.input, place, view)
                view, place = view[length:], place + length
        except MoepackError as error:
            error.place = f"{piece.label} at byte {piece.input_offset:,}"
            raise


class FileSystem:
    """The shards of one pack as files.

    All of them have the time `time_ns`. `started` is called once, at the kernel's first request;
    `failed` once for each part or tensor that could not be read. Both run in a thread of libfuse's.
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
        """Note that the kernel has mounted it."""
        self.has_started = True
        self._started()

    def getattr(self, path: str, handle: int | None = None) -> dict[str, int]:
        """Return the attributes of the folder or a file, as stat(2) does."""
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
        """Read bytes of a shard into `view` and return their count; EIO if they cannot be read."""
        try:
            return self._shard(path).read_into(view, offset)
        except MoepackError as error:
            # Readers try again for each of its pages.
            if (error.path, error.place) not in self._reported:
                self._reported.add((error.path, error.place))
                self._failed(error)
            raise OSError(errno.EIO, os.strerror(errno.EIO), path) from None

    def _shard(self, path: str) -> ShardView:
        try:
            return self._shards[path]
        except KeyError:
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT), path) from None
