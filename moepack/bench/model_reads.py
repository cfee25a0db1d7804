"""How the experts of a model are read: from which files, in reads of which lengths."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from moepack.errors import RequestError
from moepack.paths import PathOrPaths
from moepack.reading.directory import named_pack
from moepack.reading.expert_read import PAGE
from moepack.reading.pack import Pack
from moepack.reading.read_plan import plan_read
from moepack.shape import ROUTED_FAMILY
from moepack.sizes import align
from moepack.source.experts import find_experts
from moepack.source.shards import open_source

_MOST_LENGTHS = 4
_LEAST_SHARE = 0.01
"""Of the bytes of all experts: reads that bring less of them do not count."""


class ModelReads(NamedTuple):
    """The files that hold experts, with their lengths, and the lengths of reads, ascending."""

    folder: Path
    files: list[tuple[Path, int]]
    lengths: list[int]


class _Alike(NamedTuple):
    """Reads of the same length, one of each expert of a layer."""

    path: Path
    length: int
    expert_count: int


def find_reads(model: PathOrPaths) -> ModelReads:
    """Find how experts are read of a pack (blobs) or a source (slices), rounded up to pages.

    Raises what opening it raises, and RequestError where there are no experts to choose from.
    """
    if (folder := named_pack(model)) is not None:
        with Pack(folder) as pack:
            reads = list(_of_pack(pack))
    else:
        reads = list(_of_source(model))
        folder = reads[0].path.parent if reads else Path()
    if not reads:
        raise RequestError("the model has no experts that a router chooses", path=folder)
    totals = Counter[int]()
    for read in reads:
        length = align(read.length, PAGE)
        totals[length] += length * read.expert_count
    files = [(path, path.stat().st_size) for path in dict.fromkeys(read.path for read in reads)]
    return ModelReads(folder, files, telling(totals))


def telling(totals: Counter[int]) -> list[int]:
    """Return the lengths of reads, of those with the bytes that each brings, that bring the most.

    Ascending. Small parts, such as biases, are left out.
    """
    least = _LEAST_SHARE * totals.total()
    return sorted(length for length, of in totals.most_common(_MOST_LENGTHS) if of >= least)


def _of_pack(pack: Pack) -> Iterator[_Alike]:
    for layer, family in pack.shape.routed.items():
        for read in plan_read(pack, layer, 0, None, ROUTED_FAMILY).file_reads:
            yield _Alike(read.path, read.length, family.expert_count)


def _of_source(model: PathOrPaths) -> Iterator[_Alike]:
    source = open_source(model)
    for family in find_experts(source).families:
        if family.name == ROUTED_FAMILY:
            for part in family.parts:
                path = Path(source.shards[part.slices.at(0).shard].path)
                yield _Alike(path, part.length, family.expert_count)
