"""A trace file as records: the header, each record's header, frame and digest, and their chain.

The format is specified in layouts/TRACE.md; `file_records` knows what the payloads hold.
"""

import re
import struct
from enum import IntEnum
from typing import Any, NamedTuple

from zstandard import (
    CONTENTSIZE_UNKNOWN,
    FRAME_HEADER,
    ZstdCompressor,
    ZstdError,
    get_frame_parameters,
)

from moepack import digest
from moepack.errors import TraceError
from moepack.trace.compressed import TraceStream
from moepack.trace.zstd_frame import FrameUnpacker

MAGIC = b"MOETRACE"
VERSION = 1
MAX_LENGTH = 1 << 26
"""Of a record, stored or not, in bytes."""
HEADER = struct.Struct("<8sII")
_RECORD = struct.Struct("<IIIIQ")
_OPTIONAL = 1
_SKIPPABLE = re.compile(rb"[\x50-\x5f]\x2a\x4d\x18")
"""How a skippable frame begins, in which zstd files may have anything."""
_MAX_FRAME_HEADER_LENGTH = 18
_OTHER_LENGTH = "its frame has another length"
_LEVEL = 9


class Kind(IntEnum):
    """What a record holds."""

    ORIGIN = 1
    TOKENS = 2
    COUNTS = 3
    END = 4


class Record(NamedTuple):
    """A record as it was read: its `kind`, None for an optional one that is to be skipped.

    `head` is its header; `end` is the offset after it.
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
    return ZstdCompressor(level=_LEVEL).compress(payload)


def chained(chain: int, head: bytes) -> int:
    """Return the chain of digests after one more record."""
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
    """Unpack a record's one frame; None where the file ends before the frame does.

    What there is of a frame that is cut has to be right, and no more than the payload.
    """
    _check_frame_header(stored, length, stream, offset)
    unpacker = FrameUnpacker(MAX_LENGTH)
    try:
        payload = unpacker.decompress(stored, length + 1)
    except ZstdError as error:
        raise broken(stream, offset, f"damaged: {error}") from None
    is_cut = len(stored) < stored_length
    if is_cut and unpacker.eof:  # else what follows a damaged length would pass for cut off
        raise broken(stream, offset, "damaged: its frame ends early", stored_length, len(stored))
    if len(payload) > length or (unpacker.eof and len(payload) < length):
        found = f"more than {length:,}" if len(payload) > length else f"{len(payload):,}"
        raise broken(stream, offset, _OTHER_LENGTH, f"{length:,}", found)
    if is_cut:
        return None
    if not unpacker.eof:
        raise broken(stream, offset, "its frame has no end")
    if unpacker.unused_data:
        raise broken(stream, offset, "something follows its frame")
    return payload


def _check_frame_header(stored: bytes, length: int, stream: TraceStream, offset: int) -> None:
    """Check the header of a frame for a payload of `length` bytes, as far as it is there."""
    magic = stored[: len(FRAME_HEADER)]
    if _SKIPPABLE.match(magic):
        raise broken(stream, offset, "a skippable frame", FRAME_HEADER.hex(" "), magic.hex(" "))
    if not FRAME_HEADER.startswith(magic):
        raise broken(stream, offset, "no zstd frame", FRAME_HEADER.hex(" "), magic.hex(" "))
    try:
        header = get_frame_parameters(stored[:_MAX_FRAME_HEADER_LENGTH])
    except ZstdError:  # it is not all there, or unpacking will say what is wrong in it
        return
    if header.dict_id:
        raise broken(stream, offset, "its frame needs a dictionary", "none", header.dict_id)
    if header.content_size not in (CONTENTSIZE_UNKNOWN, length):
        raise broken(stream, offset, _OTHER_LENGTH, f"{length:,}", f"{header.content_size:,}")
    # Not left to the unpacker, which never needs the window of a frame that fits into its buffer.
    if header.window_size > MAX_LENGTH:
        texts = (f"<= {MAX_LENGTH:,}", f"{header.window_size:,}")
        raise broken(stream, offset, "the window of its frame out of bounds", *texts)
