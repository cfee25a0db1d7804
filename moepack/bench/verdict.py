"""What measured ratios mean: whether packing gains anything here, said with care.

A gain, a loss, and that there is none of more than 5 % are each said only where all of an interval
says so. Else it is not decided, and how long that would take is estimated.
"""

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from moepack.bench.interval import STRETCHES, interval
from moepack.bench.pace import LEAST_ROUNDS, Schedule
from moepack.bench.rounds import Condition, Measurement, Round, quiet, readings_of
from moepack.bench.timed_reads import Usage
from moepack.sizes import count_text

WORTH = 1.05
"""A gain below 5 % is none: nobody would repack a model for it, and few could measure it again."""

SMALL = 1 << 30
"""Bytes of a pack below which a drive's own memory may hold much of it."""

LONGEST = 3600.0
"""Seconds beyond which nobody is told to measure."""

_MARGIN = 2
"""Times as long as is estimated, for what is estimated from little."""

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


class Verdict(NamedTuple):
    """What was found, in a word and in words.

    `outcome` is `gain`, `loss`, `none` (there is none of more than 5 %) or `undecided`, and None
    where nothing can be compared. `needed_seconds` are those that deciding takes, about; None where
    it was decided, or would take too long.
    """

    outcome: str | None
    text: str
    needed_seconds: float | None = None

    @property
    def packing_gains(self) -> bool | None:
        """Whether packing gains anything; None where that was not decided."""
        return None if self.outcome in (None, "undecided") else self.outcome == "gain"


NO_SOURCE = "No verdict: without a `source` there is nothing to compare the pack with."
NO_PACK = "No verdict: these are shards as they lie, and there is no pack to compare them with."

_HEADLINES = {
    "gain": "Packing gains here",
    "loss": "Packing loses here",
    "none": "No gain here",
}


def verdict(
    gains: Sequence[Gain],
    rounds: Sequence[Round],
    backend: str,
    was_cold: bool | None,
    schedule: Schedule,
) -> Verdict:
    """Say what packing gains at the best depth, and between which bounds, or why that is open."""
    best = at_best_depth(gains, rounds)
    if best is None:
        return Verdict(None, NO_SOURCE)
    if backend == "buffered" and not was_cold:
        text = "No verdict: what was read may have come out of the page cache."
        return Verdict(None, text)
    undecided = f"Not decided in {schedule.seconds:.0f} s"
    if best.ratio is None:
        needed = _seconds_for_rounds(rounds, schedule)
        text = f"{undecided}: {_too_few(rounds)}."
        if quiet(rounds):
            text += f" {_deciding(needed)}"
        return Verdict("undecided", text, needed)
    outcome = _outcome(best)
    sentences = [
        f"{_HEADLINES.get(outcome, undecided)}: at depth {best.depth}, where moepack reads the "
        f"shards fastest, it reads the pack {_times(best)} times as fast as them"
    ]
    needed = None
    if outcome == "undecided":
        needed = _seconds_for_interval(best, schedule.seconds)
        sentences[0] += f", and a gain is more than {WORTH}. {_deciding(needed)}"
    else:
        sentences[0] += "."
    sentences += _others(gains, best)
    return Verdict(outcome, " ".join([*sentences, "In brackets: 95 % intervals."]), needed)


def _outcome(gain: Gain) -> str:
    """Return what is shown: that it lies above 1.05, below 1/1.05, or not above 1.05."""
    if gain.word != "none" or gain.high is None:
        return gain.word
    return "none" if gain.high <= WORTH else "undecided"


def _others(gains: Sequence[Gain], best: Gain) -> list[str]:
    """Write what was found otherwise than at the best depth."""
    sentences = []
    rest = [gain for gain in _of(gains, "reader", "cold") if gain is not best]
    for title, several in (("At other depths", rest), ("Bare backend", _of(gains, "raw", "cold"))):
        if several:
            sentences.append(f"{title}: {_by_depth(several)}.")
    mapped = [gain for gain in gains if gain.way == "mapped" and gain.ratio is not None]
    if mapped:
        states = ", ".join(f"{_times(gain)} {gain.state}" for gain in mapped)
        sentences.append(f"Memory-mapped: {states}.")
    return sentences


def _seconds_for_rounds(rounds: Sequence[Round], schedule: Schedule) -> float | None:
    """Estimate what enough rounds take, if as many of them are disturbed."""
    count = len(quiet(rounds))
    if not count:
        return None
    share = count / len(rounds)
    needed = max(schedule.needed_seconds / share, LEAST_ROUNDS * schedule.seconds / count)
    return _rounded(needed)


def _seconds_for_interval(gain: Gain, seconds: float) -> float | None:
    """Estimate when the interval will be all on one side of 1.05: it halves in four times the time.

    Twice what that comes to, as the next interval lies elsewhere. None where it would take too
    long.
    """
    assert gain.ratio is not None
    bound = gain.high if gain.ratio < WORTH else gain.low
    assert bound is not None
    width, gap = abs(math.log(bound / gain.ratio)), abs(math.log(gain.ratio / WORTH))
    seconds = _MARGIN * max(seconds, 1.0)
    if width > gap * math.sqrt(LONGEST / seconds):
        return None
    return _rounded(seconds * (width / gap) ** 2)


def _rounded(seconds: float) -> float:
    """Round up to what one would type."""
    step = 5 if seconds < 100 else 50
    return math.ceil(seconds / step) * step


def _deciding(seconds: float | None) -> str:
    if seconds is None or seconds > LONGEST:
        return "Deciding would take more than an hour."
    return f"Deciding takes about {seconds:.0f} s: `seconds={seconds:.0f}`."


def _of(gains: Sequence[Gain], way: str, state: str) -> list[Gain]:
    return [gain for gain in gains if (gain.way, gain.state) == (way, state)]


def _too_few(rounds: Sequence[Round]) -> str:
    count = len(rounds) - len(quiet(rounds))
    if count:
        return (
            f"in {count} of {count_text(len(rounds), 'round')} other processes {_DISTURBED}, "
            f"{len(rounds) - count} are left, and it takes {STRETCHES}; measure when they rest"
        )
    return f"there was time for {count_text(len(rounds), 'round')}, and it takes {STRETCHES}"


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
        left_out = f"in {count} of {count_text(len(rounds), 'round')} other processes {_DISTURBED}"
        sentences.append(f"{left_out}: the comparison leaves them out")
    return tuple(sentences)
