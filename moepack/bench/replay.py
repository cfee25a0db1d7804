"""The same experts in the same order, read from a pack and from the shards it was made from.

Each reading is a layout (whole blobs, parts, slices of the shards), a way (`direct`, with rounding,
or `mapped`), a state of the page cache and a depth. They take turns, ABBA, so that a drive that
warms up or a neighbour who wakes up is nobody's advantage.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from moepack.bench.timed_reads import Range, Step, Usage, through_maps, through_queue
from moepack.bench.workload import RoutedStep
from moepack.errors import RequestError
from moepack.reading.expert_read import PAGE
from moepack.reading.pack import Pack
from moepack.sizes import align
from moepack.source.experts import Experts, SourceFamily
from moepack.source.shards import Source
from moepack.storage import page_cache
from moepack.storage.backend import Backend

COLD_ENOUGH = 0.01
"""The share of pages that may be left in the page cache: file systems keep a few."""


class Access(NamedTuple):
    """A layout: the ranges that each step needs, and the files that they lie in."""

    layout: str
    steps: Sequence[Step]
    paths: tuple[Path, ...]

    @property
    def longest(self) -> int:
        """The longest range in bytes."""
        return max(one.length for step in self.steps for one in step)


class Reading(NamedTuple):
    """What is measured: a layout, how it is read, and how deep."""

    layout: str
    way: str
    state: str
    depth: int


def blobs(pack: Pack, steps: Sequence[RoutedStep]) -> Access:
    """Take each expert as one blob of the pack."""
    wanted = []
    for layer, experts in steps:
        places = [pack.locate(layer, expert) for expert in experts]
        wanted.append([Range(one.path, one.offset, one.length) for one in places])
    return _access("blobs", wanted)


def parts(pack: Pack, steps: Sequence[RoutedStep]) -> Access:
    """Take each expert as its parts in the pack, one read each."""
    wanted = []
    for layer, experts in steps:
        names = [kind.name for kind in pack.parts(layer)]
        places = [pack.locate(layer, expert, name) for expert in experts for name in names]
        wanted.append([Range(one.path, one.offset, one.stored_length) for one in places])
    return _access("parts", wanted)


def slices(source: Source, found: Experts, pack: Pack, steps: Sequence[RoutedStep]) -> Access:
    """Take each expert as its slices in the shards.

    Raises RequestError where the source is not what the pack was made from.
    """
    families = {family.layer: family for family in reversed(found.families)}
    wanted = []
    for layer in {step.layer for step in steps}:
        _check_same(pack, layer, families.get(layer))
    for layer, experts in steps:
        places = [
            (part.slices.at(expert), part.length)
            for expert in experts
            for part in families[layer].parts
        ]
        shards = source.shards
        wanted.append([Range(Path(shards[n].path), offset, size) for (n, offset), size in places])
    return _access("slices", wanted)


def rounded(access: Access) -> Access:
    """Round an access outwards to pages, as engines do that read shards directly.

    They slice what they want out of what they get, so nothing is copied for it.
    """
    ends = {path: path.stat().st_size for path in access.paths}
    steps = []
    for step in access.steps:
        ranges = []
        for path, offset, length in step:
            start = offset - offset % PAGE
            end = min(align(offset + length, PAGE), ends[path])
            ranges.append(Range(path, start, end - start))
        steps.append(ranges)
    return access._replace(steps=steps)


def measure(
    backend: Backend,
    accesses: Mapping[str, Access],
    readings: Sequence[Reading],
    rounds: int,
    progress: Callable[[int], None] | None = None,
) -> tuple[dict[Reading, list[Usage]], bool | None]:
    """Do all readings `rounds` times, there and back again.

    Gives the usages of each, round by round, and whether the cold ones were cold: None where the
    system does not tell. `progress` is called with 1 after each reading.
    """
    usages: dict[Reading, list[Usage]] = {reading: [] for reading in readings}
    direct = {layout: rounded(access) for layout, access in accesses.items()}
    shares: list[float | None] = []
    for number in range(rounds):
        for reading in readings if number % 2 == 0 else reversed(readings):
            access = (direct if reading.way == "direct" else accesses)[reading.layout]
            if reading.state == "cold":
                page_cache.drop(access.paths)
                if number == 0:
                    shares.append(page_cache.cached_share(access.paths))
            else:
                through_maps(access.steps, access.paths, access.longest)
            usages[reading].append(_read(backend, access, reading))
            if progress is not None:
                progress(1)
    known = [share for share in shares if share is not None]
    return usages, max(known) <= COLD_ENOUGH if len(known) == len(shares) and known else None


def ratios(ours: Sequence[Usage], theirs: Sequence[Usage]) -> list[float]:
    """Give how many times as fast as `theirs` ours were, round by round."""
    return [b.seconds / a.seconds for a, b in zip(ours, theirs, strict=True)]


def _access(layout: str, steps: Sequence[Step]) -> Access:
    return Access(layout, steps, tuple(dict.fromkeys(one.path for step in steps for one in step)))


def _read(backend: Backend, access: Access, reading: Reading) -> Usage:
    if reading.way == "mapped":
        return through_maps(access.steps, access.paths, access.longest)
    return through_queue(backend, access.steps, reading.depth, access.longest)


def _check_same(pack: Pack, layer: int, family: SourceFamily | None) -> None:
    ours = {(kind.name, kind.length) for kind in pack.parts(layer)}
    theirs = {(part.name, part.length) for part in family.parts} if family else set()
    if ours != theirs or (family and family.expert_count != pack.expert_count(layer)):
        raise RequestError(
            "the source is not what the pack was made from",
            path=pack.path,
            place=f"layer {layer}",
            expected=sorted(ours),
            found=sorted(theirs),
        )
