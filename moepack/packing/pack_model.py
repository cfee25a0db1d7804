"""Pack a model in one call: open, plan, write, and sum up."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from moepack.errors import RequestError
from moepack.format.index import DataFile
from moepack.hotness import measure
from moepack.hotness.file import Hotness
from moepack.packing import packer
from moepack.packing.layout import DEFAULT, Layout, load
from moepack.packing.packer import DEFAULT_THREADS, Progress
from moepack.packing.plan import Plan, make
from moepack.packing.target_directory import check_as_if_packing, free_space
from moepack.shape import ModelShape
from moepack.sizes import parse_ranges
from moepack.source.experts import find_experts, shape_of
from moepack.source.shards import PathOrPaths, open_source


@dataclass(frozen=True, slots=True)
class PackSummary:
    """What a pack is, or with `dry_run` would be; lengths in bytes.

    `order` is what blobs are sorted by on disk, `hotness` or `source`; `free_space` is that of the
    target before anything was written. `written_length` is the bytes of data files written now, and
    `resumed_file_count` how many were taken over from an interrupted pack; both are None where
    nothing was to be written.
    """

    layout: str
    order: str
    layers: tuple[int, ...]
    blob_count: int
    file_count: int
    files: tuple[DataFile, ...]
    index_length: int
    data_length: int
    payload_length: int
    padding_length: int
    padding_share: float
    path: str
    dry_run: bool
    free_space: int
    written_length: int | None = None
    resumed_file_count: int | None = None


def pack_model(
    source: PathOrPaths,
    target: str | os.PathLike[str],
    *,
    layout: str | os.PathLike[str] | Layout = DEFAULT,
    hotness: str | os.PathLike[str] | Hotness | None = None,
    layers: str | Iterable[int] | None = None,
    mtp: bool = True,
    dry_run: bool = False,
    resume: bool = False,
    threads: int = DEFAULT_THREADS,
    progress: Progress | None = None,
) -> PackSummary:
    """Pack the experts of a model into the directory `target`.

    `source` is any one shard, a folder, or all shards. `layout` is a shipped one's name or the path
    of a TOML file; `hotness` a file of counts, a trace, or an imatrix. `layers` names those to pack
    (`0-3,7`, or numbers), None for all; without `mtp` those for multi-token prediction are left
    out. `dry_run` writes nothing, and raises what packing would before it writes. `resume`
    continues an interrupted pack; `threads` files are written at a time. `progress`
    is called with the bytes done since its last call and with those to do in all, from one thread
    at a time.

    Raises SourceError, TraceError, RequestError or MachineError, by whose fault it is.
    """
    model = open_source(source)
    experts = find_experts(model)
    shape = shape_of(model, experts)
    plan = make(
        experts,
        layout if isinstance(layout, Layout) else load(layout),
        hotness=_hotness(hotness, shape),
        layers=_chosen_layers(layers, shape, mtp),
    )
    summary = _summary(plan, target, dry_run)
    if dry_run:
        check_as_if_packing(Path(target), plan.data_length + plan.index_length, resume)
        return summary
    result = packer.pack(model, plan, target, resume=resume, threads=threads, progress=progress)
    return replace(
        summary,
        written_length=result.written_length,
        resumed_file_count=result.resumed_file_count,
    )


def _hotness(hotness: str | os.PathLike[str] | Hotness | None, shape: ModelShape) -> Hotness | None:
    if hotness is None:
        return None
    if not isinstance(hotness, Hotness):
        hotness = measure.load(os.fspath(hotness), shape)
    hotness.check_fits(shape)
    return hotness


def _chosen_layers(
    layers: str | Iterable[int] | None, shape: ModelShape, mtp: bool
) -> Sequence[int] | None:
    """Return the layers to pack; None for all."""
    chosen = set(shape.layers)
    if isinstance(layers, str):
        try:
            chosen = set(parse_ranges(layers))
        except ValueError as error:
            raise RequestError(f"not a list of layers: {error}") from None
    elif layers is not None:
        chosen = set(layers)
    if not mtp:
        chosen -= set(shape.mtp_layers)
    if not chosen:
        raise RequestError("no layers are left to pack")
    return None if chosen == set(shape.layers) else sorted(chosen)


def _summary(plan: Plan, target: str | os.PathLike[str], dry_run: bool) -> PackSummary:
    padding_length = plan.data_length - plan.payload_length
    return PackSummary(
        layout=plan.layout.name,
        order=plan.sorted_by,
        layers=plan.source_layers,
        blob_count=len(plan.order),
        file_count=len(plan.files),
        files=tuple(DataFile(file.name, file.length) for file in plan.files),
        index_length=plan.index_length,
        data_length=plan.data_length,
        payload_length=plan.payload_length,
        padding_length=padding_length,
        padding_share=padding_length / plan.data_length,
        path=os.fspath(target),
        dry_run=dry_run,
        free_space=free_space(Path(target)),
    )
