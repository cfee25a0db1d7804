"""The model of a trace: the experts that routers selected, token by token.

A trace is a sequence of requests, each a sequence of tokens, each with its experts by layer. It is
handled in pieces, so that one of any length needs little memory. Facts that a format does not tell
are unknown here, and never guessed.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

MAX_NUMBER = 0xFFFF
"""Layers and experts have 16 bits."""

MAX_COUNT = (1 << 63) - 1
"""Of selections or tokens: the most that the manifest of a pack can state."""

Ints = NDArray[np.int64]
Shorts = NDArray[np.uint16]
Bytes = NDArray[np.uint8]


class Phase(IntEnum):
    """The phase of a token: part of a prompt, or generated."""

    UNKNOWN = 0
    PREFILL = 1
    DECODE = 2


class Unknown(StrEnum):
    """Facts that a format does not tell."""

    REQUESTS = "requests"
    """Where one request ends and the next begins: all are taken as one."""
    PHASES = "phases"
    """Which tokens are prefill and which are decode."""
    TOKENS = "tokens"
    """Where one token ends and the next begins: only counts are known."""
    LAYERS = "layers"
    """Which blocks of the model the layers are: they are counted among those with experts."""
    LATER_TOKENS = "later tokens"
    """The experts of the tokens after the first of a batch."""


class Tokens(NamedTuple):
    """Whole tokens in their order; their selections in the order of the model's layers.

    `request` [tokens] is the number of each token's request, which never falls; `phase` [tokens] is
    its Phase; the selections of token t are `layer[starts[t]:starts[t + 1]]` and `expert[…]`, so
    `starts` has one item more than there are tokens.
    """

    request: Ints
    phase: Bytes
    starts: Ints
    layer: Shorts
    expert: Shorts


class Counts(NamedTuple):
    """Counts of selections by expert, without their tokens."""

    phase: Phase
    layer: Shorts
    expert: Shorts
    counts: Ints


@dataclass(frozen=True, slots=True)
class Origin:
    """The origin of the pieces that follow: a format, a file, and the facts that these lack.

    `model` is the model's name, if the file has it; `token_count` is the number of tokens behind
    counts, if it is stated. `expert_counts` are by layer, for all layers with experts;
    `expert_count` is the number in each of these, if the file does not name the layers.
    `experts_used` is the most experts of a layer that a token uses. `recording` identifies a
    recording: it is the same for the same prompts and options.
    """

    format: str
    name: str
    unknown: frozenset[Unknown] = frozenset()
    model: str | None = None
    token_count: int | None = None
    expert_counts: Mapping[int, int] | None = None
    experts_used: int | None = None
    recording: str | None = None
    expert_count: int | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the origin as files of hotness keep it, the same for the same facts."""
        body: dict[str, Any] = {
            "format": self.format,
            "name": self.name,
            "unknown": sorted(self.unknown),
            "model": self.model,
            "token_count": self.token_count,
        }
        if self.expert_counts is not None:
            body["expert_counts"] = {str(n): count for n, count in self.expert_counts.items()}
        if self.expert_count is not None:
            body["expert_count"] = self.expert_count
        return body


Piece = Tokens | Counts
Item = Origin | Tokens | Counts
Items = Iterator[Item]
"""An origin, then its pieces, then perhaps another origin."""


def selected(tokens: Tokens, kept: NDArray[np.bool_]) -> Tokens:
    """Keep some of the selections, and only tokens with any."""
    starts = np.concatenate(([0], np.cumsum(kept)))[tokens.starts]
    filled = np.diff(starts) > 0
    starts = np.append(starts[:-1][filled], starts[-1])
    columns = (tokens.layer[kept], tokens.expert[kept])
    return Tokens(tokens.request[filled], tokens.phase[filled], starts, *columns)


def join(pieces: Sequence[Tokens]) -> Tokens:
    """Put tokens one after another."""
    request, phase, _, layer, expert = map(np.concatenate, zip(*pieces, strict=True))
    lengths = np.concatenate([np.diff(piece.starts) for piece in pieces])
    return Tokens(request, phase, np.append(0, np.cumsum(lengths)), layer, expert)


def layers_fall(tokens: Tokens) -> bool:
    """Return whether any token has a layer before a lower one."""
    falls = tokens.layer[1:] < tokens.layer[:-1]
    falls[tokens.starts[1:-1] - 1] = False  # from one token to the next
    return bool(falls.any())


def in_layer_order(tokens: Tokens) -> Tokens:
    """Order the selections of each token by layer; those of one layer keep their order."""
    if not layers_fall(tokens):
        return tokens
    token = np.repeat(np.arange(len(tokens.request)), np.diff(tokens.starts))
    order = np.lexsort((tokens.layer, token))
    return tokens._replace(layer=tokens.layer[order], expert=tokens.expert[order])


def counts_of(phase: Phase, layer: Ints | Shorts, expert: Ints | Shorts) -> Counts:
    """Count selections."""
    keys, counts = np.unique(layer.astype(np.int64) << 16 | expert, return_counts=True)
    layers, experts = (keys >> 16).astype(np.uint16), (keys & MAX_NUMBER).astype(np.uint16)
    return Counts(phase, layers, experts, counts.astype(np.int64))


def repeated(keys: Ints, most: int = 1) -> Ints:
    """Return the indices of the keys that occurred `most` times before."""
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    indices: Ints = order[most:][ordered[most:] == ordered[:-most]]
    return indices


def changes(*columns: NDArray[Any]) -> NDArray[np.bool_]:
    """Return whether each row differs from the one before; the first does."""
    begins = np.zeros(len(columns[0]), np.bool_)
    begins[:1] = True
    for column in columns:
        begins[1:] |= column[1:] != column[:-1]
    return begins


def tokens_of(layers: Mapping[int, NDArray[Any]], request: int, phase: Phase) -> Iterator[Tokens]:
    """Yield the tokens of a call; `layers` are the selected experts by layer [tokens, experts].

    A layer that computed fewer tokens computed the last ones.
    """
    layers = dict(sorted(layers.items()))
    end = max(map(len, layers.values()))
    starts = sorted({end - len(rows) for rows in layers.values()})
    for start, stop in zip(starts, [*starts[1:], end], strict=True):
        parts = {
            layer: rows[start - end : stop - end or None]
            for layer, rows in layers.items()
            if end - len(rows) <= start
        }
        layer = np.repeat(list(parts), [rows.shape[1] for rows in parts.values()])
        expert = np.concatenate(list(parts.values()), axis=1)
        count = len(expert)
        yield Tokens(
            np.full(count, request, np.int64),
            np.full(count, phase, np.uint8),
            np.arange(count + 1, dtype=np.int64) * len(layer),
            np.tile(layer.astype(np.uint16), count),
            expert.astype(np.uint16).ravel(),
        )
