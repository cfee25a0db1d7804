"""Pack a model in one call: open, plan, write, and sum up."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from moepack.errors import RequestError
from moepack.format.tables import DataFile
from moepack.hotness.model import Hotness
from moepack.packing import packer
from moepack.packing.chosen_hotness import load_hotness
from moepack.packing.layout import DEFAULT, Layout, load
from moepack.packing.packer import DEFAULT_THREADS, Progress
from moepack.packing.plan import Plan, make
from moepack.packing.source_identity import describe_shards, describe_source
from moepack.packing.target_directory import check_space, free_space
from moepack.shape import ModelShape
from moepack.sizes import parse_ranges
from moepack.source.dense import find_dense
from moepack.source.experts import find_experts, shape_of
from moepack.source.shards import PathOrPaths, open_source


@dataclass(frozen=True, slots=True)
class PackSummary:
    """What a pack is, or with `dry_run` would be; lengths in bytes.

    `order` is what blobs are sorted by on disk, `hotness` or `source`. `is_whole` says that the
    pack is all of the source, `dense_length` is None where it holds experts alone, and
    `measured_blob_count` is how many blobs the hotness covers, None without one. `free_space` is
    that of the target before anything was written. `written_length` is the bytes of data files
    written now, `resumed_file_count` how many were taken over from an interrupted pack, `seconds`
    how long that took; all three are None where nothing was to be written.
    """

    layout: str
    order: str
    layers: tuple[int, ...]
    is_whole: bool
    blob_count: int
    measured_blob_count: int | None
    hotness_token_count: int | None
    file_count: int
    files: tuple[DataFile, ...]
    index_length: int
    data_length: int
    expert_length: int
    dense_length: int | None
    payload_length: int
    padding_length: int
    padding_share: float
    path: str
    dry_run: bool
    free_space: int
    written_length: int | None = None
    resumed_file_count: int | None = None
    seconds: float | None = None


def pack_model(
    source: PathOrPaths,
    target: str | os.PathLike[str],
    *,
    layout: str | os.PathLike[str] | Layout = DEFAULT,
    hotness: str | os.PathLike[str] | Hotness | None = None,
    layers: str | Iterable[int] | None = None,
    mtp: bool = True,
    experts_only: bool = False,
    alignment: int | None = None,
    sha256: bool = False,
    dry_run: bool = False,
    resume: bool = False,
    threads: int = DEFAULT_THREADS,
    planned: Callable[[PackSummary], None] | None = None,
    progress: Progress | None = None,
) -> PackSummary:
    """Pack a model into the directory `target`.

    `source` is any one shard, a folder, or all shards. `layout` is a shipped one's name or the path
    of a TOML file, and `alignment` in bytes overrules it; `hotness` is a file of counts, a trace,
    or an imatrix. `layers` names those to pack (`0-3,7`, or numbers), None for all; without `mtp`
    those for multi-token prediction are left out. With `experts_only` the dense part and the
    shards' headers are left out. `sha256` reads the source once more and notes the SHA-256 of its
    shards, so that restoring them can be proven without them.

    `resume` continues an interrupted pack; `threads` write at a time. `planned` is called with what
    the pack will be before anything is written. `progress` is called with the
    bytes done since its last call and with those to do in all, from one thread at a time.

    Raises SourceError, TraceError, RequestError or MachineError, by whose fault it is.
    """
    model = open_source(source)
    experts = find_experts(model)
    shape = shape_of(model, experts)
    chosen = layout if isinstance(layout, Layout) else load(layout)
    plan = make(
        experts,
        chosen if alignment is None else chosen.with_alignment(alignment),
        dense=None if experts_only else find_dense(model, experts),
        hotness=load_hotness(hotness, shape),
        layers=_chosen_layers(layers, shape, mtp),
    )
    summary = _summary(plan, target, dry_run)
    if planned is not None:
        planned(summary)
    if dry_run:
        check_space(Path(target), plan.data_length + plan.index_length)
        return summary
    shards = describe_shards(model, sha256=sha256, threads=threads, progress=progress)
    described = describe_source(model, shape, shards)
    began = time.monotonic()
    result = packer.pack(
        model, described, plan, target, resume=resume, threads=threads, progress=progress
    )
    return replace(
        summary,
        written_length=result.written_length,
        resumed_file_count=result.resumed_file_count,
        seconds=time.monotonic() - began,
    )


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
    files = tuple(DataFile(file.name, file.length) for file in plan.new_files())
    return PackSummary(
        layout=plan.layout.name,
        order=plan.sorted_by,
        layers=plan.source_layers,
        is_whole=plan.is_whole,
        blob_count=len(plan.order),
        measured_blob_count=plan.measured_blob_count if plan.hotness else None,
        hotness_token_count=plan.hotness.token_count if plan.hotness else None,
        file_count=len(files),
        files=files,
        index_length=plan.index_length,
        data_length=plan.data_length,
        expert_length=plan.expert_length,
        dense_length=plan.dense_length,
        payload_length=plan.payload_length,
        padding_length=padding_length,
        padding_share=padding_length / plan.data_length,
        path=os.fspath(target),
        dry_run=dry_run,
        free_space=free_space(Path(target)),
    )
