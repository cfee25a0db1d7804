"""The verdict on measured ratios: whether packing gains anything here, with an interval.

A gain, a loss, and that there is no gain of more than 5 % are each stated only if all of the
interval shows it. Else the verdict is open, with an estimate of the time that deciding takes.

Disturbances last longer than a round, so neighbouring rounds resemble each other, and an interval
from single rounds would be too narrow. The run is cut into a few long stretches instead, and the
interval goes from the second lowest of them to the second highest: a bound is passed if it was
passed in every stretch of the run but one. Each has an even chance to lie on either side of the
truth, so that of nine all, or all but one, lie on one side of it in 20 of 512 runs, whatever the
noise is like (the sign test).
"""

import itertools
import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from moepack.bench.rounds import Condition, Measurement, Round, readings_of, undisturbed
from moepack.common.sizes import count_text

STRETCHES = 9
"""The fewest of which the second lowest and the second highest hold the truth with 95 %."""

MIN_ROUNDS = 4 * STRETCHES // 3
"""The fewest rounds to plan for: as many as an interval takes, and some that are disturbed."""

MIN_GAIN = 1.05
"""A gain below 5 % is none: nobody would repack a model for it, and few could measure it again."""

SMALL_LENGTH = 1 << 30
"""Bytes of a pack that a drive's own memory may hold for the most part."""

_MAX_SECONDS = 3600.0
"""The longest time that a verdict suggests."""

_MARGIN = 2
"""Factor on an estimated time, since it is estimated from little."""

NO_DIRECT_READS = "no direct reads here: all went through the page cache"


def interval(ratios: Sequence[float]) -> tuple[float, float, float] | None:
    """Return the ratio of all rounds, and the bounds between which the true one lies: with 96 %.

    None for fewer rounds than STRETCHES.
    """
    if len(ratios) < STRETCHES:
        return None
    logs = [math.log(ratio) for ratio in ratios]
    ends = [number * len(logs) // STRETCHES for number in range(STRETCHES + 1)]
    values = sorted(_middle(logs[start:end]) for start, end in itertools.pairwise(ends))
    return math.exp(statistics.median(values)), math.exp(values[1]), math.exp(values[-2])


def _middle(values: Sequence[float]) -> float:
    """Return the median of the means of all pairs (Hodges and Lehmann 1963).

    One value that is far off does not move it, as with the median; all others count for more.
    """
    pairs = itertools.combinations_with_replacement(values, 2)
    return statistics.median((one + other) / 2 for one, other in pairs)


class Gain(NamedTuple):
    """The factor by which reading the pack's blobs is faster than the shards' slices.

    `low` and `high` are its interval. `word` is `gain` if all of it lies above 1.05, `loss` if all
    of it lies below 1/1.05, `none` if neither is shown, and `unproven` if the `round_count` is too
    low for an interval; then the numbers are None.
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
    """Compare blobs with slices under each condition, in the undisturbed rounds."""
    gains = []
    for condition in conditions:
        blobs, slices = (
            readings_of(undisturbed(rounds), Measurement(layout, condition))
            for layout in ("blobs", "slices")
        )
        ratios = [
            theirs.usage.seconds / ours.usage.seconds
            for ours, theirs in zip(blobs, slices, strict=True)
        ]
        gains.append(_gain(condition, ratios))
    return tuple(gains)


def _gain(condition: Condition, ratios: Sequence[float]) -> Gain:
    bounds = interval(ratios)
    if bounds is None:
        return Gain(*condition, None, None, None, len(ratios), "unproven")
    ratio, low, high = bounds
    word = "none"
    if low > MIN_GAIN:
        word = "gain"
    elif high < 1 / MIN_GAIN:
        word = "loss"
    return Gain(*condition, ratio, low, high, len(ratios), word)


def _at_best_depth(gains: Sequence[Gain], rounds: Sequence[Round]) -> Gain | None:
    """Return the reader's gain at the depth at which it reads the shards fastest.

    A gain at a smaller depth alone comes with a deeper queue, without a pack; and a depth that is
    chosen for the shards is not one at which packs just had luck. None without a source.
    """

    def speed(gain: Gain) -> float:
        measurement = Measurement("slices", Condition(gain.way, gain.state, gain.depth))
        readings = readings_of(undisturbed(rounds), measurement)
        speeds = [usage.bytes_per_second for _, usage in readings]
        return statistics.median(speeds) if speeds else 0.0

    return max(_select(gains, "reader", "cold"), key=speed, default=None)


class Verdict(NamedTuple):
    """The outcome of a comparison, in a word and in words.

    `outcome` is `gain`, `loss`, `none` (no gain of more than 5 %) or `undecided`, and None if
    nothing can be compared. `needed_seconds` is about the time that deciding takes; None if it was
    decided, or would take too long.
    """

    outcome: str | None
    text: str
    needed_seconds: float | None = None

    @property
    def packing_gains(self) -> bool | None:
        """Whether packing gains anything; None if that is undecided."""
        return None if self.outcome in (None, "undecided") else self.outcome == "gain"


NO_SOURCE = "No verdict: without a `source` there is nothing to compare the pack with."
NO_PACK = "No verdict: without a pack there is nothing to compare the shards with."

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
    seconds: float,
    needed_seconds: float,
) -> Verdict:
    """Judge packing by the gain at the best depth.

    `seconds` are those of the rounds, `needed_seconds` the least in which a verdict is expected.
    """
    best = _at_best_depth(gains, rounds)
    if best is None:
        return Verdict(None, NO_SOURCE)
    if backend == "buffered" and not was_cold:
        text = "No verdict: the reads may have come from the page cache."
        return Verdict(None, text)
    undecided = f"Not decided in {seconds:.0f} s"
    if best.ratio is None:
        needed = _seconds_for_rounds(rounds, seconds, needed_seconds)
        text = f"{undecided}: {_too_few(rounds)}."
        if undisturbed(rounds):
            text += f" {_deciding(needed)}"
        return Verdict("undecided", text, needed)
    outcome = _outcome(best)
    sentences = [
        f"{_HEADLINES.get(outcome, undecided)}: at depth {best.depth}, where moepack reads the "
        f"shards fastest, it reads the pack {_times(best)} times as fast as them"
    ]
    needed = None
    if outcome == "undecided":
        needed = _seconds_for_interval(best, seconds)
        sentences[0] += f", and a gain is more than {MIN_GAIN}. {_deciding(needed)}"
    else:
        sentences[0] += "."
    sentences += _others(gains, best)
    return Verdict(outcome, " ".join([*sentences, "In brackets: 95 % intervals."]), needed)


def _outcome(gain: Gain) -> str:
    """Return the outcome that a gain shows."""
    if gain.word != "none" or gain.high is None:
        return gain.word
    return "none" if gain.high <= MIN_GAIN else "undecided"


def _others(gains: Sequence[Gain], best: Gain) -> list[str]:
    """Write the gains other than the one at the best depth."""
    sentences = []
    rest = [gain for gain in _select(gains, "reader", "cold") if gain is not best]
    for title, several in (
        ("At other depths", rest),
        ("Bare backend", _select(gains, "raw", "cold")),
    ):
        if several:
            sentences.append(f"{title}: {_by_depth(several)}.")
    mapped = [gain for gain in gains if gain.way == "mapped" and gain.ratio is not None]
    if mapped:
        states = ", ".join(f"{_times(gain)} {gain.state}" for gain in mapped)
        sentences.append(f"Memory-mapped: {states}.")
    return sentences


def _seconds_for_rounds(
    rounds: Sequence[Round], seconds: float, needed_seconds: float
) -> float | None:
    """Estimate the time of enough rounds, disturbed as often as these."""
    count = len(undisturbed(rounds))
    if not count:
        return None
    share = count / len(rounds)
    return _rounded(max(needed_seconds / share, MIN_ROUNDS * seconds / count))


def _seconds_for_interval(gain: Gain, seconds: float) -> float | None:
    """Estimate the time until the interval lies on one side of 1.05: it halves in four times.

    Twice that, as the next interval lies elsewhere. None if it would take too long.
    """
    assert gain.ratio is not None
    bound = gain.high if gain.ratio < MIN_GAIN else gain.low
    assert bound is not None
    width, gap = abs(math.log(bound / gain.ratio)), abs(math.log(gain.ratio / MIN_GAIN))
    seconds = _MARGIN * max(seconds, 1.0)
    if width > gap * math.sqrt(_MAX_SECONDS / seconds):
        return None
    return _rounded(seconds * (width / gap) ** 2)


def _rounded(seconds: float) -> float:
    """Round up to a number that one would type."""
    step = 5 if seconds < 100 else 50
    return math.ceil(seconds / step) * step


def _deciding(seconds: float | None) -> str:
    if seconds is None or seconds > _MAX_SECONDS:
        return "Deciding would take more than an hour."
    return f"Deciding takes about {seconds:.0f} s: `seconds={seconds:.0f}`."


def _select(gains: Sequence[Gain], way: str, state: str) -> list[Gain]:
    return [gain for gain in gains if (gain.way, gain.state) == (way, state)]


def _too_few(rounds: Sequence[Round]) -> str:
    count = len(rounds) - len(undisturbed(rounds))
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
    """Return whether cold reads were cold, in the page cache and in the drive; None if unknown."""
    return None if was_cold and pack_length < SMALL_LENGTH else was_cold


def notes(
    rounds: Sequence[Round], backend: str, was_cold: bool | None, pack_length: int
) -> tuple[str, ...]:
    """Return reasons why the numbers may mislead."""
    sentences = []
    if was_cold is None:
        sentences.append("this system does not report what is cached: `cold` may not be cold")
    elif not was_cold:
        sentences.append("files stayed in the page cache although dropped: `cold` is not cold")
    if backend == "buffered":
        sentences.append(NO_DIRECT_READS)
    if pack_length < SMALL_LENGTH:
        sentences.append(
            "a small pack: a drive's own memory may hold much of it, and `cold` may not be cold"
        )
    count = len(rounds) - len(undisturbed(rounds))
    if count:
        left_out = f"in {count} of {count_text(len(rounds), 'round')} other processes {_DISTURBED}"
        sentences.append(f"{left_out}: the comparison leaves them out")
    return tuple(sentences)
