"""What measured ratios mean: whether packing gains anything here, said with care.

A verdict is one of two, and only a gain has to be proven: a run that saw too little for that says
the same as one that saw that there is none. What could not be compared at all gets no verdict.
"""

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from moepack.bench.interval import STRETCHES, interval
from moepack.bench.rounds import Condition, Measurement, Round, quiet, readings_of
from moepack.bench.timed_reads import Usage

WORTH = 1.05
"""A gain below 5 % is none: nobody would repack a model for it, and few could measure it again."""

SMALL = 1 << 30
"""Bytes of a pack below which a drive's own memory may hold much of it."""

NO_DIRECT_READS = "no direct reads here: all went through the page cache"


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
        ours, theirs = (
            [usage for _, usage in readings_of(counting, Measurement(layout, condition))]
            for layout in ("blobs", "slices")
        )
        gains.append(_gain(condition, ratios(ours, theirs)))
    return tuple(gains)


def ratios(ours: Sequence[Usage], theirs: Sequence[Usage]) -> list[float]:
    """Return how many times as fast as `theirs` ours were, pair by pair."""
    return [b.seconds / a.seconds for a, b in zip(ours, theirs, strict=True)]


def _gain(condition: Condition, values: Sequence[float]) -> Gain:
    found = interval(values)
    if found is None:
        return Gain(*condition, None, None, None, len(values), "unproven")
    word = "none"
    if found.low > WORTH:
        word = "gain"
    elif found.high < 1 / WORTH:
        word = "loss"
    return Gain(*condition, *found, len(values), word)


def at_best_depth(gains: Sequence[Gain], rounds: Sequence[Round]) -> Gain | None:
    """Return what a Reader gains at the depth at which it reads the shards fastest.

    What packing gains at a smaller depth alone, a deeper queue gives without it. And a depth that
    is chosen for the shards is not one at which packs just had luck. None without a source.
    """
    counting = quiet(rounds)

    def speed(gain: Gain) -> float:
        measurement = Measurement("slices", Condition(gain.way, gain.state, gain.depth))
        readings = readings_of(counting, measurement)
        speeds = [usage.length / usage.seconds for _, usage in readings]
        return statistics.median(speeds) if speeds else 0.0

    return max(_of(gains, "reader", "cold"), key=speed, default=None)


def verdict(
    gains: Sequence[Gain], rounds: Sequence[Round], backend: str, was_cold: bool | None
) -> tuple[bool | None, str]:
    """Say whether packing is shown to gain anything, and between which bounds, in words.

    None, and why, where that cannot be said.
    """
    best = at_best_depth(gains, rounds)
    if best is None:
        return None, "No verdict: without --source there is nothing to compare the pack with."
    if backend == "buffered" and not was_cold:
        return None, "No verdict: what was read may have come out of the page cache."
    if best.word == "unproven":
        return None, f"No verdict: {_too_few(rounds)}"
    is_gain = best.word == "gain"
    sentences = [
        f"{'Packing gains here' if is_gain else 'No gain is shown here'}: at depth {best.depth}, "
        f"where moepack reads the shards fastest, it reads the pack {_times(best)} times "
        "as fast as them."
    ]
    rest = [gain for gain in _of(gains, "reader", "cold") if gain is not best]
    for title, several in (("At other depths", rest), ("Bare backend", _of(gains, "raw", "cold"))):
        if several:
            sentences.append(f"{title}: {_by_depth(several)}.")
    mapped = [gain for gain in gains if gain.way == "mapped" and gain.ratio is not None]
    if mapped:
        states = ", ".join(f"{_times(gain)} {gain.state}" for gain in mapped)
        sentences.append(f"Memory-mapped: {states}.")
    return is_gain, " ".join([*sentences, "In brackets: 95 % intervals."])


def _of(gains: Sequence[Gain], way: str, state: str) -> list[Gain]:
    return [gain for gain in gains if (gain.way, gain.state) == (way, state)]


def _too_few(rounds: Sequence[Round]) -> str:
    count = len(rounds) - len(quiet(rounds))
    if count:
        what = f"in {count} of {len(rounds)} rounds other processes {_DISTURBED}"
        needed = f"; {len(rounds) - count} are left, and {STRETCHES} are needed"
        return f"{what}{needed}. Measure when they rest, or give more --seconds."
    return (
        f"it takes {STRETCHES} rounds, and there was time for {len(rounds)}. Give more --seconds."
    )


_DISTURBED = "used the drive or the CPUs"


def _by_depth(gains: Sequence[Gain]) -> str:
    """Write `1.94 (1.81 to 2.06) at depth 1, 1.20 (1.11 to 1.29) at depth 4`."""
    return ", ".join(f"{_times(gain)} at depth {gain.depth}" for gain in gains)


def _times(gain: Gain) -> str:
    return f"{gain.ratio:.2f} ({gain.low:.2f} to {gain.high:.2f})"


def cold_is_assured(was_cold: bool | None, pack_length: int) -> bool | None:
    """Say whether what was to be cold was, in the page cache and in the drive; None: not known."""
    return None if was_cold and pack_length < SMALL else was_cold


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
        sentences.append(NO_DIRECT_READS)
    if pack_length < SMALL:
        sentences.append(
            "a small pack: a drive's own memory may hold much of it, and `cold` may not be cold"
        )
    count = len(rounds) - len(quiet(rounds))
    if count:
        left_out = f"in {count} of {len(rounds)} rounds other processes {_DISTURBED}"
        sentences.append(f"{left_out}: the comparison leaves them out")
    return tuple(sentences)
