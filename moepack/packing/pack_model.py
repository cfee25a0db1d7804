"""Pack a model in one call: open, plan, write, and sum up."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from moepack.errors import RequestError, SourceError
from moepack.format.tables import DataFile
from moepack.hotness.model import Hotness
from moepack.packing import packer
from moepack.packing.chosen_hotness import load_hotness
from moepack.packing.codec import parse as parse_codec
from moepack.packing.in_place import InPlacePlan, examine, pack_in_place, resume_in_place
from moepack.packing.layout import DEFAULT, Layout, load
from moepack.packing.pack_summary import (
    InPlaceFacts,
    PackSummary,
    as_written,
    of_pack,
    of_plan,
)
from moepack.packing.packer import DEFAULT_THREADS, Progress
from moepack.packing.plan import make
from moepack.packing.source_identity import describe_shards, describe_source
from moepack.packing.target_directory import check_as_if_packing, check_existing
from moepack.packing.unfinished import is_unfinished
from moepack.paths import PathOrPaths
from moepack.phases import Phases
from moepack.shape import ModelShape
from moepack.sizes import parse_ranges
from moepack.source.dense import find_dense
from moepack.source.experts import find_experts, shape_of
from moepack.source.shards import Source, open_source


def pack_model(
    source: PathOrPaths | None,
    target: str | os.PathLike[str],
    *,
    layout: str | os.PathLike[str] | Layout = DEFAULT,
    hotness: str | os.PathLike[str] | Hotness | None = None,
    layers: str | Iterable[int] | None = None,
    mtp: bool = True,
    experts_only: bool = False,
    alignment: int | None = None,
    codec: str | None = None,
    sha256: bool = False,
    strong: bool = False,
    dry_run: bool = False,
    resume: bool = False,
    in_place: bool = False,
    recover: bool = False,
    threads: int = DEFAULT_THREADS,
    planned: Callable[[PackSummary], None] | None = None,
    progress: Progress | None = None,
) -> PackSummary:
    """Pack a model into the directory `target`.

    `source` is any one shard, a folder, or all shards. `layout` is a shipped one's name or the path
    of a TOML file, and `alignment` in bytes overrules it; so does `codec` (`zstd`, `zstd:LEVEL`),
    by which parts are stored that it shortens by a twentieth or more. `hotness` is a file of
    counts, a trace, or an imatrix. `layers` names those to pack (`0-3,7`, or numbers), None for
    all; without `mtp` those for multi-token prediction are left out. With `experts_only` the dense
    part and the shards' headers are left out. `sha256` reads the source once more and notes the
    SHA-256 of its shards, so that restoring them can be proven without them; `strong` reads the
    pack once more and adds a SHA-256 of each part, tensor and header, and of the index.

    `in_place` turns the shards into the pack, with room for little more than a layer: they are gone
    then, and `restore` brings them back. With `resume` all that it takes is in `target`: `source`
    may be None, and it and all other choices are not looked at. With `recover` as well that works
    if the journal in there is damaged or lost; `source` then says where shards are that are not in
    there.

    `dry_run` writes nothing, and raises what packing would before it writes. `resume` continues an
    interrupted pack; `threads` write at a time. `planned` is called with what the pack will be
    before anything is written, `progress` with the bytes done since its last call and with those to
    do in all, from one thread at a time.

    Raises SourceError, TraceError, RequestError or MachineError, by whose fault it is.
    """
    if in_place and strong:
        hint = "pack without one of them"
        raise RequestError("strong digests are not written in place", hint=hint)
    if in_place and resume:
        return _resumed_in_place(source, target, recover, threads, progress)
    model = _opened(source, Path(target), resume)
    experts = find_experts(model)
    shape = shape_of(model, experts)
    plan = make(
        experts,
        _layout(layout, alignment, codec),
        dense=None if experts_only else find_dense(model, experts),
        hotness=load_hotness(hotness, shape),
        layers=_chosen_layers(layers, shape, mtp),
    )
    summary = of_plan(plan, target, dry_run)
    if not (in_place or dry_run):  # before the source is read for its SHA-256, too
        check_as_if_packing(Path(target), plan.data_length + plan.index_length, resume)
    phases = Phases(progress)
    shards = describe_shards(
        model,
        sha256=sha256 and not dry_run,
        threads=threads,
        progress=phases.begin(later=plan.data_length),
    )
    described = describe_source(model, shape, shards)
    if in_place:
        found = examine(model, described, plan, target)
        if not dry_run:
            found.check()
        summary = replace(summary, in_place=_in_place_facts(model, found))
    if planned is not None:
        planned(summary)
    if dry_run:
        if not in_place:
            check_as_if_packing(Path(target), plan.data_length + plan.index_length, resume)
        return summary
    began = time.monotonic()
    what = (model, described, plan, target)
    if in_place:
        pack_in_place(*what, threads=threads, progress=phases.begin())
        written, resumed = plan.data_length, 0
    else:
        _, written, resumed = packer.pack(
            *what, resume=resume, strong=strong, threads=threads, progress=phases.begin()
        )
    seconds = time.monotonic() - began
    summary = as_written(summary, target) if plan.layout.codec else summary
    return replace(summary, written_length=written, resumed_file_count=resumed, seconds=seconds)


def _opened(source: PathOrPaths | None, target: Path, resume: bool) -> Source:
    if source is None:
        raise RequestError("no source given")
    try:
        return open_source(source)
    except SourceError:
        if is_unfinished(target):  # it may have the shards
            check_existing(target, resume)
        raise


def _layout(
    layout: str | os.PathLike[str] | Layout, alignment: int | None, codec: str | None
) -> Layout:
    chosen = layout if isinstance(layout, Layout) else load(layout)
    if alignment is not None:
        chosen = chosen.with_alignment(alignment)
    return chosen if codec is None else chosen.with_codec(parse_codec(codec))


def _in_place_facts(source: Source, found: InPlacePlan) -> InPlaceFacts:
    return InPlaceFacts(
        shards=tuple(DataFile(header.path, header.file_length) for header in source.shards),
        unit_count=found.unit_count,
        unit_length=found.unit_length,
        extra_length=found.extra_length,
        refusals=tuple(map(str, found.refusals)),
    )


def _resumed_in_place(
    source: PathOrPaths | None,
    target: str | os.PathLike[str],
    recover: bool,
    threads: int,
    progress: Progress | None,
) -> PackSummary:
    began = time.monotonic()
    written = resume_in_place(target, source, recover=recover, threads=threads, progress=progress)
    seconds = time.monotonic() - began
    summary = of_pack(target)
    return replace(summary, written_length=written, resumed_file_count=0, seconds=seconds)


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
