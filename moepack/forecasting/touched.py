"""How many of a layer's experts the tokens of a micro-batch use together.

Of a uniform router n tokens use a share of 1 - (1 - k/E)^n. Real text comes back to experts: it
uses as many as n^c tokens of a uniform router would. Published runs had c of 0.57 (130 tokens,
40 % of the experts of a layer) and 0.52 (1,658 tokens, 77 %; both Qwen3.6-35B), and 0.63 (149
tokens, 42 %; DeepSeek V4 Flash); a trace of Qwen3-30B-A3B has 0.60 at 130 tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from moepack.shape import ModelShape
from moepack.simulation.touched import touched_shares
from moepack.trace.formats.registry import ReadOptions

TouchedFrom = Literal["trace", "published texts"]

_PUBLISHED, _LEAST, _UNIFORM = 0.58, 0.5, 1.0
_TRACE_DOUBT = 0.03
"""By how much the exponent of another text of the same kind may differ."""


class Exponent(NamedTuple):
    """The exponent c at a number of tokens: what is likely, and between which it will lie."""

    likely: float
    least: float
    most: float


class Touched:
    """Says which share of a layer's experts tokens use; `shares` are those of a trace, by tokens.

    `used` of `count` experts are chosen by one token.
    """

    def __init__(self, used: int, count: int, shares: Mapping[int, float] | None = None) -> None:
        self._unused = 1 - min(used, count) / count
        self._exponents = {
            tokens: self._exponent(tokens, share)
            for tokens, share in (shares or {}).items()
            if tokens > 1
        }

    @property
    def source(self) -> TouchedFrom:
        """Where the shares come from."""
        return "trace" if self._exponents else "published texts"

    def shares(self, tokens: int) -> Exponent:
        """Return the likely share for so many tokens, and between which it will lie."""
        likely, least, most = self.exponent(tokens)
        return Exponent(*(self._share(tokens**c) for c in (likely, least, most)))

    def exponent(self, tokens: int) -> Exponent:
        """Return c: as the nearest window of the trace has it, of published texts without one."""
        if not self._exponents:
            return Exponent(_PUBLISHED, _LEAST, _UNIFORM)
        longest = max(self._exponents)
        nearest = min(self._exponents, key=lambda known: abs(math.log(known / tokens)))
        likely = self._exponents[nearest]
        most = likely + _TRACE_DOUBT if tokens <= longest else _UNIFORM
        return Exponent(likely, max(0.0, likely - _TRACE_DOUBT), min(_UNIFORM, most))

    def _share(self, uniform_tokens: float) -> float:
        return 1 - self._unused**uniform_tokens if self._unused else 1.0

    def _exponent(self, tokens: int, share: float) -> float:
        if not self._unused or share >= 1:
            return _UNIFORM
        uniform_tokens = math.log(1 - share) / math.log(self._unused)
        return max(0.0, math.log(max(uniform_tokens, 1.0)) / math.log(tokens))


def touched_of(shape: ModelShape, traces: Sequence[str]) -> Touched | None:
    """Return what tokens of a model use; None where it is not known how many one uses.

    Raises what `touched_shares` raises.
    """
    used, counts = shape.experts_used, shape.expert_counts
    if used is None:
        return None
    shares = touched_shares(traces, ReadOptions(shape=shape)) if traces else None
    return Touched(used, max(counts.values()), shares)
