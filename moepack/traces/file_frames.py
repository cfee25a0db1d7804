"""A trace file as records: the header, each record's header, frame and digest, and their chain.

The format is specified in layouts/TRACE.md; `file_records` decodes the payloads. Errors of records
are TraceErrors without path and place, which the reader of the file adds.
"""

import re
import struct
from enum import IntEnum
from typing import NamedTuple

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
from moepack.traces.compressed import PIECE_LENGTH, TraceStream

MAGIC = b"MOETRACE"
VERSION = 1
MAX_LENGTH = 1 << 26
"""Of a record, stored or not, in bytes."""
HEADER = struct.Struct("<8sII")
HEADER_DATA = HEADER.pack(MAGIC, VERSION, 0)
_RECORD = struct.Struct("<IIIIQ")
_OPTIONAL = 1
_SKIPPABLE = re.compile(rb"[\x50-\x5f]\x2a\x4d\x18")
"""The beginning of a skippable frame, in which zstd files may have anything."""
_MAX_FRAME_HEADER_LENGTH = 18
_LEVEL = 9


class Kind(IntEnum):
    """The kinds of records."""

    ORIGIN = 1
    TOKENS = 2
    COUNTS = 3
    END = 4


class TraceRecord(NamedTuple):
    """A record of a file: its `kind`, None for an optional one that is to be skipped.

    `head` is its header; `length` its bytes in the file.
    """

    kind: Kind | None
    head: bytes
    payload: bytes
    length: int


def encode_record(kind: Kind, payload: bytes) -> tuple[bytes, bytes]:
    """Encode a record: its header, and the frame that stores the payload."""
    stored = ZstdCompressor(level=_LEVEL).compress(payload)
    return _RECORD.pack(kind, len(stored), len(payload), 0, digest.xxh3(payload)), stored


def chained(chain: int, head: bytes) -> int:
    """Return the chain of digests after one more record."""
    return digest.xxh3(chain.to_bytes(8, "little") + head)


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


def next_record(stream: TraceStream) -> TraceRecord | None:
    """Read the next record; None if the file ends there, or within it.

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
    return TraceRecord(kind, head, payload, _RECORD.size + stored_length)


def wrong(problem: str, expected: object = None, actual: object = None) -> TraceError:
    """Return the error of a record, for the reader to place."""
    return TraceError(problem, expected=expected, found=actual)


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
