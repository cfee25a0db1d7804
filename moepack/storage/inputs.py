"""The files that a copy reads: open, checked for changes, with errors by fault.

Where each request costs a round trip, or is counted, they are read once, from start to end, in long
ranges that threads read ahead. Memory is bounded by the ranges in flight.
"""

import contextlib
import hashlib
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import NamedTuple, Self

from moepack.common import digest
from moepack.common.errors import MoepackError, open_failure, read_failure
from moepack.common.paths import AnyPath
from moepack.storage.extents import Extent
from moepack.storage.input_file import InputFile, Stamp, open_input
from moepack.storage.regular_file import NotRegularError
from moepack.storage.remote.store import RemoteStamp
from moepack.storage.thread_pool import ThreadPool

RANGE_LENGTH = 8 << 20
"""Bytes of one request."""
MAX_GAP = 1 << 20
"""Bytes between two extents that are read and dropped: another request would cost more."""
VERIFY_HINT = "run `moepack verify` on the pack"


class Inputs:
    """The open input files of a copy, for positioned reads from any thread.

    `fault` is the error for an input that cannot be read, is too short or has changed since it had
    its stamp in `stamps`; without stamps, changes are not looked for. `data` are inputs in memory;
    their numbers follow those of the files.
    """

    def __init__(
        self,
        paths: Sequence[AnyPath],
        fault: type[MoepackError],
        data: Sequence[bytes] = (),
        *,
        stamps: Sequence[Stamp] = (),
    ) -> None:
        self.paths = list(paths)
        self.fault = fault
        self._data = data
        self._stamps = stamps
        self._files: list[InputFile] = []

    def __enter__(self) -> Self:
        try:
            for path in self.paths:
                self._files.append(self._open(path))
            self.check_unchanged()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        while self._files:
            self._files.pop().close()

    def _open(self, path: AnyPath) -> InputFile:
        try:
            return open_input(path)
        except FileNotFoundError:
            raise self.fault("the file is missing", path=path) from None
        except NotRegularError as error:
            raise self.fault("not a regular file", path=path, found=error.kind) from None
        except OSError as error:
            raise open_failure(error, path) from None

    def read_into(self, number: int, offset: int, buffer: memoryview) -> int:
        """Read up to len(buffer) bytes from `offset` of an input; at least one comes back."""
        if number >= len(self.paths):
            data = self._data[number - len(self.paths)][offset : offset + len(buffer)]
            buffer[: len(data)] = data
            return len(data)
        path, place = self.paths[number], f"byte {offset:,}"
        try:
            length = self._files[number].read_into(offset, buffer)
        except OSError as error:
            raise read_failure(error, path, self.fault, place) from error
        if not length:
            raise self.fault("the file became shorter", path=path, place=place)
        return length

    def stream(self, number: int, offset: int, length: int) -> Iterator[bytes]:
        """Yield exactly `length` bytes from `offset` of an input, in pieces as they come."""
        path, place, end = self.paths[number], f"byte {offset:,}", offset + length
        try:
            for piece in self._files[number].stream(offset, length):
                offset += len(piece)
                yield piece
        except OSError as error:
            raise read_failure(error, path, self.fault, place) from error
        if offset < end:
            raise self.fault("the file became shorter", path=path, place=place)

    def read(self, number: int, offset: int, length: int) -> bytes:
        """Read exactly `length` bytes from `offset` of an input."""
        return b"".join(self.stream(number, offset, length))

    def descriptor(self, number: int) -> int | None:
        """Return the descriptor of an input; None if it is in memory, or not on this machine."""
        return self._files[number].descriptor if number < len(self.paths) else None

    def length(self, number: int) -> int:
        """Return the length of an input."""
        if number < len(self.paths):
            return self._files[number].stamp.length
        return len(self._data[number - len(self.paths)])

    def sha256(self, number: int) -> str | None:
        """Return the SHA-256 that an input's bytes must have, None if that is not known."""
        stamp = self._files[number].stamp
        return stamp.sha256 if isinstance(stamp, RemoteStamp) else None

    def check_sha256(self, number: int, computed: str) -> None:
        """Raise `fault` if the SHA-256 of an input is known, and its bytes have another."""
        expected = self.sha256(number)
        if expected not in (None, computed):
            raise self.fault(
                "other bytes than the hub states: the SHA-256 differs",
                path=self.paths[number],
                expected=expected,
                found=computed,
                hint="remove the unfinished pack and begin again; nothing was committed",
            )

    def check_digest(self, extent: Extent, computed: int) -> None:
        """Raise `fault` if an extent's digest is known, and its bytes have another."""
        if extent.digest is not None and extent.digest != computed:
            raise self.fault(
                "the bytes do not have the digest in the index",
                path=self.paths[extent.input],
                place=f"{extent.label} at byte {extent.input_offset:,}",
                expected=digest.to_text(extent.digest),
                found=digest.to_text(computed),
                hint=VERIFY_HINT,
            )

    def check_unchanged(self) -> None:
        """Raise `fault` if an input, opened or at its path, does not have its stamp any more."""
        for number, stamp in enumerate(self._stamps):
            with contextlib.suppress(OSError):
                if self._files[number].stamp == stamp == self._files[number].current_stamp():
                    continue
            hint = "wait until it is complete, then begin again from the start"
            path = self.paths[number]
            raise self.fault("the file changed while it was being read", path=path, hint=hint)


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
        """Read up to len(buffer) bytes of the next extent, one at least. Raises as the inputs."""
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
            in_flight.append(executor.submit(list, inputs.stream(number, offset, length)))
            if len(in_flight) == range_count:
                yield from in_flight.popleft().result()
    while in_flight:
        yield from in_flight.popleft().result()
