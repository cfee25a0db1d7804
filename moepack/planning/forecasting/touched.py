"""The experts of a layer that several tokens use together.

Of a uniform router n tokens use a share of 1 - (1 - k/E)^n. Real text comes back to experts: it
uses as many as n^c tokens of a uniform router would, with less c for more tokens. Published runs
had 0.57 (130 tokens, 40 % of the experts of a layer) and 0.52 (1,658 tokens, 77 %; both
Qwen3.6-35B), and 0.63 (149 tokens, 42 %; DeepSeek V4 Flash); a trace of Qwen3-30B-A3B has 0.60 at
130 tokens, and 0.65 at 28.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

import numpy as np

from moepack.common.errors import TraceError
from moepack.common.shape import ModelShape
from moepack.traces.model import Item
from moepack.traces.spool import SpooledTrace
from moepack.traces.steps import ALL_PHASES, Steps, StepStream

TouchedFrom = Literal["trace", "published texts"]

_OF_ONE, _FALL, _SPREAD = 0.76, 0.0225, 0.08
"""Of a text: c of few tokens, how much it falls where they double, and how much more or less it may
be: three times what the published runs differ."""
_UNIFORM = 1.0
_MOST_TOKENS = 1 << 14
_TRACE_SPREAD = 0.03
"""The difference of the exponent for another text of the same kind."""


class Touched:
    """The shares of experts that tokens use, of which one uses `used` of `count`.

    `shares` are those of a trace, by tokens.
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
        """The origin of the shares."""
        return "trace" if self._exponents else "published texts"

    def shares(self, tokens: int) -> tuple[float, float, float]:
        """Return the likely, the least and the most share that so many tokens use.

        It is by the window of the trace nearest to them.
        """
        likely = _OF_ONE - _FALL * math.log2(tokens)
        exponents = (likely, likely - _SPREAD, min(_UNIFORM, likely + _SPREAD))
        if self._exponents:
            nearest = min(self._exponents, key=lambda window: abs(math.log(window / tokens)))
            likely = self._exponents[nearest]
            is_within = tokens <= max(self._exponents)
            spread = _TRACE_SPREAD if is_within else _SPREAD
            most = min(_UNIFORM, likely + spread)
            exponents = likely, max(0.0, likely - _TRACE_SPREAD), most
        likely, least, most = (
            1 - self._unused ** (tokens**c) if self._unused else 1.0 for c in exponents
        )
        return likely, least, most

    def _exponent(self, tokens: int, share: float) -> float:
        if not self._unused or share >= 1:
            return _UNIFORM
        uniform_tokens = math.log(1 - share) / math.log(self._unused)
        return max(0.0, math.log(max(uniform_tokens, 1.0)) / math.log(tokens))


def touched_of(shape: ModelShape, trace: SpooledTrace | None) -> Touched | None:
    """Return the shares of a model; None if it is not known how many experts a token uses.

    Raises what `touched_shares` raises.
    """
    used, counts = shape.experts_used, shape.expert_counts
    if used is None:
        return None
    shares = None if trace is None else touched_shares(trace)
    return Touched(used, max(counts.values()), shares)


def touched_shares(trace: SpooledTrace) -> dict[int, float]:
    """Return the share of a layer's experts that so many tokens in a row are routed to.

    By powers of two of tokens, up to the longest request of the trace, and by all tokens of that
    one. It is the mean over layers and over windows within a request, prompts included. Raises
    TraceError if there is no token.
    """
    assert trace.shape is not None, "it was read for a model"
    counts = trace.shape.without_mtp().expert_counts
    stream = StepStream(ALL_PHASES, _MOST_TOKENS)
    pieces: list[Steps] = []

    def add(item: Item) -> None:
        steps = stream.add(item)
        if steps is not None:
            pieces.append(steps)

    trace.feed(add)
    if not pieces:
        raise TraceError("no tokens in it", path=trace.paths[0])
    request = np.concatenate([steps.request for steps in pieces])
    starts = np.flatnonzero(np.diff(request, prepend=-1))
    position = np.arange(len(request)) - np.repeat(starts, np.diff(np.append(starts, len(request))))
    rows = np.repeat(np.arange(len(request)), np.concatenate([np.diff(s.starts) for s in pieces]))
    layer = np.concatenate([steps.layer for steps in pieces])
    expert = np.concatenate([steps.expert for steps in pieces])
    lengths = np.bincount(request)
    longest = int(lengths.max())
    shares = {}
    for window in sorted({*(1 << n for n in range(longest.bit_length())), longest}):
        window_count = int((lengths // window).sum())
        is_whole = (position // window + 1) * window <= lengths[request]
        numbers = request * (_MOST_TOKENS + 1) + position // window
        pairs = (numbers[rows] << 16) + expert  # a window and an expert as one number
        of_layers = [
            len(np.unique(pairs[selections])) / (count * window_count)
            for number, count in counts.items()
            if np.any(selections := (layer == number) & is_whole[rows])
        ]
        if of_layers:
            shares[window] = float(np.mean(of_layers))
    return shares
