"""Reading moepack's own trace file; `file_writer` writes it.

The format is specified in layouts/TRACE.md; `file_frames` has the records, `file_records` their
payloads, and this the rules between them.
"""

import numpy as np

from moepack.common.errors import TraceError
from moepack.traces import file_frames, file_records
from moepack.traces.compressed import TraceStream
from moepack.traces.file_frames import Kind, TraceRecord
from moepack.traces.file_records import Position
from moepack.traces.model import Counts, Item, Items, Origin, Piece, Tokens, selected
from moepack.traces.validation import Checks

RECORDED = "recorded"
"""The format of origins that came from a recording."""
CUT = "the rest of a file that was cut, or is still being written"
"""The warning about a file without an end: see `Checks.warnings`."""


class FileReader:
    """Reads a trace file record by record, and checks it by the rules of the format.

    After `items`, `is_whole` is whether the file has an end; else it was cut, or is still being
    written. `position` is after the last whole record, before the end; `request_position` is before
    the last request.
    """

    def __init__(self, stream: TraceStream, checks: Checks) -> None:
        self._stream = stream
        self._checks = checks
        self._origin: Origin | None = None
        self._request = -1
        self.position = self.request_position = Position()
        self.is_whole = False

    def items(self) -> Items:
        """Yield the items of the file. Raises TraceError for faults."""
        file_frames.check_header(self._stream)
        while True:
            place = str(self.position)
            try:
                record = file_frames.next_record(self._stream)
                if record is None:
                    return
                item = self._item(record)
            except TraceError as error:
                error.path = error.path or self._stream.path
                error.place = error.place or place
                raise
            if self.is_whole:
                return
            self.position = self.position.after(record.head, record.length, item)
            if isinstance(item, Origin):
                self.request_position = self.position
                yield item
            elif item is not None:
                yield _checked(item, self._checks, place)

    def _item(self, record: TraceRecord) -> Item | None:
        """Decode a record; None for the end, and if it is skipped."""
        if self._origin is None and record.kind != Kind.ORIGIN:
            raise TraceError("a record before any origin")
        if record.kind is None:
            return None
        if record.kind == Kind.END:
            self.position.check_end(record.payload)
            if self._stream.read(1):
                place = f"byte {self.position.offset + record.length}"
                hint = "moepack trace import joins trace files"
                raise TraceError("something follows the end", place=place, hint=hint)
            self.is_whole = True
            return None
        item = file_records.decode(record.kind, record.payload)
        if isinstance(item, Origin):
            self._origin, self._request = item, -1
            self._checks.state_origin(item, str(self.position))
        elif isinstance(item, Tokens):
            self._add_requests(int(item.request[0]), int(item.request[-1]))
        return item

    def _add_requests(self, first: int, last: int) -> None:
        if first < self._request:
            problem = "requests that fall from one record to the next"
            raise TraceError(problem, expected=f">= {self._request}", found=first)
        if last > self._request:
            self.request_position = self.position
        self._request = last


def read(stream: TraceStream, checks: Checks) -> Items:
    """Read a trace file record by record. Raises TraceError for faults."""
    reader = FileReader(stream, checks)
    yield from reader.items()
    if reader.is_whole:
        return
    if checks.lenient:
        checks.warn(CUT, 1)
        return
    problem = "the file has no end: it was cut, or is still being written"
    hint = "`lenient=True` reads the records before that"
    raise checks.error(problem, f"byte {reader.position.offset}", hint=hint)


def _checked(piece: Piece, checks: Checks, place: str) -> Piece:
    layer, expert = piece.layer.astype(np.int64), piece.expert.astype(np.int64)
    if isinstance(piece, Counts):
        return checks.counts(piece.phase, layer, expert, piece.counts, lambda _: place)
    right = checks.fitting(layer, expert, lambda _: place)
    fitting = piece if right is None else selected(piece, right)
    return checks.tokens(fitting, lambda _: place)
