"""Pack a model in one call, on several machines, or its shards in place.

Each opens the source, plans the pack, writes it, and returns a summary.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from moepack.common.errors import ErrorCode, PackError, RequestError, SourceError
from moepack.common.paths import AnyPath, PathOrPaths, is_remote
from moepack.common.phases import DigestCounts, Phases, Progress
from moepack.pack.format import manifest
from moepack.pack.format.manifest import Manifest
from moepack.pack.reading.pack import Pack
from moepack.packing.in_place import in_place
from moepack.packing.in_place.unfinished import is_unfinished
from moepack.packing.plan.layout import DEFAULT, Layout
from moepack.packing.plan.pack_request import PackRequest, PlannedModel
from moepack.packing.plan.pack_summary import PackSummary, WrittenFiles, from_pack, from_plan
from moepack.packing.writing import packer
from moepack.packing.writing.packer import DEFAULT_THREADS
from moepack.packing.writing.planned_pack import PlannedPack
from moepack.packing.writing.target import (
    OwnFolder,
    Target,
    check_as_if_packing,
    check_existing,
    open_target,
)
from moepack.traces.hotness.model import Hotness

_MAKE_ANEW = "remove the pack, and run the same again: the source is here"


def pack_model(
    source: PathOrPaths,
    target: AnyPath,
    *,
    layout: str | os.PathLike[str] | Layout = DEFAULT,
    hotness: str | os.PathLike[str] | Hotness | None = None,
    layers: str | Iterable[int] | None = None,
    mtp: bool = True,
    experts_only: bool = False,
    alignment: int | None = None,
    sha256: bool = False,
    strong: bool = False,
    dry_run: bool = False,
    resume: bool = False,
    threads: int = DEFAULT_THREADS,
    planned: Callable[[PackSummary], None] | None = None,
    progress: Progress | None = None,
) -> PackSummary:
    """Pack a model into the directory `target`, or into a folder of a store (`s3://…`).

    `source` is any one shard, a folder, or all shards. `layout` is a shipped one's name or the path
    of a TOML file, and `alignment` in bytes overrides it. `hotness` is a file of counts, a trace,
    or an imatrix. `layers` names those to pack (`0-3,7`, or numbers), by default all; without `mtp`
    the layers for multi-token prediction are left out. With `experts_only` the dense part and the
    shards' headers are left out. `sha256` reads the source once more and stores the SHA-256 of its
    shards, to check restored ones; `strong` reads the pack once more and adds a SHA-256 of each
    part, tensor and header, and of the index.

    Several machines can share the work: see `SharedPack`.

    A pack at `target` of shards with the same names, lengths and headers and with the same choices
    is left as it is, unread.

    `dry_run` writes nothing, and raises the errors of packing before it writes. `resume` continues
    an interrupted pack; `threads` write at a time. `planned` is called with the planned pack before
    anything is written, `progress` with the bytes done since its last call and the total, from one
    thread at a time.

    Raises SourceError, TraceError, RequestError or MachineError, by whose fault it is.
    """
    return _make_pack(
        PackRequest(source, layout, hotness, layers, mtp, experts_only, alignment),
        target,
        partial(packer.pack, resume=resume, strong=strong, threads=threads),
        is_alone=True,
        resume=resume,
        sha256=sha256,
        strong=strong,
        dry_run=dry_run,
        threads=threads,
        planned=planned,
        progress=progress,
    )


class SharedPack:
    """A pack of several writers; each of them reaches source and target.

    All need the same choices; the arguments are those of `pack_model`. Each writes a part, and
    anyone commits once all are written. Finished files are skipped: whatever was killed is run
    again. The methods raise as `pack_model` does.
    """

    def __init__(
        self,
        source: PathOrPaths,
        target: AnyPath,
        *,
        layout: str | os.PathLike[str] | Layout = DEFAULT,
        hotness: str | os.PathLike[str] | Hotness | None = None,
        layers: str | Iterable[int] | None = None,
        mtp: bool = True,
        experts_only: bool = False,
        alignment: int | None = None,
        sha256: bool = False,
        strong: bool = False,
        dry_run: bool = False,
        threads: int = DEFAULT_THREADS,
        planned: Callable[[PackSummary], None] | None = None,
        progress: Progress | None = None,
    ) -> None:
        self._target = target
        self._request = PackRequest(source, layout, hotness, layers, mtp, experts_only, alignment)
        self._sha256, self._strong, self._threads = sha256, strong, threads
        self._options: Any = {"dry_run": dry_run, "planned": planned, "progress": progress}

    def write_part(self, part: str | tuple[int, int]) -> PackSummary:
        """Write the share `part` of the data files, such as `3/16` or (3, 16)."""
        return self._make(partial(packer.write_part, part=part), sha256=False)

    def commit(self) -> PackSummary:
        """Make a pack of the parts, once all are written."""
        return self._make(partial(packer.commit, strong=self._strong))

    def _make(self, write: Callable[..., Any], *, sha256: bool | None = None) -> PackSummary:
        return _make_pack(
            self._request,
            self._target,
            partial(write, threads=self._threads),
            is_alone=False,
            resume=True,
            sha256=self._sha256 if sha256 is None else sha256,
            strong=self._strong,
            threads=self._threads,
            **self._options,
        )


def pack_in_place(
    source: PathOrPaths | None,
    target: str | os.PathLike[str],
    *,
    layout: str | os.PathLike[str] | Layout = DEFAULT,
    hotness: str | os.PathLike[str] | Hotness | None = None,
    alignment: int | None = None,
    sha256: bool = False,
    dry_run: bool = False,
    resume: bool = False,
    recover: bool = False,
    threads: int = DEFAULT_THREADS,
    planned: Callable[[PackSummary], None] | None = None,
    progress: Progress | None = None,
) -> PackSummary:
    """Turn the shards of a whole model into a pack, in little more extra space than a layer.

    `restore` turns the pack back into the shards. With `resume` everything is in `target`: `source`
    may be None, and it and all other choices are ignored. With `recover` this works even if the
    journal is damaged or lost; `source` then names the shards that are elsewhere. With `dry_run`
    the summary has the reasons against packing. Otherwise as `pack_model`.
    """
    if resume:
        began = time.monotonic()
        advance: Any = {"threads": threads, "progress": progress}
        length = in_place.resume_in_place(target, source, recover=recover, **advance)
        seconds = time.monotonic() - began
        return replace(
            from_pack(target), written_length=length, resumed_file_count=0, seconds=seconds
        )
    request = PackRequest(
        source=() if source is None else source,
        layout=layout,
        hotness=hotness,
        alignment=alignment,
    )
    model = _plan(request, Path(target), resume=False)
    if model.source.is_remote:
        raise RequestError("not possible for a model that is elsewhere", argument="in_place")
    if is_remote(target):
        raise RequestError("shards are turned into a pack by one process", argument="in_place")
    phases = Phases(progress)
    progress = phases.begin(later=model.plan.data_length)
    reads_all = sha256 and not dry_run
    pack = PlannedPack.describe(model, sha256=reads_all, threads=threads, progress=progress)
    facts, refusals = in_place.examine(pack, target)
    if refusals and not dry_run:
        for other in refusals[1:]:
            refusals[0].add_note(f"also: {other}")
        raise refusals[0]
    summary = replace(from_plan(model.plan, target, dry_run), in_place=facts)
    if planned is not None:
        planned(summary)
    if dry_run:
        return summary
    write = partial(in_place.pack_in_place, pack, target)
    return _carry_out(partial(write, threads=threads, progress=phases.begin()), summary)


def _make_pack(
    request: PackRequest,
    target: AnyPath,
    write: Callable[..., WrittenFiles],
    *,
    is_alone: bool,
    resume: bool,
    sha256: bool,
    strong: bool,
    dry_run: bool,
    threads: int,
    planned: Callable[[PackSummary], None] | None,
    progress: Progress | None,
) -> PackSummary:
    """Plan a pack, and let `write` write it at the target, unless this very pack is there."""
    model = _plan(request, Path(target), resume)
    opened = open_target(target, is_alone=is_alone)
    summary = from_plan(model.plan, target, dry_run)
    check = partial(
        _finished_pack, model, target, opened, resume=resume, sha256=sha256, strong=strong
    )
    # Before the source is read for its SHA-256, too.
    if not dry_run and (finished := check()):
        return finished
    phases = Phases(progress)
    progress = phases.begin(later=model.plan.data_length)
    reads_all = sha256 and not dry_run
    pack = PlannedPack.describe(model, sha256=reads_all, threads=threads, progress=progress)
    if planned is not None:
        planned(summary)
    if dry_run:
        return check() or summary
    return _carry_out(partial(write, pack, opened, progress=phases.begin()), summary)


def _carry_out(write: Callable[[], WrittenFiles], summary: PackSummary) -> PackSummary:
    began = time.monotonic()
    files = write()
    seconds = time.monotonic() - began
    return replace(summary, seconds=seconds, **files._asdict())


def _plan(request: PackRequest, target: Path, resume: bool) -> PlannedModel:
    try:
        return request.plan()
    except SourceError:
        if is_unfinished(target):  # it may have the shards
            check_existing(OwnFolder(target), resume=resume)
        raise


def _finished_pack(
    model: PlannedModel,
    path: AnyPath,
    target: Target,
    *,
    resume: bool,
    sha256: bool,
    strong: bool,
) -> PackSummary | None:
    """Return the summary of the planned pack, if it is at the target already.

    That is told by its manifest, and the lengths of files on this machine. With `sha256` it has to
    state the SHA-256 of all shards, with `strong` that of its index. The version that wrote it does
    not matter. Raises PackError for a pack that cannot be opened, or has lost bytes, and the error
    with which packing would end before it wrote.
    """
    try:
        length = model.plan.data_length + model.plan.index_length
        check_as_if_packing(target, length, resume=resume)
        return None
    except RequestError as error:
        if error.code is not ErrorCode.PACK_EXISTS:
            raise
        planned = PlannedPack.describe(model)
        with Pack(path) as opened:
            described, paths = opened.manifest, opened.file_paths
            if not _is_planned(described, planned, sha256=sha256, strong=strong):
                raise
    if not is_remote(path):
        for entry, file in zip(described.files, paths, strict=True):
            _check_length(os.fspath(file), entry.length)
    digests = DigestCounts(known_length=sum(entry.length for entry in described.files))
    return replace(from_pack(path), is_finished=True, written_length=0, digests=digests)


def _is_planned(described: Manifest, planned: PlannedPack, *, sha256: bool, strong: bool) -> bool:
    """Return whether a manifest says what that of the planned pack would, and has what is asked."""
    sha256_by_name = {shard.name: shard.sha256 for shard in described.source.shards}
    if sha256 and not all(sha256_by_name.values()):
        return False
    if strong and described.index_entry.sha256 is None:
        return False
    shards = tuple(
        shard._replace(sha256=shard.sha256 or sha256_by_name.get(shard.name))
        for shard in planned.described.shards
    )
    expected = planned.to_manifest(described.index_entry)._replace(
        tool=described.tool, source=planned.described._replace(shards=shards)
    )
    return manifest.encode(expected) == manifest.encode(described)


def _check_length(path: str, length: int) -> None:
    if not os.path.isfile(path):
        raise PackError("a data file is missing", path=path, hint=_MAKE_ANEW)
    if (actual_length := os.path.getsize(path)) != length:
        raise PackError(
            "the file is not as long as the manifest says",
            path=path,
            expected=f"{length:,} bytes",
            found=f"{actual_length:,}",
            hint=_MAKE_ANEW,
        )
