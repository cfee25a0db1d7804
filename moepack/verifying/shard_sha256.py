"""The SHA-256 of the shards that a whole pack is restored to, computed from the pack alone."""

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from moepack.reading.shard_map import ShardMap, ShardPiece
from moepack.storage.regular_file import open_regular, read_whole
from moepack.storage.thread_pool import run_each

_PIECE_LENGTH = 1 << 20


def sha256_of_shards(
    paths: Sequence[Path],
    shards: Sequence[ShardMap],
    threads: int,
    progress: Callable[[int, int], None] | None,
) -> list[str]:
    """Return the SHA-256 of each shard; `progress` is called as for `verify`.

    Raises OSError, and EOFError for a file that ends too early.
    """
    total = sum(piece.length for shard in shards for piece in shard.pieces)

    def compute(shard: ShardMap, advanced: Callable[[int], None]) -> str:
        return sha256_of_shard(paths, shard, advanced)

    def advanced(length: int) -> None:
        if progress is not None:
            progress(length, total)

    return run_each(compute, shards, threads, advanced)


def sha256_of_shard(paths: Sequence[Path], shard: ShardMap, advanced: Callable[[int], None]) -> str:
    """Return the SHA-256 of a shard, whose pieces lie in the files `paths` of a sound pack.

    Raises OSError, and EOFError for a file that ends too early.
    """
    sha256 = hashlib.sha256()
    descriptors: dict[int, int] = {}
    position = 0
    with ExitStack() as stack:
        for piece in shard.pieces:
            if piece.file not in descriptors:
                descriptors[piece.file] = open_regular(paths[piece.file])
                stack.callback(os.close, descriptors[piece.file])
            _add_zeros(sha256, piece.shard_offset - position)
            position = piece.end
            for data in _data(descriptors[piece.file], piece):
                sha256.update(data)
                advanced(len(data))
    _add_zeros(sha256, shard.length - position)
    return sha256.hexdigest()


def _data(descriptor: int, piece: ShardPiece) -> Iterator[bytearray | memoryview]:
    """Yield the bytes of a piece, decoded where it is a frame."""

    def read_at(offset: int, length: int) -> bytearray:
        return read_whole(descriptor, piece.offset + offset, length)

    if piece.frame_length:
        from moepack.storage.frames import FrameStream  # it loads the codec

        yield from FrameStream(read_at, piece.frame_length, piece.length).pieces(_PIECE_LENGTH)
        return
    for start in range(0, piece.length, _PIECE_LENGTH):
        yield read_at(start, min(_PIECE_LENGTH, piece.length - start))


def _add_zeros(sha256: "hashlib._Hash", length: int) -> None:
    for start in range(0, length, _PIECE_LENGTH):
        sha256.update(bytes(min(_PIECE_LENGTH, length - start)))
