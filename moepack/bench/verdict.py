"""What measured speeds mean: whether packing gains anything here, said with care."""

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from moepack.bench.replay import Measurement

WORTH = 1.05
"""A gain below 5 % is none: nobody would repack a model for it, and few could measure it again."""

SMALL = 1 << 30
"""Bytes of a pack below which a drive's own memory may hold much of it."""


_AS_SHARDS = "as fast as reading from the shards."


class Gain(NamedTuple):
    """How many times as fast as the shards the pack's blobs are: median and spread over the rounds.

    `word` is `gain`, `loss`, or `none` where the rounds do not agree or differ by less than 5 %.
    """

    way: str
    state: str
    depth: int
    median: float
    lowest: float
    highest: float
    word: str


def judge(measurement: Measurement, ratios: Sequence[float]) -> Gain:
    """Judge the ratios of all rounds of a measurement of blobs."""
    median, lowest, highest = statistics.median(ratios), min(ratios), max(ratios)
    word = "none"
    if median >= WORTH and lowest > 1:
        word = "gain"
    elif median <= 1 / WORTH and highest < 1:
        word = "loss"
    _, way, state, depth = measurement
    return Gain(way, state, depth, median, lowest, highest, word)


def verdict(gains: Sequence[Gain]) -> str:
    """Say in words what packing gains, and at which depth the gain ends."""
    if not gains:
        return "No verdict: without --source there is nothing to compare the pack with."
    direct = [gain for gain in gains if (gain.way, gain.state) == ("direct", "cold")]
    faster = [gain for gain in direct if gain.word == "gain"]
    slower = [gain for gain in direct if gain.word == "loss"]
    sentences = []
    if faster:
        sentences.append(f"Packing gains here: {_times(faster)} {_AS_SHARDS}")
        deeper = [gain.depth for gain in direct if gain.depth > faster[-1].depth]
        if deeper:
            sentences.append(f"The gain ends before depth {deeper[0]}.")
    else:
        depths = ", ".join(str(gain.depth) for gain in direct)
        sentences.append(f"Packing gains nothing here for direct reads (at depth {depths}).")
    if slower:
        sentences.append(f"It loses: {_times(slower)} {_AS_SHARDS}")
    mapped = [
        f"{'as fast' if gain.word == 'none' else f'{gain.median:.2f} times as fast'} {gain.state}"
        for gain in gains
        if gain.way == "mapped"
    ]
    return " ".join([*sentences, f"Memory-mapped it reads {' and '.join(mapped)}."])


def _times(gains: Sequence[Gain]) -> str:
    """Write `at depth 1 1.94 times, at depth 4 1.20 times`."""
    return ", ".join(f"at depth {gain.depth} {gain.median:.2f} times" for gain in gains)


def notes(backend: str, pack_length: int, cold_is_assured: bool | None) -> tuple[str, ...]:
    """Say what keeps the numbers from meaning what they seem to."""
    sentences = []
    if cold_is_assured is None:
        sentences.append("this system does not say what is cached: `cold` may not be cold")
    elif not cold_is_assured:
        sentences.append("files stayed in the page cache though dropped: `cold` is not cold")
    if backend == "buffered":
        sentences.append("no direct reads here: `direct` went through the page cache as well")
    if pack_length < SMALL:
        sentences.append("a small pack: a drive's own memory may hold much of it")
    return tuple(sentences)
