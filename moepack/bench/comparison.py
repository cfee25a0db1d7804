"""The same experts read from a pack and from its shards, in paired rounds.

Drives and their neighbours change from minute to minute, so a round reads few experts, and both
sides of a pair right after each other: the pack first in one round, the shards in the next. Both
come through the same reader, into its memory, with digests checked. Time alone ends the rounds,
never their results, or these would be biased.

The verdict is one of three: the pack is faster, the shards are, or neither is shown. A side is
faster if it is by more than 5 % in three quarters of the rounds: other programs that use the drive
slow both sides of a pair, and most of them for longer than a round.
"""

import itertools
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from moepack.bench.drive import Usage
from moepack.bench.measuring import Meter
from moepack.bench.workload import Groups
from moepack.common.sizes import count_text
from moepack.pack.reading.pack import Pack
from moepack.pack.reading.reader import Reader
from moepack.storage import page_cache

PORTION_LENGTH = 16 << 20
"""Bytes of experts that are read in one go: long enough to be timed well."""

WARM_UP_SHARE = 0.2
"""The time for reading everything once, as a share of the time for the rounds."""

COLD_ENOUGH = 0.01
"""The share of the bytes to read that may stay cached: file systems keep a few pages."""

MIN_ROUNDS = 12
"""The fewest rounds that show anything."""

MIN_GAIN = 1.05
"""A gain below 5 % is none: nobody would repack a model for it, and few could measure it again."""

SMALL_LENGTH = 1 << 30
"""Bytes of a pack that a drive's own memory may hold for the most part."""

NO_DIRECT_READS = "no direct reads here: all went through the page cache"
_HEADLINES = {"gain": "Pack faster", "loss": "Shards faster", "none": "No difference shown"}


class Round(NamedTuple):
    """The routed layers that were read at each depth, and the usage by layout and depth."""

    portions: Mapping[int, slice]
    usages: Mapping[tuple[str, int], Usage]


def compare(
    pack: Pack,
    sides: Mapping[str, Groups],
    backend: str,
    depths: Sequence[int],
    seconds: float,
    meter: Meter,
) -> tuple[list[Round], list[slice], bool | None]:
    """Read the layouts in `sides` in rounds of `seconds` in all, at each of the `depths`.

    Returns the rounds, the portions that they read, as slices of the routed layers, and whether the
    page cache held nothing; None if the system does not report it. Raises what opening and reading
    raise.
    """
    experts = [expert for groups in sides.values() for group in groups for expert in group]
    reads = {read for expert in experts for read in expert.file_reads}
    paths = list({read.path for read in reads})
    with ExitStack() as stack:
        readers = {
            # Layouts are compared on one drive, without a mirror.
            depth: stack.enter_context(pack.reader(backend=backend, depth=depth, mirror=False))
            for depth in depths
        }
        portions = _warm_up(readers[max(depths)], sides, WARM_UP_SHARE * seconds)
        page_cache.drop(paths)
        was_cold = _is_cold(paths, sum(read.length for read in reads))
        meter.begin(seconds)
        following = itertools.cycle(portions)
        rounds: list[Round] = []
        while not (rounds and meter.is_over):
            chosen = {depth: next(following) for depth in depths}
            order = list(sides) if len(rounds) % 2 == 0 else list(sides)[::-1]
            usages = {}
            for depth, layout in itertools.product(depths, order):
                if backend == "buffered":
                    page_cache.drop(paths)
                usages[layout, depth] = _read(readers[depth], sides[layout], chosen[depth])
                meter.advance()
            rounds.append(Round(chosen, usages))
    return rounds, portions, was_cold


def cut(groups: Groups) -> list[slice]:
    """Cut routed layers into portions of PORTION_LENGTH; a short rest goes to the last."""
    portions = []
    start = length = 0
    for end, group in enumerate(groups, 1):
        length += sum(read.length for expert in group for read in expert.file_reads)
        if length >= PORTION_LENGTH:
            portions.append(slice(start, end))
            start, length = end, 0
    last = portions.pop() if portions else slice(0, 0)
    return [*portions, slice(last.start, len(groups))]


def _warm_up(reader: Reader, sides: Mapping[str, Groups], seconds: float) -> list[slice]:
    """Read all once, so that caches that nobody can drop hold both sides alike.

    Returns the portions that there was time for, at least one.
    """
    portions = cut(next(iter(sides.values())))
    start = time.perf_counter()
    for count, portion in enumerate(portions, 1):
        for groups in sides.values():
            _read(reader, groups, portion)
        if time.perf_counter() - start > seconds:
            return portions[:count]
    return portions


def _read(reader: Reader, groups: Groups, portion: slice) -> Usage:
    """Read a portion as users do: memory, bounds and digests are the reader's."""
    cpu_start, start = time.process_time(), time.perf_counter()
    for group in groups[portion]:
        with reader.submit_reads(group) as batch:
            for expert in batch.completions():
                del expert
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    lengths = [
        read.length for group in groups[portion] for expert in group for read in expert.file_reads
    ]
    return Usage(seconds, cpu_seconds, len(lengths), sum(lengths))


def _is_cold(paths: Sequence[Path], length: int) -> bool | None:
    """Return whether the cached bytes are few, beside `length` bytes to read."""
    share = page_cache.cached_share(paths)
    if share is None:
        return None
    return share * sum(path.stat().st_size for path in paths) <= COLD_ENOUGH * length


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
    """Compare blobs with slices at each depth."""
    several = [one.usages for one in rounds]
    return tuple(
        _gain(
            depth, [one["slices", depth].seconds / one["blobs", depth].seconds for one in several]
        )
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
        return best.word, (
            f"{headline}: there was time for {count_text(len(rounds), 'round')}, and it takes "
            f"{MIN_ROUNDS}; measure for more `seconds`."
        )
    text = (
        f"{headline}: at depth {best.depth}, where moepack reads the shards fastest, it reads the "
        f"pack {best} times as fast as them."
    )
    others = ", ".join(f"{gain} at depth {gain.depth}" for gain in gains if gain is not best)
    if others:
        text += f" At other depths: {others}."
    return best.word, f"{text} In brackets: the middle half of the rounds."


def notes(backend: str, was_cold: bool | None, pack_length: int) -> tuple[str, ...]:
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
    return tuple(sentences)
