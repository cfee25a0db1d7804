"""Pack a model in one call: open, plan, write, and summarise."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from moepack.common.errors import RequestError, SourceError
from moepack.common.paths import PathOrPaths
from moepack.common.phases import Phases, Progress
from moepack.common.shape import ModelShape
from moepack.common.sizes import parse_ranges
from moepack.packing import packer
from moepack.packing.chosen_hotness import load_hotness
from moepack.packing.in_place import examine, pack_in_place, resume_in_place
from moepack.packing.in_place_refusals import raise_first
from moepack.packing.layout import DEFAULT, Layout, load, parse_codec
from moepack.packing.pack_summary import PackSummary, from_pack, from_plan
from moepack.packing.packer import DEFAULT_THREADS
from moepack.packing.plan import make
from moepack.packing.source_identity import describe_shards, describe_source
from moepack.packing.target_directory import check_as_if_packing, check_existing
from moepack.packing.unfinished import is_unfinished
from moepack.source.dense import find_dense
from moepack.source.experts import find_experts, shape_of
from moepack.source.shards import Source, open_source
from moepack.traces.hotness.model import Hotness


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
    of a TOML file, and `alignment` in bytes overrides it; so does `codec` (`zstd`, `zstd:LEVEL`),
    which stores the parts that get shorter by at least a twentieth. `hotness` is a file of counts,
    a trace, or an imatrix. `layers` names those to pack (`0-3,7`, or numbers), None for all;
    without `mtp` those for multi-token prediction are left out. With `experts_only` the dense part
    and the shards' headers are left out. `sha256` reads the source once more and stores the SHA-256
    of its shards, to check restored ones; `strong` reads the pack once more and adds a SHA-256 of
    each part, tensor and header, and of the index.

    `in_place` turns the shards into the pack, in little more extra space than a layer; `restore`
    brings them back. With `resume` everything is in `target`: `source` may be None, and it and all
    other choices are ignored. With `recover` this works even if the journal is damaged or lost;
    `source` then names the shards that are elsewhere.

    `dry_run` writes nothing, and raises the errors of packing before it writes. `resume` continues
    an interrupted pack; `threads` write at a time. `planned` is called with the planned pack before
    anything is written, `progress` with the bytes done since its last call and with those to do in
    all, from one thread at a time.

    Raises SourceError, TraceError, RequestError or MachineError, by whose fault it is.
    """
    if in_place and strong:
        problem = "strong digests are not written in place"
        raise RequestError(problem, hint="pack without one of them")
    if in_place and resume:
        return _resume_in_place(target, source, recover, threads, progress)
    model = _open(source, Path(target), resume)
    chosen = _choose_layout(layout, alignment, codec)
    if model.is_remote and (in_place or chosen.codec is not None):
        argument = "in_place" if in_place else "codec"
        raise RequestError("not possible for a model that is elsewhere", argument=argument)
    experts = find_experts(model)
    shape = shape_of(model, experts)
    plan = make(
        experts,
        chosen,
        dense=None if experts_only else find_dense(model, experts),
        hotness=load_hotness(hotness, shape),
        layers=_choose_layers(layers, shape, mtp),
    )
    summary = from_plan(plan, target, dry_run)
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
        facts, refusals = examine(model, described, plan, target)
        if not dry_run:
            raise_first(refusals)
        summary = replace(summary, in_place=facts)
    if planned is not None:
        planned(summary)
    if dry_run:
        if not in_place:
            check_as_if_packing(Path(target), plan.data_length + plan.index_length, resume)
        return summary
    pack: Callable[..., tuple[int, int]] = (
        pack_in_place if in_place else partial(packer.pack, resume=resume, strong=strong)
    )
    write = partial(pack, model, described, plan, target, threads=threads)
    return _carry_out(partial(write, progress=phases.begin()), summary)


def _resume_in_place(
    target: str | os.PathLike[str],
    source: PathOrPaths | None,
    recover: bool,
    threads: int,
    progress: Progress | None,
) -> PackSummary:
    began = time.monotonic()
    length = resume_in_place(target, source, recover=recover, threads=threads, progress=progress)
    seconds = time.monotonic() - began
    summary = from_pack(target)
    return replace(summary, written_length=length, resumed_file_count=0, seconds=seconds)


def _carry_out(write: Callable[[], tuple[int, int]], summary: PackSummary) -> PackSummary:
    """Write a pack; return its summary, from that of its plan."""
    began = time.monotonic()
    length, count = write()
    seconds = time.monotonic() - began
    if summary.codec is not None:  # lengths were upper bounds
        written = from_pack(summary.path)
        summary = replace(written, codec=summary.codec, free_space=summary.free_space)
    return replace(summary, written_length=length, resumed_file_count=count, seconds=seconds)


def _open(source: PathOrPaths | None, target: Path, resume: bool) -> Source:
    if source is None:
        raise RequestError("no source given")
    try:
        return open_source(source)
    except SourceError:
        if is_unfinished(target):  # it may have the shards
            check_existing(target, resume)
        raise


def _choose_layout(
    layout: str | os.PathLike[str] | Layout, alignment: int | None, codec: str | None
) -> Layout:
    chosen = layout if isinstance(layout, Layout) else load(layout)
    if alignment is not None:
        chosen = chosen.with_alignment(alignment)
    return chosen if codec is None else chosen.with_codec(parse_codec(codec))


def _choose_layers(
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
