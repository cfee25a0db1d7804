"""What stands in a written file already: the digests of its extents, and whether a run is right."""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from moepack import digest
from moepack.storage.extents import Extent, NewFile, Run, runs
from moepack.storage.regular_file import open_regular

_PIECE_LENGTH = 512 << 10


def digests_of(
    path: Path, extents: Iterable[Extent], advanced: Callable[[int], None] | None = None
) -> array[int]:
    """Compute the digests of a file's extents, from its bytes, in the order given.

    `advanced` is called with the bytes read since its last call. Raises OSError.
    """
    buffer = memoryview(bytearray(_PIECE_LENGTH))
    digests = array("Q")
    descriptor = open_regular(path, os.O_RDONLY | os.O_NOFOLLOW)
    with open(descriptor, "rb", buffering=0) as file:
        for extent in extents:
            digests.append(_digest_of(file.fileno(), extent, buffer, advanced))
    return digests


def is_whole(path: Path, file: NewFile, advanced: Callable[[int], None]) -> bool:
    """Say whether `file` stands at `path` to the byte, as far as its digests are known.

    `advanced` is called with the bytes that were found right since its last call. Raises OSError.
    """
    if path.is_symlink() or not path.is_file():
        return False
    buffer = memoryview(bytearray(_PIECE_LENGTH))
    with open(path, "rb", buffering=0, opener=open_regular) as held:
        if os.fstat(held.fileno()).st_size != file.length:
            return False
        for run in runs(file):
            if not is_right(held.fileno(), run, buffer):
                return False
            advanced(run.end - run.start)
    return True


def is_right(descriptor: int, run: Run, buffer: memoryview) -> bool:
    """Say whether a run stands there already: digests known and equal, and zeros between."""
    position = run.start
    for extent in run.extents:
        if extent.digest is None or not _is_zero(descriptor, position, extent.offset, buffer):
            return False
        if _digest_of(descriptor, extent, buffer) != extent.digest:
            return False
        position = extent.end
    return _is_zero(descriptor, position, run.end, buffer)


def _digest_of(
    descriptor: int,
    extent: Extent,
    buffer: memoryview,
    advanced: Callable[[int], None] | None = None,
) -> int:
    computed = digest.stream()
    for piece in _pieces(descriptor, extent.offset, extent.end, buffer):
        computed.update(piece)
        if advanced is not None:
            advanced(len(piece))
    return computed.intdigest()


def _is_zero(descriptor: int, start: int, end: int, buffer: memoryview) -> bool:
    length = 0
    for piece in _pieces(descriptor, start, end, buffer):
        length += len(piece)
        if bytes(piece).count(0) != len(piece):
            return False
    return length == end - start


def _pieces(descriptor: int, start: int, end: int, buffer: memoryview) -> Iterator[memoryview]:
    """Yield the bytes of a range of a file, as far as the file reaches."""
    while start < end:
        length = os.preadv(descriptor, [buffer[: end - start]], start)
        if not length:
            return
        yield buffer[:length]
        start += length
