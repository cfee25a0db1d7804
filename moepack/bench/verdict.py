"""What measured ratios mean: whether packing gains anything here, said with care.

A verdict is one of two, and only a gain has to be proven: a run that saw too little for that says
the same as one that saw that there is none. What could not be compared at all gets no verdict.
"""

from collections.abc import Sequence
from typing import NamedTuple

from moepack.bench.interval import CONFIDENCE, interval, stretch_count
from moepack.bench.rounds import Condition, Measurement, Round, quiet, readings_of
from moepack.bench.timed_reads import Usage

WORTH = 1.05
"""A gain below 5 % is none: nobody would repack a model for it, and few could measure it again."""

SMALL = 1 << 30
"""Bytes of a pack below which a drive's own memory may hold much of it."""


class Gain(NamedTuple):
    """How many times as fast as the shards' slices the pack's blobs are, with its interval.

    `word` is `gain` where all of the interval lies above 1.05, `loss` where all of it lies below
    1/1.05, `none` where neither is shown, and `unproven` where there are too few rounds for an
    interval; then the numbers are None. `round_count` is how many it is from.
    """

    way: str
    state: str
    depth: int
    ratio: float | None
    low: float | None
    high: float | None
    round_count: int
    word: str


def judge(rounds: Sequence[Round], conditions: Sequence[Condition]) -> tuple[Gain, ...]:
    """Compare blobs with slices under each condition, in the rounds that nothing disturbed."""
    counting = quiet(rounds)
    gains = []
    for condition in conditions:
        depth_count = sum(other[:2] == condition[:2] for other in conditions)
        ours, theirs = (
            [usage for _, usage in readings_of(counting, Measurement(layout, condition))]
            for layout in ("blobs", "slices")
        )
        gains.append(_gain(condition, ratios(ours, theirs), stretch_count(depth_count)))
    return tuple(gains)


def ratios(ours: Sequence[Usage], theirs: Sequence[Usage]) -> list[float]:
    """Return how many times as fast as `theirs` ours were, pair by pair."""
    return [b.seconds / a.seconds for a, b in zip(ours, theirs, strict=True)]


def _gain(condition: Condition, values: Sequence[float], stretches: int) -> Gain:
    found = interval(values, stretches)
    if found is None:
        return Gain(*condition, None, None, None, len(values), "unproven")
    word = "none"
    if found.low > WORTH:
        word = "gain"
    elif found.high < 1 / WORTH:
        word = "loss"
    return Gain(*condition, *found, len(values), word)


def verdict(
    gains: Sequence[Gain], rounds: Sequence[Round], backend: str, was_cold: bool | None
) -> str:
    """Say in words whether packing gains anything, and between which bounds."""
    if not gains:
        return "No verdict: without --source there is nothing to compare the pack with."
    if backend == "buffered" and not was_cold:
        return "No verdict: what was read may have come out of the page cache."
    through_reader = [gain for gain in gains if (gain.way, gain.state) == ("reader", "cold")]
    if any(gain.word == "unproven" for gain in through_reader):
        return f"No verdict: {_too_few(rounds)}"
    raw = [gain for gain in gains if gain.way == "raw"]
    mapped = [gain for gain in gains if gain.way == "mapped" and gain.ratio is not None]
    sentences = [
        _headline(through_reader),
        f"The bare backend {'gains' if _gaining(raw) else 'shows no gain'}: {_by_depth(raw)}.",
    ]
    if mapped:
        states = ", ".join(f"{_times(gain)} {gain.state}" for gain in mapped)
        sentences.append(f"Memory-mapped: {states}.")
    share = f"{CONFIDENCE * 100:.0f} %"
    return " ".join([*sentences, f"In brackets: intervals of {share}."])


def _too_few(rounds: Sequence[Round]) -> str:
    count = len(rounds) - len(quiet(rounds))
    if count:
        what = f"in {count} of {len(rounds)} rounds other processes {_DISTURBED}"
        return f"{what}. Measure when they rest, or give more --seconds."
    return f"{len(rounds)} rounds are too few to tell. Give more --seconds."


def _headline(gains: Sequence[Gain]) -> str:
    """Say what users of a Reader gain."""
    faster = _gaining(gains)
    if not faster:
        return f"{_NOTHING}: moepack reads blobs {_by_depth(gains)} {_AS_SLICES}."
    rest = [gain for gain in gains if gain not in faster]
    said = f"Packing gains here: moepack reads blobs {_by_depth(faster)} {_AS_SLICES}."
    return f"{said} No gain is shown elsewhere: {_by_depth(rest)}." if rest else said


def _gaining(gains: Sequence[Gain]) -> list[Gain]:
    return [gain for gain in gains if gain.word == "gain"]


_NOTHING = "No gain is shown here"
_DISTURBED = "used the drive or the CPUs"
_AS_SLICES = "times as fast as the slices of the shards"


def _by_depth(gains: Sequence[Gain]) -> str:
    """Write `1.94 (1.81 to 2.06) at depth 1, 1.20 (1.11 to 1.29) at depth 4`."""
    return ", ".join(f"{_times(gain)} at depth {gain.depth}" for gain in gains)


def _times(gain: Gain) -> str:
    return f"{gain.ratio:.2f} ({gain.low:.2f} to {gain.high:.2f})"


def notes(
    rounds: Sequence[Round], backend: str, was_cold: bool | None, pack_length: int
) -> tuple[str, ...]:
    """Say what keeps the numbers from meaning what they seem to."""
    sentences = []
    if was_cold is None:
        sentences.append("this system does not say what is cached: `cold` may not be cold")
    elif not was_cold:
        sentences.append("files stayed in the page cache though dropped: `cold` is not cold")
    if backend == "buffered":
        sentences.append("no direct reads here: all went through the page cache")
    if pack_length < SMALL:
        sentences.append("a small pack: a drive's own memory may hold much of it")
    count = len(rounds) - len(quiet(rounds))
    if count:
        left_out = f"in {count} of {len(rounds)} rounds other processes {_DISTURBED}"
        sentences.append(f"{left_out}: the comparison leaves them out")
    return tuple(sentences)
