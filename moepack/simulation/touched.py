"""How many experts some tokens in a row choose together: what a micro-batch of a prompt reads."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moepack.errors import TraceError
from moepack.trace.formats.registry import ReadOptions, feed
from moepack.trace.model import Ints, Item
from moepack.trace.steps import ALL_PHASES, Steps, StepStream

_MOST_TOKENS = 1 << 14


def touched_shares(paths: Sequence[str], options: ReadOptions) -> dict[int, float]:
    """Return the share of a layer's experts that so many tokens in a row choose together.

    By powers of two of tokens, as far as requests of the trace are long, and by all tokens of the
    longest one. It is the mean over layers and over windows within a request, prompts included.
    Raises what reading raises, and TraceError where there is no token.
    """
    assert options.shape is not None, "whoever asks for shares knows the model"
    counts = options.shape.without_mtp().expert_counts
    stream = StepStream(ALL_PHASES, _MOST_TOKENS)
    pieces: list[Steps] = []

    def take(item: Item) -> None:
        steps = stream.take(item)
        if steps is not None:
            pieces.append(steps)

    feed(paths, options, take)
    if not pieces:
        raise TraceError("no tokens in it", path=paths[0])
    request = np.concatenate([steps.request for steps in pieces])
    position = _positions(request)
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
        of_layers = [
            _distinct(numbers[rows[chosen]], expert[chosen]) / (count * window_count)
            for number, count in counts.items()
            if np.any(chosen := (layer == number) & is_whole[rows])
        ]
        if of_layers:
            shares[window] = float(np.mean(of_layers))
    return shares


def _positions(request: Ints) -> Ints:
    """Return the place of each token in its request."""
    places = np.arange(len(request))
    begins = np.flatnonzero(np.diff(request, prepend=-1))
    positions: Ints = places - np.repeat(begins, np.diff(np.append(begins, len(request))))
    return positions


def _distinct(window: Ints, expert: Ints) -> int:
    """Count the pairs of a window and an expert."""
    return len(np.unique(window * (1 << 16) + expert.astype(np.int64)))
