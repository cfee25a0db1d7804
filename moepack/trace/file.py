"""Moepack's own trace file: reading it. `file_writer` writes it.

The format is specified in layouts/TRACE.md; `file_frames` has the records, `file_records` what
they hold, and this what holds between them.
"""

from typing import NamedTuple, Self

import numpy as np

from moepack.errors import TraceError
from moepack.trace import file_frames, file_records
from moepack.trace.compressed import TraceStream
from moepack.trace.file_frames import Kind, Record, broken, place_of
from moepack.trace.file_records import Totals
from moepack.trace.model import Counts, Item, Items, Origin, Piece, Tokens, selected
from moepack.trace.validation import Checks

RECORDED = "recorded"
"""The format of origins that came from a recording."""
CUT = "the rest of a file that was cut, or is still being written"
"""What is left out where a file without an end is used: see `Checks.warnings`."""


class Position(NamedTuple):
    """Where in a file the next record goes, from its start, and what stands before."""

    offset: int = file_frames.HEADER.size
    totals: Totals = Totals()

    def after(self, head: bytes, end: int, item: Item | None) -> Self:
        """Return the position after one more record, by its header; None is one of no kind."""
        record_count, token_count, selection_count, chain = self.totals
        if isinstance(item, Tokens):
            token_count += len(item.request)
            selection_count += len(item.layer)
        chain = file_frames.chained(chain, head)
        return type(self)(end, Totals(record_count + 1, token_count, selection_count, chain))


class FileReader:
    """Reads a trace file record by record, and holds it against the rules of the format.

    When `items` came to its end, `is_whole` says whether the file has one; else it was cut, or is
    still being written. `position` is after the last record that is whole, before the end;
    `request_position` is before the request that is read last.
    """

    def __init__(self, stream: TraceStream, checks: Checks) -> None:
        self._stream = stream
        self._checks = checks
        self._origin: Origin | None = None
        self._request = -1
        self.position = self.request_position = Position()
        self.is_whole = False

    def items(self) -> Items:
        """Read what it holds. Raises TraceError for what is wrong in it."""
        file_frames.check_header(self._stream)
        while record := file_frames.next_record(self._stream, self.position.offset):
            try:
                item = self._item(record)
            except TraceError as error:
                error.path = error.path or self._stream.path
                error.place = error.place or place_of(self.position.offset)
                raise
            if self.is_whole:
                return
            place = place_of(self.position.offset)
            self.position = self.position.after(record.head, record.end, item)
            if isinstance(item, Origin):
                self.request_position = self.position
                yield item
            elif item is not None:
                yield _checked(item, self._checks, place)

    def _item(self, record: Record) -> Item | None:
        """Decode a record; None where it is skipped, or is the end."""
        if self._origin is None and record.kind != Kind.ORIGIN:
            raise TraceError("a record before any origin")
        if record.kind == Kind.END:
            self._read_end(record)
            return None
        if record.kind is None:
            return None
        item = file_records.decode(record.kind, record.payload)
        if isinstance(item, Origin):
            self._origin, self._request = item, -1
            place = place_of(self.position.offset)
            self._checks.state_origin(item, place)
        elif isinstance(item, Tokens):
            self._take_requests(item)
        return item

    def _take_requests(self, tokens: Tokens) -> None:
        first, last = int(tokens.request[0]), int(tokens.request[-1])
        if first < self._request:
            problem = "requests that fall from one record to the next"
            raise TraceError(problem, expected=f">= {self._request}", found=first)
        if last > self._request:
            self.request_position = self.position
        self._request = last

    def _read_end(self, record: Record) -> None:
        self.position.totals.check_end(record.payload)
        if self._stream.read(1):
            hint = "moepack trace import joins trace files"
            error = broken(self._stream, record.end, "something follows the end")
            error.place, error.hint = f"byte {record.end}", hint
            raise error
        self.is_whole = True


def read(stream: TraceStream, checks: Checks) -> Items:
    """Read a trace file record by record. Raises TraceError for what is wrong in it."""
    reader = FileReader(stream, checks)
    yield from reader.items()
    if reader.is_whole:
        return
    if checks.lenient:
        checks.warn(CUT, 1)
        return
    raise TraceError(
        "the file has no end: it was cut, or is still being written",
        path=stream.path,
        place=f"byte {reader.position.offset}",
        hint="`lenient=True` reads what is before that",
    )


def _checked(piece: Piece, checks: Checks, place: str) -> Piece:
    layer, expert = piece.layer.astype(np.int64), piece.expert.astype(np.int64)
    if isinstance(piece, Counts):
        return checks.counts(piece.phase, layer, expert, piece.counts, lambda _: place)
    right = checks.fitting(layer, expert, lambda _: place)
    fitting = piece if right is None else selected(piece, right)
    return checks.tokens(fitting, lambda _: place)
