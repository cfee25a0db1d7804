"""The same experts in the same order, read from a pack and from the shards it was made from.

A measurement is of a layout (whole blobs, parts, slices of the shards), a way (`direct`, with
rounding, or `mapped`), a state of the page cache and a depth.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from moepack.bench.timed_reads import Range, Ranges, Usage, through_maps, through_queue
from moepack.bench.turns import in_turns
from moepack.bench.workload import RoutedLayer
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
    """A layout: the ranges that each routed layer needs, and the files that they lie in."""

    layout: str
    groups: Sequence[Ranges]
    paths: tuple[Path, ...]

    @property
    def longest(self) -> int:
        """The longest range in bytes."""
        return max(item.length for group in self.groups for item in group)

    @property
    def length(self) -> int:
        """The bytes of all ranges."""
        return sum(item.length for group in self.groups for item in group)


class Measurement(NamedTuple):
    """What is measured: a layout, how it is read, and how deep."""

    layout: str
    way: str
    state: str
    depth: int


def blobs(pack: Pack, layers: Sequence[RoutedLayer]) -> Access:
    """Take each expert as one blob of the pack."""
    groups = []
    for layer, numbers in layers:
        places = [pack.locate(layer, expert) for expert in numbers]
        groups.append([Range(place.path, place.offset, place.length) for place in places])
    return _access("blobs", groups)


def parts(pack: Pack, layers: Sequence[RoutedLayer]) -> Access:
    """Take each expert as its parts in the pack, one read each."""
    groups = []
    for layer, numbers in layers:
        names = [kind.name for kind in pack.parts(layer)]
        places = [pack.locate(layer, expert, name) for expert in numbers for name in names]
        groups.append([Range(place.path, place.offset, place.stored_length) for place in places])
    return _access("parts", groups)


def slices(source: Source, experts: Experts, pack: Pack, layers: Sequence[RoutedLayer]) -> Access:
    """Take each expert as its slices in the shards.

    Raises RequestError where the source is not what the pack was made from.
    """
    # Reversed, so that a layer's main family, which comes first, is the one that stays.
    families = {family.layer: family for family in reversed(experts.families)}
    for layer in {routed.layer for routed in layers}:
        _check_same(pack, layer, families.get(layer))
    paths = [Path(shard.path) for shard in source.shards]
    groups = []
    for layer, numbers in layers:
        places = [
            (part.slices.at(expert), part.length)
            for expert in numbers
            for part in families[layer].parts
        ]
        groups.append([Range(paths[shard], offset, size) for (shard, offset), size in places])
    return _access("slices", groups)


def rounded(access: Access) -> Access:
    """Round an access outwards to pages, as engines do that read shards directly.

    They slice what they want out of what they get, so nothing is copied for it.
    """
    ends = {path: path.stat().st_size for path in access.paths}
    groups = []
    for group in access.groups:
        ranges = []
        for path, offset, length in group:
            start = offset - offset % PAGE
            end = min(align(offset + length, PAGE), ends[path])
            ranges.append(Range(path, start, end - start))
        groups.append(ranges)
    return access._replace(groups=groups)


def measure(
    backend: Backend,
    accesses: Mapping[str, Access],
    measurements: Sequence[Measurement],
    rounds: int,
    progress: Callable[[], None] | None = None,
) -> tuple[dict[Measurement, list[Usage]], bool | None]:
    """Do all measurements `rounds` times, in turns.

    Return the usages of each, round by round, and whether the cold ones were cold: None where the
    system does not tell. `progress` is called after each measurement.
    """
    direct = {layout: rounded(access) for layout, access in accesses.items()}
    cached_shares: dict[Measurement, float | None] = {}

    def once(measurement: Measurement) -> Usage:
        access = (direct if measurement.way == "direct" else accesses)[measurement.layout]
        if measurement.state == "warm":
            through_maps(access.groups, access.paths, access.longest)
        else:
            page_cache.drop(access.paths)
            if measurement not in cached_shares:
                cached_shares[measurement] = page_cache.cached_share(access.paths)
        usage = _read(backend, access, measurement)
        if progress is not None:
            progress()
        return usage

    sides = {measurement: partial(once, measurement) for measurement in measurements}
    return in_turns(sides, rounds), _was_cold(list(cached_shares.values()))


def _was_cold(cached_shares: Sequence[float | None]) -> bool | None:
    known = [share for share in cached_shares if share is not None]
    if not known or len(known) < len(cached_shares):
        return None
    return max(known) <= COLD_ENOUGH


def ratios(ours: Sequence[Usage], theirs: Sequence[Usage]) -> list[float]:
    """Return how many times as fast as `theirs` ours were, round by round."""
    return [b.seconds / a.seconds for a, b in zip(ours, theirs, strict=True)]


def _access(layout: str, groups: Sequence[Ranges]) -> Access:
    return Access(layout, groups, tuple(dict.fromkeys(r.path for group in groups for r in group)))


def _read(backend: Backend, access: Access, measurement: Measurement) -> Usage:
    if measurement.way == "mapped":
        return through_maps(access.groups, access.paths, access.longest)
    return through_queue(backend, access.groups, measurement.depth, access.longest)


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
