"""Routing that models repeat: read from a trace, or made up, and what an LRU cache reads for it.

The trace of Qwen3-30B-A3B (48 layers, 6 of 128 experts, 156 tokens) that docs/numbers.md names is
`qwen3-30b-a3b.route.csv` of https://github.com/Helldez/BigMoeOnEdge (Apache-2.0), not ours to keep.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from moepack.common.shape import ExpertKey
from moepack.traces.caching.cache import Tally, make
from moepack.traces.formats import registry
from moepack.traces.model import Tokens
from moepack.traces.validation import Checks

MOST_TOKENS = 500
"""Of a trace: as many as the vocabulary of a model that repeats it has words for."""
_MADE_TOKENS = 156
_SKEW, _PERSISTENCE, _MEMORY = 2.4, 2.2, 0.7
"""Standard deviations of what makes an expert likelier for good, and for a while, and how much of
the latter a token leaves to the next. So the routing is like that of the trace above: the likeliest
8 of 128 experts get 43 % of the selections (there 40), the likeliest 32 83 % (82); a token has 38 %
(37) of its experts from the one before, 19 % (21) from the 32nd before; and LRU caches of 12, 25
and 46 % of the experts hit 57, 75 and 87 % (56, 79 and 91)."""


class Routing(NamedTuple):
    """The experts of each layer for each token, `tokens[token][layer]`, and where they are from."""

    tokens: Sequence[Sequence[Sequence[int]]]
    expert_count: int
    origin: str

    @property
    def layer_count(self) -> int:
        """The number of layers, all of which have experts."""
        return len(self.tokens[0])

    @property
    def used_count(self) -> int:
        """The most experts of a layer for a token."""
        return max(len(experts) for token in self.tokens for experts in token)

    def first_layers(self, count: int) -> "Routing":
        """Return the routing of the first layers alone."""
        return self._replace(tokens=[token[:count] for token in self.tokens])


def read_routing(path: Path) -> Routing:
    """Read a trace in any format that names tokens and all of their layers' experts."""
    found: list[dict[int, list[int]]] = []
    for item in registry.read(str(path), Checks(str(path))):
        if isinstance(item, Tokens):
            for start, end in pairwise(item.starts):
                token: dict[int, list[int]] = {}
                pairs = zip(item.layer[start:end], item.expert[start:end], strict=True)
                for layer, expert in pairs:
                    token.setdefault(int(layer), []).append(int(expert))
                found.append(token)
    if not found:
        raise SystemExit(f"{path}: its routing is not by tokens")
    layers = sorted(set().union(*found))
    tokens = [[token.get(layer, []) for layer in layers] for token in found[:MOST_TOKENS]]
    highest = max(expert for token in tokens for experts in token for expert in experts)
    return Routing(tokens, 1 << highest.bit_length(), f"the trace {path.name}")


def made_up_routing(
    layers: int = 48, experts: int = 128, used: int = 6, *, is_uniform: bool = False
) -> Routing:
    """Make routing up: as skewed and as persistent as a real model's, or by uniform routers."""
    random = np.random.default_rng(0)
    shape = (layers, experts)
    liking, mood = _SKEW * random.standard_normal(shape), random.standard_normal(shape)
    tokens = []
    for _ in range(_MADE_TOKENS):
        scores = random.gumbel(size=shape)
        if not is_uniform:
            scores += liking + _PERSISTENCE * mood
        tokens.append(np.argsort(-scores, axis=1)[:, :used].tolist())
        mood *= _MEMORY
        mood += np.sqrt(1 - _MEMORY**2) * random.standard_normal(shape)
    kind = "uniform routers" if is_uniform else "made up, as skewed and persistent as Qwen3's"
    return Routing(tokens, experts, kind)


def lru_reads(
    steps: Sequence[Sequence[Sequence[Sequence[int]]]],
    budget: int,
    slot_lengths: Mapping[ExpertKey, int],
) -> int:
    """Return the bytes that an LRU cache of `budget` bytes reads for steps, from nothing on.

    A step is tokens that are computed at once. `slot_lengths` are what experts take in memory.
    """
    cache, tally = make("lru", budget, slot_lengths), Tally()
    for tokens in steps:
        for layer in range(len(tokens[0])):
            routed = [ExpertKey(layer, expert) for token in tokens for expert in token[layer]]
            if routed:
                cache.step(routed, tally)
    return tally.missed_length
