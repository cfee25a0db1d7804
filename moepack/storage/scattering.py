"""Copy extents into new files in the order of the inputs: for inputs that are far away.

`copying` asks for the bytes of one file after the other, an extent at a time. Where each request
costs a round trip, or is counted, it is better to read the inputs from their start to their end in
long ranges, and to write each byte where it belongs. Memory is bounded by the ranges in flight.
"""

from __future__ import annotations

import hashlib
import os
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple

from moepack.common import digest
from moepack.storage.copying import WrittenFile, create
from moepack.storage.extents import Extent, NewFile
from moepack.storage.inputs import Inputs
from moepack.storage.regular_file import write_at
from moepack.storage.thread_pool import ThreadPool

RANGE_LENGTH = 8 << 20
"""Bytes that are asked for at a time."""
MAX_GAP = 1 << 20
"""Bytes between two extents that are read and dropped: another request would cost more."""


class _Target(NamedTuple):
    """An extent, its number within its file, and the file."""

    extent: Extent
    number: int
    file: _NewFile


class _Span(NamedTuple):
    """A stretch of an input that is read from `start` to `end`; extents lie in it, in order."""

    input: int
    start: int
    end: int
    targets: tuple[_Target, ...]


class Scatterer:
    """Fills new files in the folder `target` from `inputs`, in the order of the inputs.

    `advanced` is called with the bytes written since its last call. If an input is read whole, and
    its stamp has a SHA-256, its bytes must have it.
    """

    def __init__(self, target: Path, inputs: Inputs, advanced: Callable[[int], None]) -> None:
        self._target = target
        self._inputs = inputs
        self._advanced = advanced

    def write(
        self, files: Sequence[NewFile], threads: int, finished: Callable[[WrittenFile], None]
    ) -> None:
        """Write and sync `files`, with `threads` ranges in flight; call `finished` after each.

        Each file is locked until `finished` has returned. The first failure ends all requests and
        is raised; RequestError if another process writes one of the files.
        """
        opened: list[_NewFile] = []
        try:
            opened += (_NewFile(file, self._target) for file in files)
            spans = list(_spans(opened, self._inputs))
            for file in opened:
                if file.is_whole:
                    self._end(file, finished)
            with ThreadPool(max_workers=threads) as executor:
                pieces = self._pieces(spans, executor, threads)
                for span in spans:
                    for file in self._scatter(span, pieces):
                        self._end(file, finished)
        finally:
            for file in opened:
                file.close()

    def _end(self, file: _NewFile, finished: Callable[[WrittenFile], None]) -> None:
        finished(file.finish())
        file.close()

    def _pieces(
        self, spans: Iterable[_Span], executor: ThreadPool, threads: int
    ) -> Iterator[bytes]:
        """Yield the bytes of all spans, in order, while the next ranges are on their way."""
        ranges = (
            (span.input, start, min(RANGE_LENGTH, span.end - start))
            for span in spans
            for start in range(span.start, span.end, RANGE_LENGTH)
        )
        in_flight: deque[Future[list[bytes]]] = deque()
        for each in ranges:
            in_flight.append(executor.submit(self._inputs.pieces, *each))
            if len(in_flight) == threads:
                yield from in_flight.popleft().result()
        while in_flight:
            yield from in_flight.popleft().result()

    def _scatter(self, span: _Span, pieces: Iterator[bytes]) -> Iterator[_NewFile]:
        """Write the extents of a span; yield each file that has all of its extents now."""
        is_whole = (span.start, span.end) == (0, self._inputs.length(span.input))
        whole = hashlib.sha256() if is_whole and self._inputs.sha256(span.input) else None
        computed = digest.stream()
        targets = iter(span.targets)
        target = next(targets, None)
        position = span.start
        while position < span.end:
            piece = memoryview(next(pieces))
            if whole is not None:
                whole.update(piece)
            piece_end = position + len(piece)
            while target is not None and target.extent.input_offset < piece_end:
                extent, number, file = target
                start = max(extent.input_offset, position)
                end = min(extent.input_offset + extent.length, piece_end)
                part = piece[start - position : end - position]
                computed.update(part)
                file.write(part, extent.offset + start - extent.input_offset)
                if end < extent.input_offset + extent.length:
                    break
                self._inputs.check_digest(extent, computed.intdigest())
                self._advanced(extent.length)
                file.enter(number, computed.intdigest())
                if file.is_whole:
                    yield file
                computed.reset()
                target = next(targets, None)
            position = piece_end
        if whole is not None:
            self._inputs.check_sha256(span.input, whole.hexdigest())


class _NewFile:
    """A new file, locked; what no extent covers is zeros from the beginning."""

    def __init__(self, file: NewFile, target: Path) -> None:
        self.name = file.name
        self.extents = tuple(file.extents())
        self._digests = array("Q", [digest.xxh3(b"")]) * len(self.extents)
        self._left = sum(extent.length > 0 for extent in self.extents)
        self._descriptor = create(target / file.name)
        os.ftruncate(self._descriptor, file.length)

    def write(self, data: memoryview, offset: int) -> None:
        """Write bytes at `offset`."""
        write_at(self._descriptor, data, offset)

    def enter(self, number: int, computed: int) -> None:
        """Enter the digest of an extent that is written."""
        self._digests[number] = computed
        self._left -= 1

    @property
    def is_whole(self) -> bool:
        """Whether all extents are written; an empty one is from the beginning."""
        return not self._left

    def finish(self) -> WrittenFile:
        """Sync the file."""
        os.fsync(self._descriptor)
        return WrittenFile(self.name, self._digests)

    def close(self) -> None:
        """Close the file, whole or not."""
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            os.close(descriptor)


def _spans(files: Iterable[_NewFile], inputs: Inputs) -> Iterator[_Span]:
    """Gather the extents of all files to stretches of the inputs.

    The ends of an input are read with what is near them, so that its bytes can be checked whole.
    """
    targets = [
        _Target(extent, number, file)
        for file in files
        for number, extent in enumerate(file.extents)
        if extent.length
    ]
    targets.sort(key=lambda target: (target.extent.input, target.extent.input_offset))
    pending: list[_Target] = []
    start = end = 0
    for target in targets:
        extent = target.extent
        is_near = 0 <= extent.input_offset - end <= MAX_GAP
        if pending and not (pending[0].extent.input == extent.input and is_near):
            yield _span(pending, start, end, inputs)
            pending = []
        if not pending:
            start = 0 if extent.input_offset <= MAX_GAP else extent.input_offset
        pending.append(target)
        end = extent.input_offset + extent.length
    if pending:
        yield _span(pending, start, end, inputs)


def _span(targets: Sequence[_Target], start: int, end: int, inputs: Inputs) -> _Span:
    number = targets[0].extent.input
    length = inputs.length(number)
    return _Span(number, start, length if 0 < length - end <= MAX_GAP else end, tuple(targets))
