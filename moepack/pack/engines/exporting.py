"""Export a pack to the format of another engine: needs, plan, space, files, and the last file."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moepack.common.errors import RequestError
from moepack.common.pack_files import MANIFEST_NAME, is_pack
from moepack.common.phases import DigestCounts, Phases, Progress
from moepack.pack.engines import (
    anemll,
    ggml_moe_pack,
    moe_flash,
    moe_stream_dir,
    sglang,
    stock_gguf,
)
from moepack.pack.engines.contract import Engine, ExportPlan, Settings
from moepack.pack.reading.pack import Pack
from moepack.storage.atomic import make_folder, refuse_existing, require_folder_of, write_whole
from moepack.storage.folders import free_space
from moepack.storage.whole_files import (
    WholeFilesResult,
    check_target,
    needed_length,
    write_whole_files,
)

ENGINES: tuple[Engine, ...] = (
    stock_gguf.ENGINE,
    anemll.ENGINE,
    sglang.ENGINE,
    ggml_moe_pack.ENGINE,
    moe_stream_dir.ENGINE,
    moe_flash.ENGINE,
)
_SHOWN_NEEDS = 4


@dataclass(frozen=True, slots=True)
class ExportSummary:
    """The files that were exported, or with `dry_run` would be, and how; lengths in bytes.

    `path` is the file or folder, `tensor_count` the model's tensors in it, `alignment` that of
    experts. `cloned_length` is shared with the pack, `kept_length` was there from an interrupted
    run. `is_copied` if bytes of experts were copied or shared; `digests` counts the bytes that were
    compared with their digests, which those that are shared are not. `command` starts the engine,
    `notes` are what to know before. With `dry_run`, `needed_length` is the space that the export
    would take, `free_space` what is free.
    """

    engine: str
    path: str
    file_count: int
    tensor_count: int
    alignment: int
    length: int
    cloned_length: int
    kept_length: int
    is_copied: bool
    digests: DigestCounts
    command: str
    notes: tuple[str, ...]
    dry_run: bool = False
    needed_length: int | None = None
    free_space: int | None = None


def export(
    engine: str,
    pack: str | os.PathLike[str],
    target: str | os.PathLike[str] | None = None,
    *,
    dry_run: bool = False,
    resume: bool = False,
    force: bool = False,
    threads: int = 4,
    progress: Progress | None = None,
    **options: Any,
) -> ExportSummary:
    """Write a pack in the format of another engine: `engine` is one of `export_formats()`.

    `target` is a file or a folder, as the format has it, and `options` are the format's own. Every
    part that is copied is compared with its digest, if that is known; ranges are shared with the
    pack, unread, if the file system can. Files appear under their names when they are whole, one
    that lists the others last. With `resume` an interrupted run is continued, with `force` existing
    files are replaced, with `dry_run` nothing is written. `progress` is as for `restore`.

    Raises RequestError for needs of the engine that the pack does not meet, all of them at once,
    and for existing files; PackError if bytes of the pack are wrong; MachineError if something
    cannot be written.
    """
    chosen = find_engine(engine)
    settings = _settings(chosen, options)
    with Pack(pack) as opened:
        opened.require_complete()
        if target is None and chosen.default_name is None:
            kind = "folder" if chosen.is_folder else "file"
            raise RequestError(f"no {kind} was given to write", hint="name one with `target`")
        path = opened.path / str(chosen.default_name) if target is None else Path(target)
        require(chosen, opened, settings)
        _check_place(chosen, opened, path)
        plan = chosen.plan(opened, path, settings)
        if dry_run:
            return _summary(chosen, opened, path, plan)
        if chosen.is_folder:
            make_folder(path)
        result = _write(plan, opened, resume, force, threads, progress)
        return _summary(chosen, opened, path, plan, result)


def export_formats() -> tuple[Engine, ...]:
    """Return the formats that packs can be exported to, with the facts about each."""
    return ENGINES


def find_engine(name: str) -> Engine:
    """Return the format of a name; raise RequestError if there is none."""
    for engine in ENGINES:
        if engine.name == name:
            return engine
    expected = ", ".join(engine.name for engine in ENGINES)
    raise RequestError("no such format", argument="engine", expected=expected, found=name)


def require(engine: Engine, pack: Pack, settings: Settings) -> None:
    """Raise RequestError with all needs of an engine that a pack does not meet."""
    needs = list(engine.needs(pack, settings))
    if not needs:
        return
    problems = [need.problem for need in needs[:_SHOWN_NEEDS]]
    hints = dict.fromkeys(need.hint for need in needs if need.hint)
    raise RequestError(
        f"{engine.title} cannot read this: {'; '.join(problems)}",
        path=pack.path,
        hint="; ".join(hints) or None,
    )


def _settings(engine: Engine, options: dict[str, Any]) -> Settings:
    by_name = {option.name: option for option in engine.options}
    for name, value in options.items():
        if name not in by_name:
            expected = ", ".join(by_name) or "none"
            problem = f"{engine.name} has no such option"
            raise RequestError(problem, argument=name, expected=expected)
        choices = by_name[name].choices
        if choices and value not in choices:
            expected = ", ".join(choices)
            raise RequestError("no such choice", argument=name, expected=expected, found=value)
    return {name: options.get(name, option.default) for name, option in by_name.items()}


def _check_place(engine: Engine, pack: Pack, path: Path) -> None:
    """Raise RequestError for a place that nothing can be written to, before anything is."""
    require_folder_of(path)
    if engine.is_folder and is_pack(path):
        problem = "a pack, not a folder for an export"
        raise RequestError(problem, path=path, hint="name a folder that is new or empty")
    if engine.is_folder and path.exists() and not path.is_dir():
        raise RequestError("exists, and is not a directory", path=path)


def _write(
    plan: ExportPlan,
    pack: Pack,
    resume: bool,
    force: bool,
    threads: int,
    progress: Progress | None,
) -> WholeFilesResult:
    if plan.last is not None and not resume:
        _check_last(plan.folder / plan.last.name, pack, force)
    phases = Phases(progress)
    length = sum(file.length for file in plan.files)
    heads = plan.heads(threads, phases.begin(later=length))
    result = WholeFilesResult(0, 0, 0)
    if plan.files:
        result = write_whole_files(
            plan.folder,
            plan.files,
            pack.file_paths,
            data=heads,
            resume=resume,
            force=force,
            clone=True,
            threads=threads,
            progress=phases.begin(),
        )
    if plan.last is None:
        return result
    data, path = plan.last.content(phases.begin()), plan.folder / plan.last.name
    is_there = resume and path.is_file() and path.read_bytes() == data
    if not is_there:
        _check_last(path, pack, force)
        write_whole(path, data)
    kept_length = result.kept_length + len(data) * is_there
    return result._replace(length=result.length + len(data), kept_length=kept_length)


def _check_last(path: Path, pack: Pack, force: bool) -> None:
    """Raise RequestError if the last file may not be written; it may lie in a pack."""
    own_names = {file.name for file in pack.index.files}
    own_names |= {MANIFEST_NAME, pack.manifest.index_entry.name}
    is_in_it = os.path.realpath(path.parent) == os.path.realpath(pack.path)
    if is_in_it and path.name not in own_names and path.is_file():
        refuse_existing(path, force=force)
    else:
        check_target(path, pack.file_paths, resume=False, force=force)


def _summary(
    engine: Engine,
    pack: Pack,
    path: Path,
    plan: ExportPlan,
    result: WholeFilesResult | None = None,
) -> ExportSummary:
    needed = free = None
    dry_run = result is None
    if result is None:
        existing = next(p for p in (plan.folder, *plan.folder.absolute().parents) if p.is_dir())
        needed = needed_length(existing, plan.files, pack.file_paths)
        free = free_space(path)
        result = WholeFilesResult(sum(file.length for file in plan.files), 0, 0)
    return ExportSummary(
        engine=engine.name,
        path=os.fspath(path),
        file_count=len(plan.files) + (plan.last is not None),
        tensor_count=plan.tensor_count,
        alignment=plan.alignment,
        length=result.length,
        cloned_length=result.cloned_length,
        kept_length=result.kept_length,
        is_copied=bool(plan.files),
        digests=result.digests,
        command=plan.command,
        notes=plan.notes,
        dry_run=dry_run,
        needed_length=needed,
        free_space=free,
    )
