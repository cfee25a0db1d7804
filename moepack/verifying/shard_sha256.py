"""The SHA-256 of the shards that a whole pack is restored to, computed from the pack alone."""

import hashlib
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from moepack.reading.shard_map import ShardMap
from moepack.storage.regular_file import open_regular

_PIECE_LENGTH = 1 << 20


def sha256_of_shard(paths: Sequence[Path], shard: ShardMap, advanced: Callable[[int], None]) -> str:
    """Return the SHA-256 of a shard, whose pieces lie in the files `paths` of a sound pack.

    Raises OSError, and EOFError for a file that ends too early.
    """
    sha256 = hashlib.sha256()
    buffer = memoryview(bytearray(_PIECE_LENGTH))
    descriptors: dict[int, int] = {}
    position = 0
    with ExitStack() as stack:
        for piece in shard.pieces:
            if piece.file not in descriptors:
                descriptors[piece.file] = open_regular(paths[piece.file])
                stack.callback(os.close, descriptors[piece.file])
            _add_zeros(sha256, piece.shard_offset - position)
            position, done = piece.end, 0
            while done < piece.length:
                view = buffer[: piece.length - done]
                length = os.preadv(descriptors[piece.file], [view], piece.offset + done)
                if not length:
                    raise EOFError
                sha256.update(view[:length])
                advanced(length)
                done += length
    _add_zeros(sha256, shard.length - position)
    return sha256.hexdigest()


def _add_zeros(sha256: "hashlib._Hash", length: int) -> None:
    for start in range(0, length, _PIECE_LENGTH):
        sha256.update(bytes(min(_PIECE_LENGTH, length - start)))
