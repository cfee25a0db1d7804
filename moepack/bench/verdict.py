"""The verdict on paired rounds: the pack is faster, the shards are, or neither is shown.

A side is faster if it is by more than 5 % in three quarters of the rounds. A disturbance lasts
longer than a round, and slows both sides of a pair.
"""

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from moepack.bench.comparison import Round
from moepack.common.sizes import count_text

MIN_ROUNDS = 12
"""The fewest rounds that show anything."""

MIN_GAIN = 1.05
"""A gain below 5 % is none: nobody would repack a model for it, and few could measure it again."""

SMALL_LENGTH = 1 << 30
"""Bytes of a pack that a drive's own memory may hold for the most part."""

NO_DIRECT_READS = "no direct reads here: all went through the page cache"
_HEADLINES = {"gain": "Pack faster", "loss": "Shards faster", "none": "No difference shown"}


class Gain(NamedTuple):
    """The factor by which reading the pack's blobs is faster than the shards' slices.

    `ratio` is the median of the rounds, `low` and `high` are their quartiles; None for fewer rounds
    than MIN_ROUNDS. `word` is `gain` if `low` lies above 1.05, `loss` if `high` lies below 1/1.05,
    else `none`.
    """

    depth: int
    ratio: float | None
    low: float | None
    high: float | None
    round_count: int
    word: str

    def __str__(self) -> str:
        """Write `1.94 (1.81 to 2.06)`."""
        return f"{self.ratio:.2f} ({self.low:.2f} to {self.high:.2f})"


def judge(rounds: Sequence[Round], depths: Sequence[int]) -> tuple[Gain, ...]:
    """Compare blobs with slices at each depth, in the undisturbed rounds."""
    calm = [one.usages for one in rounds if not one.is_disturbed]
    return tuple(
        _gain(depth, [one["slices", depth].seconds / one["blobs", depth].seconds for one in calm])
        for depth in depths
    )


def _gain(depth: int, ratios: Sequence[float]) -> Gain:
    if len(ratios) < MIN_ROUNDS:
        return Gain(depth, None, None, None, len(ratios), "none")
    low, ratio, high = statistics.quantiles(ratios, n=4, method="inclusive")
    word = "gain" if low > MIN_GAIN else "loss" if high < 1 / MIN_GAIN else "none"
    return Gain(depth, ratio, low, high, len(ratios), word)


def verdict(
    gains: Sequence[Gain], rounds: Sequence[Round], backend: str, was_cold: bool | None
) -> tuple[str | None, str]:
    """Judge the pack at the depth at which the shards are read fastest; return a word and a text.

    The word is None if nothing can be compared. A gain at a smaller depth alone comes with a deeper
    queue, without a pack; and a depth that is chosen for the shards is not one at which packs just
    had luck.
    """
    if not gains:
        layouts = {layout for layout, _ in rounds[0].usages}
        lack, other = ("a `source`", "pack") if "blobs" in layouts else ("a pack", "shards")
        return None, f"No verdict: without {lack} there is nothing to compare the {other} with."
    if backend == "buffered" and not was_cold:
        return None, "No verdict: the reads may have come from the page cache."

    def speed(gain: Gain) -> float:
        return statistics.median(
            one.usages["slices", gain.depth].bytes_per_second for one in rounds
        )

    best = max(gains, key=speed)
    headline = _HEADLINES[best.word]
    if best.ratio is None:
        return best.word, f"{headline}: {_too_few(rounds)}."
    text = (
        f"{headline}: at depth {best.depth}, where moepack reads the shards fastest, it reads the "
        f"pack {best} times as fast as them."
    )
    others = ", ".join(f"{gain} at depth {gain.depth}" for gain in gains if gain is not best)
    if others:
        text += f" At other depths: {others}."
    return best.word, f"{text} In brackets: the middle half of the rounds."


def _too_few(rounds: Sequence[Round]) -> str:
    count = sum(not one.is_disturbed for one in rounds)
    if count < len(rounds):
        return (
            f"{count} of {count_text(len(rounds), 'round')} were undisturbed, and it takes "
            f"{MIN_ROUNDS}; measure while other processes rest"
        )
    return (
        f"there was time for {count_text(count, 'round')}, and it takes {MIN_ROUNDS}; measure for "
        "more `seconds`"
    )


def notes(
    rounds: Sequence[Round], backend: str, was_cold: bool | None, pack_length: int
) -> tuple[str, ...]:
    """Return reasons why the numbers may mislead."""
    sentences = []
    if was_cold is None:
        sentences.append("this system does not report what is cached: reads may not be cold")
    elif not was_cold:
        sentences.append("files stayed in the page cache although dropped: reads are not cold")
    if backend == "buffered":
        sentences.append(NO_DIRECT_READS)
    if pack_length < SMALL_LENGTH:
        sentences.append("a small pack: a drive's own memory may hold much of it")
    count = sum(one.is_disturbed for one in rounds)
    if count:
        sentences.append(
            f"in {count} of {count_text(len(rounds), 'round')} other processes used the drive or "
            "the CPUs: the comparison leaves them out"
        )
    return tuple(sentences)
