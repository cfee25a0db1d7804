"""Traces: which experts were chosen, token by token, whatever file they were written to.

A trace is a sequence of requests, each a sequence of tokens, each with its experts by layer. It is
handled in pieces, so that one of any length passes through little memory. What a format does not
say is unknown here, and never guessed.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

MAX_NUMBER = 0xFFFF
"""Layers and experts have 16 bits."""

MAX_COUNT = (1 << 63) - 1
"""Of selections or tokens: what the manifest of a pack can state."""

Ints = NDArray[np.int64]
Shorts = NDArray[np.uint16]
Bytes = NDArray[np.uint8]


class Phase(IntEnum):
    """What a token was: part of a prompt, or generated."""

    UNKNOWN = 0
    PREFILL = 1
    DECODE = 2


class Unknown(StrEnum):
    """What a format does not tell."""

    REQUESTS = "requests"
    """Where one request ends and the next begins: all are taken as one."""
    PHASES = "phases"
    """Which tokens are prefill and which are decode."""
    TOKENS = "tokens"
    """Where one token ends and the next begins: only counts are known."""
    LAYERS = "layers"
    """Which blocks of the model the layers are: they are counted among those with experts."""
    LATER_TOKENS = "later tokens"
    """What the tokens behind the first of a batch chose."""


class Tokens(NamedTuple):
    """Whole tokens in their order; their selections ordered by layer as the model meets them.

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
    """How often experts were chosen, where the single tokens are not known."""

    phase: Phase
    layer: Shorts
    expert: Shorts
    counts: Ints


@dataclass(frozen=True, slots=True)
class Origin:
    """Where the pieces that follow come from: a format, a file, and what these do not tell.

    `model` is the model's name where the file has it; `token_count` is how many tokens the counts
    were taken over, for formats of counts that say it. `expert_counts` are by layer, all that have
    experts; `expert_count` is the number in each of these, where the file does not name them.
    `experts_used` is how many of them a token uses in a layer at most. `recording` tells a
    recording from others: it is the same for the same prompts and options.
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
        """Return what is said of where counts come from, the same for the same facts."""
        said: dict[str, Any] = {
            "format": self.format,
            "name": self.name,
            "unknown": sorted(self.unknown),
            "model": self.model,
            "token_count": self.token_count,
        }
        if self.expert_counts is not None:
            said["expert_counts"] = {str(n): count for n, count in self.expert_counts.items()}
        if self.expert_count is not None:
            said["expert_count"] = self.expert_count
        return said


Piece = Tokens | Counts
Item = Origin | Tokens | Counts
Items = Iterator[Item]
"""An origin, then its pieces, then perhaps another origin."""


class Dimensions(NamedTuple):
    """What a file says of the model it was taken on; None is what it does not say.

    Layers are below `layer_count` and experts below `expert_count`; a token uses up to
    `experts_used` experts in a layer.
    """

    layer_count: int | None = None
    expert_count: int | None = None
    experts_used: int | None = None

    def __str__(self) -> str:
        """List what it says."""
        words = ("layers below {}", "experts below {}", "{} experts used")
        pairs = zip(words, self, strict=True)
        return ", ".join(word.format(count) for word, count in pairs if count is not None)


def selected(tokens: Tokens, kept: NDArray[np.bool_]) -> Tokens:
    """Keep some of the selections, and the tokens that have any of them."""
    starts = np.concatenate(([0], np.cumsum(kept)))[tokens.starts]
    filled = np.diff(starts) > 0
    starts = np.append(starts[:-1][filled], starts[-1])
    columns = (tokens.layer[kept], tokens.expert[kept])
    return Tokens(tokens.request[filled], tokens.phase[filled], starts, *columns)


def counts_of(phase: Phase, layer: Ints | Shorts, expert: Ints | Shorts) -> Counts:
    """Count selections."""
    keys, counts = np.unique(layer.astype(np.int64) << 16 | expert, return_counts=True)
    return Counts(phase, *split_keys(keys), counts.astype(np.int64))


def split_keys(keys: Ints) -> tuple[Shorts, Shorts]:
    """Take keys `layer << 16 | expert` apart."""
    return (keys >> 16).astype(np.uint16), (keys & MAX_NUMBER).astype(np.uint16)
