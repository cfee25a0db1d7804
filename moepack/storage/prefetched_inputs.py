"""Inputs read once, from start to end, in long ranges that threads read ahead.

Where each request costs a round trip, or is counted, extents are copied in the order of the inputs.
Memory is bounded by the ranges in flight.
"""

import hashlib
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import NamedTuple

from moepack.storage.extents import Extent
from moepack.storage.inputs import Inputs
from moepack.storage.thread_pool import ThreadPool

RANGE_LENGTH = 8 << 20
"""Bytes of one request."""
MAX_GAP = 1 << 20
"""Bytes between two extents that are read and dropped: another request would cost more."""


class _Span(NamedTuple):
    """Bytes of an input that are read from `start` to `end`."""

    input: int
    start: int
    end: int


class PrefetchedInputs:
    """The bytes of `extents`, which are in the order of `inputs`.

    `executor` reads up to `range_count` ranges ahead. If an input is read whole, and its stamp has
    a SHA-256, its bytes must have it.
    """

    def __init__(
        self, inputs: Inputs, extents: Sequence[Extent], executor: ThreadPool, range_count: int
    ) -> None:
        self._inputs = inputs
        spans = list(_spans(inputs, extents))
        self._spans = iter(spans)
        self._pieces = _pieces(inputs, spans, executor, range_count)
        self._piece = memoryview(b"")
        self._span = _Span(-1, 0, 0)
        self._position = 0
        self._sha256: hashlib._Hash | None = None

    def read_into(self, number: int, offset: int, buffer: memoryview) -> int:
        """Read up to len(buffer) bytes of the next extent; at least one comes back.

        Raises the errors of the inputs.
        """
        while number != self._span.input or not self._position <= offset < self._span.end:
            self.finish_span()
            self._span = next(self._spans)
            self._position = self._span.start
            is_whole = self._span[1:] == (0, self._inputs.length(self._span.input))
            is_known = is_whole and self._inputs.sha256(self._span.input) is not None
            self._sha256 = hashlib.sha256() if is_known else None
        self._skip_to(offset)
        piece = self._take(len(buffer))
        buffer[: len(piece)] = piece
        return len(piece)

    def finish_span(self) -> None:
        """Read what is left near the last extent; raise if the input has not its SHA-256."""
        self._skip_to(self._span.end)
        if self._sha256 is not None:
            self._inputs.check_sha256(self._span.input, self._sha256.hexdigest())

    def _skip_to(self, offset: int) -> None:
        while self._position < offset:
            self._take(offset - self._position)

    def _take(self, limit: int) -> memoryview:
        """Return the next bytes, at most `limit`."""
        piece = self._piece or memoryview(next(self._pieces))
        data, self._piece = piece[:limit], piece[limit:]
        if self._sha256 is not None:
            self._sha256.update(data)
        self._position += len(data)
        return data


def _spans(inputs: Inputs, extents: Sequence[Extent]) -> Iterator[_Span]:
    """Join extents that are near each other.

    The ends of an input are read with what is near them, so that its bytes can be checked whole.
    """
    spans: list[_Span] = []
    for extent in extents:
        start, end = extent.input_offset, extent.input_offset + extent.length
        is_same = bool(spans) and spans[-1].input == extent.input
        if is_same and 0 <= start - spans[-1].end <= MAX_GAP:
            start = spans.pop().start
        elif start <= MAX_GAP:
            start = 0
        spans.append(_Span(extent.input, start, end))
    for number, start, end in spans:
        length = inputs.length(number)
        yield _Span(number, start, length if 0 < length - end <= MAX_GAP else end)


def _pieces(
    inputs: Inputs, spans: Sequence[_Span], executor: ThreadPool, range_count: int
) -> Iterator[bytes]:
    """Yield the bytes of spans, while the next ranges are on their way."""
    in_flight: deque[Future[list[bytes]]] = deque()
    for number, start, end in spans:
        for offset in range(start, end, RANGE_LENGTH):
            length = min(RANGE_LENGTH, end - offset)
            in_flight.append(executor.submit(inputs.pieces, number, offset, length))
            if len(in_flight) == range_count:
                yield from in_flight.popleft().result()
    while in_flight:
        yield from in_flight.popleft().result()
