"""The payloads of a trace file's records, as layouts/TRACE.md specifies them."""

import json
import struct
from enum import IntEnum
from typing import Any

import numpy as np

from moepack.trace.model import Counts, Ints, Item, Origin, Phase, Shorts, Tokens, Unknown

_COUNTS = struct.Struct("<II")


class Kind(IntEnum):
    """What a record holds."""

    ORIGIN = 1
    TOKENS = 2
    COUNTS = 3


def join(pieces: list[Tokens]) -> Tokens:
    """Put tokens one after another."""
    lengths = np.cumsum([0, *(len(piece.layer) for piece in pieces)])
    pairs = zip(pieces, lengths, strict=False)
    starts = [piece.starts[:-1] + before for piece, before in pairs]
    return Tokens(
        np.concatenate([piece.request for piece in pieces]),
        np.concatenate([piece.phase for piece in pieces]),
        np.concatenate([*starts, lengths[-1:]]),
        np.concatenate([piece.layer for piece in pieces]),
        np.concatenate([piece.expert for piece in pieces]),
    )


def parts(tokens: Tokens, selection_count: int) -> list[Tokens]:
    """Cut many tokens into some of about `selection_count` selections, which fit into a record."""
    records, first, count = [], 0, len(tokens.request)
    while first < count:
        most = int(tokens.starts[first]) + 8 * selection_count
        last = max(int(np.searchsorted(tokens.starts, most, "right")) - 1, first + 1)
        last = min(last, first + selection_count)
        start, end = int(tokens.starts[first]), int(tokens.starts[last])
        records.append(
            Tokens(
                tokens.request[first:last],
                tokens.phase[first:last],
                tokens.starts[first : last + 1] - start,
                tokens.layer[start:end],
                tokens.expert[start:end],
            )
        )
        first = last
    return records


def parts_of_counts(counts: Counts, count: int) -> list[Counts]:
    """Cut counts into some of `count` experts, which fit into a record."""
    starts = range(0, len(counts.layer), count)
    columns = (counts.layer, counts.expert, counts.counts)
    return [
        Counts(counts.phase, *(column[start : start + count] for column in columns))  # type: ignore[arg-type]
        for start in starts
    ]


def encode_origin(origin: Origin) -> bytes:
    """Encode an origin."""
    return json.dumps(origin.to_json(), sort_keys=True).encode()


def encode_tokens(tokens: Tokens) -> bytes:
    """Encode tokens that fit into a record."""
    return b"".join(
        (
            _COUNTS.pack(len(tokens.request), len(tokens.layer)),
            tokens.request.astype("<u4").tobytes(),
            np.diff(tokens.starts).astype("<u4").tobytes(),
            tokens.phase.tobytes(),
            *_planes(tokens.layer),
            *_planes(tokens.expert),
        )
    )


def encode_counts(counts: Counts) -> bytes:
    """Encode counts."""
    return b"".join(
        (
            _COUNTS.pack(counts.phase, len(counts.layer)),
            counts.layer.astype("<u2").tobytes(),
            counts.expert.astype("<u2").tobytes(),
            counts.counts.astype("<u8").tobytes(),
        )
    )


def _planes(numbers: Shorts) -> tuple[bytes, bytes]:
    return (numbers & 0xFF).astype(np.uint8).tobytes(), (numbers >> 8).astype(np.uint8).tobytes()


def decode(kind: Kind, payload: bytes) -> Item:
    """Decode one record's payload. Raises ValueError, KeyError, TypeError or struct.error."""
    if kind == Kind.ORIGIN:
        return _decode_origin(json.loads(payload))
    return _decode_tokens(payload) if kind == Kind.TOKENS else _decode_counts(payload)


def _decode_origin(body: Any) -> Origin:
    unknown = frozenset(Unknown(word) for word in body["unknown"])
    texts = [body["format"], body["name"], *([body["model"]] if body["model"] is not None else [])]
    count = body["token_count"]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("a name that is no text")
    if count is not None and (type(count) is not int or count < 0):
        raise ValueError("a token count that is none")
    return Origin(body["format"], body["name"], unknown, body["model"], count)


def _decode_tokens(payload: bytes) -> Tokens:
    token_count, count = _COUNTS.unpack_from(payload)
    if len(payload) != _COUNTS.size + 9 * token_count + 4 * count:
        raise ValueError("its length is not that of its columns")
    at = _COUNTS.size
    request = np.frombuffer(payload, "<u4", token_count, at).astype(np.int64)
    lengths = np.frombuffer(payload, "<u4", token_count, at + 4 * token_count).astype(np.int64)
    phase = np.frombuffer(payload, np.uint8, token_count, at + 8 * token_count)
    starts = np.concatenate(([0], np.cumsum(lengths)))
    if starts[-1] != count or np.any(phase > max(Phase)) or np.any(np.diff(request) < 0):
        raise ValueError("its columns contradict each other")
    planes = np.frombuffer(payload, np.uint8, 4 * count, at + 9 * token_count).reshape(4, count)
    low_layer, high_layer, low_expert, high_expert = planes.astype(np.uint16)
    layer = (low_layer | high_layer << 8).astype(np.uint16)
    expert = (low_expert | high_expert << 8).astype(np.uint16)
    return Tokens(request, phase, starts, layer, expert)


def _decode_counts(payload: bytes) -> Counts:
    phase, count = _COUNTS.unpack_from(payload)
    if len(payload) != _COUNTS.size + 12 * count:
        raise ValueError("its length is not that of its columns")
    layer = np.frombuffer(payload, "<u2", count, _COUNTS.size).astype(np.uint16)
    expert = np.frombuffer(payload, "<u2", count, _COUNTS.size + 2 * count).astype(np.uint16)
    counts: Ints = np.frombuffer(payload, "<u8", count, _COUNTS.size + 4 * count).astype(np.int64)
    if np.any(counts < 0):
        raise ValueError("a count out of bounds")
    return Counts(Phase(phase), layer, expert, counts)
