"""The same experts in the same order, as each layout holds them.

A layout is whole blobs of a pack, its parts one by one, or the slices of the shards that it was
made from. Slices hold the bytes of the parts, so that the pack's digests prove them as well.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from moepack.bench.timed_reads import Reads
from moepack.bench.workload import RoutedLayer
from moepack.common.errors import RequestError
from moepack.common.sizes import align
from moepack.pack.reading.expert_read import PAGE, ExpertRead, FileRead
from moepack.pack.reading.locations import PartLocation
from moepack.pack.reading.pack import Pack
from moepack.pack.reading.read_plan import plan_read, read_of_parts
from moepack.source.experts import SourceFamily, find_experts
from moepack.source.shards import Source

Groups = Sequence[Sequence[ExpertRead]]
"""Experts by routed layer: those of one are requested together."""


class Portion(NamedTuple):
    """Some routed layers of one layout, which are read in one go.

    `exact` are the exact reads of each expert; `rounded` are those extended to whole pages, as in
    engines that read shards directly. `useful_length` is the bytes of the parts alone.
    """

    groups: Groups
    exact: Sequence[Sequence[Reads]]
    rounded: Sequence[Sequence[Reads]]
    paths: tuple[Path, ...]
    useful_length: int

    @property
    def longest(self) -> int:
        """The most bytes of memory that the rounded reads of an expert take."""
        experts = (expert for group in self.rounded for expert in group)
        return max(read.start + read.length for expert in experts for read in expert)


def blobs(pack: Pack, layers: Sequence[RoutedLayer]) -> Groups:
    """Return each expert as one blob of the pack."""
    return _experts(layers, lambda layer, expert: plan_read(pack, layer, expert, None, None))


def parts(pack: Pack, layers: Sequence[RoutedLayer]) -> Groups:
    """Return each expert as its parts in the pack, one read each."""
    return _experts(layers, lambda layer, expert: _one_by_one(pack, _parts(pack, layer, expert)))


def slices(source: Source, pack: Pack, layers: Sequence[RoutedLayer]) -> Groups:
    """Return each expert as its slices in the shards.

    Raises RequestError if the pack was not made from this source.
    """
    # Reversed, so that a layer's main family, which comes first, is the one that stays.
    families = {family.layer: family for family in reversed(find_experts(source).families)}
    for layer in {routed.layer for routed in layers}:
        _check_same(pack, layer, families.get(layer))
    paths = [Path(shard.path) for shard in source.shards]

    def plan(layer: int, expert: int) -> ExpertRead:
        places = {part.name: part.slices.at(expert) for part in families[layer].parts}
        slices = []
        for part in _parts(pack, layer, expert):
            shard, offset = places[part.part]
            slices.append(
                part._replace(
                    path=paths[shard], offset=offset, stored_length=part.length, codec=None
                )
            )
        return _one_by_one(pack, slices)

    return _experts(layers, plan)


def portions(groups: Groups, sizes: Sequence[int]) -> list[Portion]:
    """Cut `groups` into portions of so many routed layers each. Raises OSError for a lost file."""
    lengths: dict[Path, int] = {}
    rest = iter(groups)
    return [_portion([next(rest) for _ in range(size)], lengths) for size in sizes]


def _portion(groups: Groups, lengths: dict[Path, int]) -> Portion:
    experts = [expert for group in groups for expert in group]
    paths = tuple(dict.fromkeys(read.path for expert in experts for read in expert.file_reads))
    for path in paths:
        lengths.setdefault(path, path.stat().st_size)
    return Portion(
        groups,
        [[expert.file_reads for expert in group] for group in groups],
        [[_rounded(expert, lengths) for expert in group] for group in groups],
        paths,
        sum(part.length for expert in experts for part in expert.parts),
    )


def _experts(layers: Sequence[RoutedLayer], plan: Callable[[int, int], ExpertRead]) -> Groups:
    return [[plan(layer, expert) for expert in numbers] for layer, numbers in layers]


def _parts(pack: Pack, layer: int, expert: int) -> list[PartLocation]:
    return [pack.locate(layer, expert, kind.name) for kind in pack.parts(layer)]


def _one_by_one(pack: Pack, places: Sequence[PartLocation]) -> ExpertRead:
    """Plan one read for each of the parts, even if they are adjacent."""
    layer, expert = places[0][:2]
    return read_of_parts(layer, expert, places, pack.part_names(layer), 0)


def _rounded(expert: ExpertRead, lengths: dict[Path, int]) -> Reads:
    """Round the reads of an expert outwards to pages, but not past the end of their file."""
    frames = expert.frames.file_reads if expert.frames else ()
    others = expert.file_reads[: len(expert.file_reads) - len(frames)]
    return [*_rounded_reads(others, lengths), *_rounded_reads(frames, lengths)]


def _rounded_reads(reads: Sequence[FileRead], lengths: dict[Path, int]) -> Iterator[FileRead]:
    for read in reads:
        path, offset, length, start = read
        end = min(align(offset + length, PAGE), lengths[path])
        first = start + reads[0].lead - read.lead
        yield FileRead(path, offset - read.lead, end - offset + read.lead, first)


def _listed(parts: set[tuple[str, int]]) -> str:
    return ", ".join(f"{name} of {length:,} bytes" for name, length in sorted(parts)) or "none"


def _check_same(pack: Pack, layer: int, family: SourceFamily | None) -> None:
    ours = {(kind.name, kind.length) for kind in pack.parts(layer)}
    theirs = {(part.name, part.length) for part in family.parts} if family else set()
    if ours != theirs or (family and family.expert_count != pack.expert_count(layer)):
        raise RequestError(
            "the pack was not made from this source",
            path=pack.path,
            place=f"layer {layer}",
            expected=_listed(ours),
            found=_listed(theirs),
        )
