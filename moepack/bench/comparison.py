"""The same experts read from a pack and from its shards, in paired rounds.

Drives and their neighbours change from minute to minute, so a round reads few experts, and both
sides of a pair right after each other: the pack first in one round, the shards in the next. Both
come through the same reader, into its memory, with digests checked. Time alone ends the rounds,
never their results, or these would be biased.
"""

import itertools
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from moepack.bench.disturbance import MAX_SHARE, DisturbanceMonitor
from moepack.bench.layouts import Groups
from moepack.bench.measuring import Meter
from moepack.bench.timed_reads import Usage
from moepack.pack.reading.pack import Pack
from moepack.pack.reading.reader import Reader
from moepack.storage import page_cache

PORTION_LENGTH = 16 << 20
"""Bytes of experts that are read in one go: long enough to be timed well."""

WARM_UP_SHARE = 0.2
"""The time for reading everything once, as a share of the time for the rounds."""

COLD_ENOUGH = 0.01
"""The share of the bytes to read that may stay cached: file systems keep a few pages."""


class Round(NamedTuple):
    """The number of the portion that was read at each depth, and the usage by layout and depth."""

    portions: Mapping[int, int]
    usages: Mapping[tuple[str, int], Usage]
    is_disturbed: bool


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
        monitor = DisturbanceMonitor(paths)
        numbers = itertools.cycle(range(len(portions)))
        rounds: list[Round] = []
        while not (rounds and meter.is_over):
            chosen = {depth: next(numbers) for depth in depths}
            order = list(sides) if len(rounds) % 2 == 0 else list(sides)[::-1]
            usages = {}
            for depth, layout in itertools.product(depths, order):
                if backend == "buffered":
                    page_cache.drop(paths)
                usages[layout, depth] = _read(
                    readers[depth], sides[layout], portions[chosen[depth]]
                )
                meter.advance()
            rounds.append(Round(chosen, usages, monitor() > MAX_SHARE))
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
