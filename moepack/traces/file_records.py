"""The payloads of a trace file's records, as layouts/TRACE.md specifies them.

Faults are TraceErrors without path and place, which the reader of the file adds.
"""

import json
import struct
from enum import IntEnum
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moepack.common.errors import TraceError
from moepack.common.fields import Fields, parse_strictly
from moepack.common.shape import ROUTED_FAMILY
from moepack.traces.model import (
    MAX_COUNT,
    MAX_NUMBER,
    Counts,
    Item,
    Origin,
    Phase,
    Shorts,
    Tokens,
    Unknown,
    layers_fall,
)

MAX_ORIGIN_LENGTH = 1 << 20
"""Of an origin's payload, in bytes."""
_MAX_NAME_LETTERS = 1000
"""Of a written name: an origin with three names and 65,536 layers stays in bounds."""
_HEAD = struct.Struct("<II")


class Kind(IntEnum):
    """The kinds of records."""

    ORIGIN = 1
    TOKENS = 2
    COUNTS = 3
    END = 4


def wrong(problem: str, expected: object = None, actual: object = None) -> TraceError:
    """Return the error of a record, for the reader to place."""
    return TraceError(problem, expected=expected, found=actual)


def encode(item: Item) -> tuple[Kind, bytes]:
    """Encode an origin, or a piece that fits into a record."""
    if isinstance(item, Origin):
        return Kind.ORIGIN, encode_origin(item)
    if isinstance(item, Tokens):
        return Kind.TOKENS, _encode_tokens(item)
    columns = item.layer.astype("<u2"), item.expert.astype("<u2"), item.counts.astype("<u8")
    head = _HEAD.pack(item.phase, len(item.layer))
    return Kind.COUNTS, head + b"".join(column.tobytes() for column in columns)


def encode_origin(origin: Origin) -> bytes:
    """Encode an origin."""
    body: dict[str, Any] = {"expert_counts": None} | origin.to_json()
    body |= {"family": ROUTED_FAMILY, "experts_used": origin.experts_used}
    if origin.recording is not None:
        body["recording"] = origin.recording
    for name in ("format", "name", "model"):  # names of files may be no Unicode
        text = body[name] and body[name][:_MAX_NAME_LETTERS]
        body[name] = text and text.encode(errors="replace").decode()
    return json.dumps(body, sort_keys=True, separators=(",", ":")).encode()


def _encode_tokens(tokens: Tokens) -> bytes:
    return b"".join(
        (
            _HEAD.pack(len(tokens.request), len(tokens.layer)),
            tokens.request.astype("<u4").tobytes(),
            np.diff(tokens.starts).astype("<u4").tobytes(),
            tokens.phase.tobytes(),
            *_planes(tokens.layer),
            *_planes(tokens.expert),
        )
    )


def _planes(numbers: Shorts) -> tuple[bytes, bytes]:
    return (numbers & 0xFF).astype(np.uint8).tobytes(), (numbers >> 8).astype(np.uint8).tobytes()


def decode(kind: Kind, payload: bytes) -> Item:
    """Decode the payload of an origin, of tokens or of counts. Raises TraceError."""
    if kind == Kind.ORIGIN:
        return _decode_origin(payload)
    return _decode_tokens(payload) if kind == Kind.TOKENS else _decode_counts(payload)


def _decode_origin(payload: bytes) -> Origin:
    if len(payload) > MAX_ORIGIN_LENGTH:
        problem = "the length of an origin out of bounds"
        raise wrong(problem, f"<= {MAX_ORIGIN_LENGTH:,}", f"{len(payload):,}")
    try:
        body = parse_strictly(payload)
    except ValueError as error:
        raise wrong(f"not JSON: {error}") from None
    fields = Fields(body, "", "", TraceError)
    family = fields.typed("family", str)
    if family != ROUTED_FAMILY:
        raise wrong("selections of a family that is not known", ROUTED_FAMILY, family)
    recording, expert_count = body.get("recording"), body.get("expert_count")
    is_count = type(expert_count) is int and 1 <= expert_count <= MAX_NUMBER + 1
    return Origin(
        format=fields.typed("format", str),
        name=fields.typed("name", str),
        unknown=_unknown(fields),
        model=fields.nullable("model", str),
        token_count=_number(fields, "token_count", 0, MAX_COUNT),
        expert_counts=_expert_counts(fields),
        experts_used=_number(fields, "experts_used", 1, MAX_NUMBER + 1),
        recording=recording if isinstance(recording, str) else None,
        expert_count=expert_count if is_count else None,
    )


def _number(fields: Fields, key: str, least: int, most: int) -> int | None:
    return None if fields.nullable(key, int) is None else fields.number(key, least, most)


def _unknown(fields: Fields) -> frozenset[Unknown]:
    words = fields.typed("unknown", list)
    for word in words:
        if not isinstance(word, str) or word not in set(Unknown) or words.count(word) > 1:
            fields.fail("unknown", "a word that is not known, or one twice", actual=word)
    return frozenset(map(Unknown, words))


def _expert_counts(fields: Fields) -> dict[int, int] | None:
    body = fields.nullable("expert_counts", dict)
    if body is None:
        return None
    if not body:
        fields.fail("expert_counts", "no layers")
    counts = Fields(body, "expert_counts", "", TraceError)
    for layer in body:
        is_number = layer.isascii() and layer.isdecimal() and len(layer) <= 5
        if not is_number or str(int(layer)) != layer or int(layer) > MAX_NUMBER:
            counts.fail(layer[:40], "a layer that is none", f"0 to {MAX_NUMBER}")
    return {int(layer): counts.number(layer, 1, MAX_NUMBER + 1) for layer in body}


def _decode_tokens(payload: bytes) -> Tokens:
    token_count, count = _head(payload)
    columns = ("<u4", token_count), ("<u4", token_count), ("u1", token_count), ("u1", 4 * count)
    request, lengths, phase, planes = _columns(payload, *columns)
    if not token_count:
        raise wrong("tokens without any")
    starts = np.append(0, np.cumsum(lengths, dtype=np.int64))
    if not lengths.all():
        raise wrong("a token without selections")
    if starts[-1] != count:
        raise wrong("the selections of its tokens do not add up", count, starts[-1])
    if np.any(phase > max(Phase)):
        raise wrong("a phase that is none", f"0 to {max(Phase)}", phase.max())
    request = request.astype(np.int64)
    if np.any(np.diff(request) < 0):
        raise wrong("requests that fall")
    low_layer, high_layer, low_expert, high_expert = planes.reshape(4, count).astype(np.uint16)
    layer = (low_layer | high_layer << 8).astype(np.uint16)
    expert = (low_expert | high_expert << 8).astype(np.uint16)
    tokens = Tokens(request, phase, starts, layer, expert)
    if layers_fall(tokens):
        hint = "import the file again from which it was made: moepack orders them"
        raise TraceError("layers that fall within a token", expected="rising layers", hint=hint)
    return tokens


def _decode_counts(payload: bytes) -> Counts:
    phase, count = _head(payload)
    layer, expert, counts = _columns(payload, ("<u2", count), ("<u2", count), ("<u8", count))
    if not count:
        raise wrong("counts without any")
    if phase > max(Phase):
        raise wrong("a phase that is none", f"0 to {max(Phase)}", phase)
    beyond = counts[(counts == 0) | (counts > MAX_COUNT)]
    if len(beyond):
        raise wrong("a count out of bounds", f"1 to {MAX_COUNT}", beyond[0])
    layer, expert = layer.astype(np.uint16), expert.astype(np.uint16)
    return Counts(Phase(phase), layer, expert, counts.astype(np.int64))


def _head(payload: bytes) -> tuple[int, int]:
    if len(payload) < _HEAD.size:
        raise wrong("too short", f">= {_HEAD.size}", len(payload))
    first, second = _HEAD.unpack_from(payload)
    return int(first), int(second)


def _columns(payload: bytes, *columns: tuple[str, int]) -> list[NDArray[Any]]:
    """Return the columns behind the head of a payload, by their types and lengths."""
    starts = list(
        accumulate([np.dtype(kind).itemsize * n for kind, n in columns], initial=_HEAD.size)
    )
    expect_length(payload, starts[-1])
    pairs = zip(columns, starts, strict=False)
    return [np.frombuffer(payload, kind, count, start) for (kind, count), start in pairs]


def expect_length(payload: bytes, length: int) -> None:
    """Raise TraceError if a payload has another length."""
    if len(payload) != length:
        raise wrong("the payload has another length", f"{length:,}", f"{len(payload):,}")
