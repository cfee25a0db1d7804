"""A trace file as records: the header, each record's header, frame and digest, and their chain.

The format is specified in layouts/TRACE.md; `file_records` knows what the payloads hold.
"""

import struct
from enum import IntEnum
from typing import Any, NamedTuple

from moepack import digest
from moepack.errors import TraceError
from moepack.trace.compressed import TraceStream, zstd

MAGIC = b"MOETRACE"
VERSION = 1
MAX_LENGTH = 1 << 26
"""Of a record, stored or not, in bytes."""
HEADER = struct.Struct("<8sII")
_RECORD = struct.Struct("<IIIIQ")
_OPTIONAL = 1
_WINDOW = {int(zstd.DecompressionParameter.window_log_max): MAX_LENGTH.bit_length() - 1}
"""What unpacking may remember: no more than a record holds."""
_LEVEL = 9


class Kind(IntEnum):
    """What a record holds."""

    ORIGIN = 1
    TOKENS = 2
    COUNTS = 3
    END = 4


class Record(NamedTuple):
    """A record as it was read: its `kind`, None for an optional one that is to be skipped.

    `head` is its header; `end` is the offset behind it.
    """

    kind: Kind | None
    head: bytes
    payload: bytes
    end: int


def encode_header() -> bytes:
    """Encode the header of a file."""
    return HEADER.pack(MAGIC, VERSION, 0)


def encode_head(kind: Kind, payload: bytes, stored: bytes) -> bytes:
    """Encode the header of a record."""
    return _RECORD.pack(kind, len(stored), len(payload), 0, digest.of(payload))


def compress(payload: bytes) -> bytes:
    """Make the frame that stores a payload."""
    return zstd.compress(payload, _LEVEL)


def chained(chain: int, head: bytes) -> int:
    """Return the chain of digests behind one more record."""
    return digest.of(chain.to_bytes(8, "little") + head)


def check_header(stream: TraceStream) -> None:
    """Read the header of a file. Raises TraceError for what is no trace file of this version."""
    header = stream.read_whole(HEADER.size)
    if len(header) < HEADER.size or not header.startswith(MAGIC):
        raise TraceError("not a trace file", path=stream.path, expected=MAGIC.decode())
    _, version, zero = HEADER.unpack(header)
    if version != VERSION:
        problem = "a trace file of another version"
        raise TraceError(problem, path=stream.path, expected=VERSION, found=version)
    if zero:
        raise TraceError("not zero", path=stream.path, place="byte 12", expected=0, found=zero)


def next_record(stream: TraceStream, offset: int) -> Record | None:
    """Read the record at `offset`; None where the file ends there, or within it.

    Raises TraceError for one that is damaged, or required and of an unknown kind.
    """
    head = stream.read_whole(_RECORD.size)
    if len(head) < _RECORD.size:
        return None
    number, stored_length, length, flags, expected = _RECORD.unpack(head)
    kind = _kind(number, flags, stream, offset)
    for name, count in (("stored length", stored_length), ("length", length)):
        if count > MAX_LENGTH:
            bound = f"<= {MAX_LENGTH:,}"
            raise broken(stream, offset, f"{name} out of bounds", bound, f"{count:,}")
    stored = stream.read_whole(stored_length)
    payload = _unpack(stored, length, stored_length, stream, offset)
    if payload is None:
        return None
    if digest.of(payload) != expected:
        texts = (digest.to_text(expected), digest.to_text(digest.of(payload)))
        raise broken(stream, offset, "damaged: it does not have its digest", *texts)
    return Record(kind, head, payload, offset + _RECORD.size + stored_length)


def broken(
    stream: TraceStream, offset: int, problem: str, expected: Any = None, found: Any = None
) -> TraceError:
    """Make the error of a broken record."""
    place = place_of(offset)
    return TraceError(problem, path=stream.path, place=place, expected=expected, found=found)


def place_of(offset: int) -> str:
    """Name a record in a message."""
    return f"record at byte {offset}"


def _kind(number: int, flags: int, stream: TraceStream, offset: int) -> Kind | None:
    """Return the kind of a record; None for an optional one that is not known."""
    if flags & ~_OPTIONAL:
        raise broken(stream, offset, "unknown flags", "0 or 1", flags)
    if number in set(Kind):
        if flags:
            raise broken(stream, offset, f"a record of kind {number} cannot be optional")
        return Kind(number)
    if not flags:
        problem = f"a record of kind {number}, which this version of moepack does not know"
        error = broken(stream, offset, problem)
        error.hint = "was the file written by a newer moepack, or damaged?"
        raise error
    return None


def _unpack(
    stored: bytes, length: int, stored_length: int, stream: TraceStream, offset: int
) -> bytes | None:
    """Unpack a record's one frame; None where the file ends before the frame does."""
    unpacking = zstd.ZstdDecompressor(options=_WINDOW)
    try:
        payload: bytes = unpacking.decompress(stored, length + 1)
    except zstd.ZstdError as error:
        raise broken(stream, offset, f"damaged: {error}") from None
    if len(stored) < stored_length:
        if unpacking.eof:  # else what lies behind a damaged length would pass for cut off
            raise broken(stream, offset, "damaged: its frame ends early", stored_length)
        return None
    if not unpacking.eof and len(payload) <= length:
        raise broken(stream, offset, "its frame has no end")
    if len(payload) != length:
        found = f"more than {length:,}" if len(payload) > length else f"{len(payload):,}"
        raise broken(stream, offset, "its frame has another length", f"{length:,}", found)
    if unpacking.unused_data:
        raise broken(stream, offset, "something stands behind its frame")
    return payload
