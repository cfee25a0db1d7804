"""Reading moepack's own trace file; `file_writer` writes it.

The format is specified in layouts/TRACE.md: `file_records` has the payloads of records, this their
headers and frames, their chain, and the rules between them.
"""

import re
import struct
from typing import NamedTuple, Self

import numpy as np
from zstandard import (
    CONTENTSIZE_UNKNOWN,
    FRAME_HEADER,
    ZstdCompressor,
    ZstdDecompressor,
    ZstdError,
    get_frame_parameters,
)

from moepack.common import digest
from moepack.common.errors import TraceError
from moepack.traces import file_records
from moepack.traces.compressed import PIECE_LENGTH, TraceStream
from moepack.traces.file_records import Kind, wrong
from moepack.traces.model import Counts, Item, Items, Origin, Piece, Tokens, selected
from moepack.traces.validation import Checks

MAGIC = b"MOETRACE"
VERSION = 1
MAX_LENGTH = 1 << 26
"""Of a record, stored or not, in bytes."""
RECORDED = "recorded"
"""The format of origins that came from a recording."""
CUT = "the rest of a file that was cut, or is still being written"
"""The warning about a file without an end: see `Checks.warnings`."""
HEADER = struct.Struct("<8sII")
HEADER_DATA = HEADER.pack(MAGIC, VERSION, 0)
_RECORD = struct.Struct("<IIIIQ")
_END = struct.Struct("<QQQQ")
_OPTIONAL = 1
_SKIPPABLE = re.compile(rb"[\x50-\x5f]\x2a\x4d\x18")
"""The beginning of a skippable frame, in which zstd files may have anything."""
_MAX_FRAME_HEADER_LENGTH = 18
_LEVEL = 9


class Position(NamedTuple):
    """The offset of the next record in a file, in bytes, and the totals of those before it.

    `chain` is that of their digests.
    """

    offset: int = HEADER.size
    record_count: int = 0
    token_count: int = 0
    selection_count: int = 0
    chain: int = 0

    def after(self, head: bytes, item: Item | None) -> Self:
        """Return the position after the record with the header `head`; None is one of no kind."""
        tokens = item if isinstance(item, Tokens) else None
        return type(self)(
            self.offset + _RECORD.size + _RECORD.unpack(head)[1],
            self.record_count + 1,
            self.token_count + (len(tokens.request) if tokens else 0),
            self.selection_count + (len(tokens.layer) if tokens else 0),
            digest.xxh3(self.chain.to_bytes(8, "little") + head),
        )

    def __str__(self) -> str:
        """Name the record for a message."""
        return f"record at byte {self.offset}"

    def encode_end(self) -> bytes:
        """Encode the payload of the end, if it is here."""
        return _END.pack(*self[1:])

    def check_end(self, payload: bytes) -> None:
        """Raise TraceError if the payload of an end that is here differs."""
        file_records.expect_length(payload, _END.size)
        totals = zip(self._fields[1:], self[1:], _END.unpack(payload), strict=True)
        for name, expected, actual in totals:
            if actual != expected:
                words = name.replace("_", " ")
                raise wrong(f"its {words} is not that of the file", expected, actual)


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
        check_header(self._stream)
        while True:
            place = str(self.position)
            try:
                record = next_record(self._stream)
                if record is None:
                    return
                item = self._item(*record)
            except TraceError as error:
                if not (error.path and error.place):
                    error.place = f"{place}: {error.place}" if error.place else place
                error.path = error.path or self._stream.path
                raise
            if self.is_whole:
                return
            self.position = self.position.after(record[1], item)
            if isinstance(item, Origin):
                self.request_position = self.position
                yield item
            elif item is not None:
                yield _checked(item, self._checks, place)

    def _item(self, kind: Kind | None, head: bytes, payload: bytes) -> Item | None:
        """Decode a record; None for the end, and if it is skipped."""
        if self._origin is None and kind != Kind.ORIGIN:
            raise TraceError("a record before any origin")
        if kind is None:
            return None
        if kind == Kind.END:
            self.position.check_end(payload)
            if self._stream.read(1):
                place = f"byte {self.position.after(head, None).offset}"
                hint = "moepack trace import joins trace files"
                raise self._checks.error("something follows the end", place, hint=hint)
            self.is_whole = True
            return None
        item = file_records.decode(kind, payload)
        if isinstance(item, Origin):
            self._origin, self._request = item, -1
            self._checks.state_origin(item, str(self.position))
        elif isinstance(item, Tokens):
            first, last = int(item.request[0]), int(item.request[-1])
            if first < self._request:
                problem = "requests that fall from one record to the next"
                raise wrong(problem, f">= {self._request}", first)
            if last > self._request:
                self.request_position = self.position
            self._request = last
        return item


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
    fitting = piece if isinstance(right, slice) else selected(piece, right)
    return checks.tokens(fitting, lambda _: place)


def encode_record(kind: Kind, payload: bytes) -> tuple[bytes, bytes]:
    """Encode a record: its header, and the frame that stores the payload."""
    stored = ZstdCompressor(level=_LEVEL).compress(payload)
    return _RECORD.pack(kind, len(stored), len(payload), 0, digest.xxh3(payload)), stored


def check_header(stream: TraceStream) -> None:
    """Read the header of a file. Raises TraceError unless it is a trace file of this version."""
    header = stream.read_whole(HEADER.size)
    if len(header) < HEADER.size or not header.startswith(MAGIC):
        raise TraceError("not a trace file", path=stream.path, expected=MAGIC.decode())
    _, version, zero = HEADER.unpack(header)
    if version != VERSION:
        problem = "a trace file of another version"
        raise TraceError(problem, path=stream.path, expected=VERSION, found=version)
    if zero:
        raise TraceError("not zero", path=stream.path, place="byte 12", expected=0, found=zero)


def next_record(stream: TraceStream) -> tuple[Kind | None, bytes, bytes] | None:
    """Read the next record: its kind, None for an optional one to skip, its header and payload.

    None if the file ends there, or within it.

    Raises TraceError for one that is damaged, or required and of an unknown kind.
    """
    head = stream.read_whole(_RECORD.size)
    if len(head) < _RECORD.size:
        return None
    number, stored_length, length, flags, expected = _RECORD.unpack(head)
    kind = _kind(number, flags)
    for name, count in (("stored length", stored_length), ("length", length)):
        if count > MAX_LENGTH:
            raise wrong(f"{name} out of bounds", f"<= {MAX_LENGTH:,}", f"{count:,}")
    stored = stream.read_whole(stored_length)
    payload = _unpack(stored, length, stored_length)
    if payload is None:
        return None
    if digest.xxh3(payload) != expected:
        actual = digest.to_text(digest.xxh3(payload))
        raise wrong("damaged: it does not have its digest", digest.to_text(expected), actual)
    return kind, head, payload


def _kind(number: int, flags: int) -> Kind | None:
    """Return the kind of a record; None for an unknown, optional one."""
    if flags & ~_OPTIONAL:
        raise wrong("unknown flags", "0 or 1", flags)
    if number in set(Kind):
        if flags:
            raise wrong(f"a record of kind {number} cannot be optional")
        return Kind(number)
    if not flags:
        problem = f"a record of kind {number}, which this version of moepack does not know"
        raise TraceError(problem, hint="was the file written by a newer moepack, or damaged?")
    return None


def _unpack(stored: bytes, length: int, stored_length: int) -> bytes | None:
    """Unpack a record's one frame; None if the file ends before the frame does.

    The beginning of a frame that is cut has to be right too, and no longer than the payload.
    """
    _check_frame_header(stored, length)
    frame = ZstdDecompressor(max_window_size=MAX_LENGTH).decompressobj()
    payload, end = bytearray(), 0
    try:
        while end < len(stored) and len(payload) <= length and not frame.eof:
            payload += frame.decompress(stored[end : end + PIECE_LENGTH])
            end += PIECE_LENGTH
    except ZstdError as error:
        raise wrong(f"damaged: {error}") from None
    is_cut = len(stored) < stored_length
    if is_cut and frame.eof:  # else the records behind a damaged length would pass for cut off
        raise wrong("damaged: its frame ends early", stored_length, len(stored))
    if len(payload) > length or (frame.eof and len(payload) < length):
        actual = f"more than {length:,}" if len(payload) > length else f"{len(payload):,}"
        raise wrong("its frame has another length", f"{length:,}", actual)
    if is_cut:
        return None
    if not frame.eof:
        raise wrong("its frame has no end")
    if frame.unused_data or end < len(stored):
        raise wrong("something follows its frame")
    return bytes(payload)


def _check_frame_header(stored: bytes, length: int) -> None:
    """Check the header of a frame for a payload of `length` bytes, as far as the file has it."""
    magic = stored[: len(FRAME_HEADER)]
    if not FRAME_HEADER.startswith(magic):
        problem = "a skippable frame" if _SKIPPABLE.match(magic) else "no zstd frame"
        raise wrong(problem, FRAME_HEADER.hex(" "), magic.hex(" "))
    try:
        header = get_frame_parameters(stored[:_MAX_FRAME_HEADER_LENGTH])
    except ZstdError:  # it is cut, or unpacking will name the fault
        return
    if header.dict_id:
        raise wrong("its frame needs a dictionary", "none", header.dict_id)
    if header.content_size not in (CONTENTSIZE_UNKNOWN, length):
        raise wrong("its frame has another length", f"{length:,}", f"{header.content_size:,}")
    # Not left to the unpacker, which never needs the window of a frame that fits into its buffer.
    if header.window_size > MAX_LENGTH:
        problem, expected = "the window of its frame out of bounds", f"<= {MAX_LENGTH:,}"
        raise wrong(problem, expected, f"{header.window_size:,}")
