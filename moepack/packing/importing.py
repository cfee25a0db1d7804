"""Import the experts of another engine: pack their GGUF, and compare the files with the pack."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from moepack.common.errors import RequestError
from moepack.common.paths import AnyPath, PathOrPaths, path_texts
from moepack.common.phases import Phases, Progress
from moepack.pack.engines import registry
from moepack.pack.engines.checking import is_of_model, require_export, verify_export
from moepack.pack.verifying.report import Report
from moepack.packing.pack_model import pack_model
from moepack.packing.plan.layout import DEFAULT, Layout
from moepack.packing.plan.pack_summary import PackSummary
from moepack.packing.writing.packer import DEFAULT_THREADS
from moepack.traces.hotness.model import Hotness


@dataclass(frozen=True, slots=True)
class ImportSummary:
    """A pack that was made of `source`, and the comparison of an engine's files with it.

    `path` is those files. The pack is right by its source, whatever the `report` on them says.
    """

    engine: str
    path: str
    source: tuple[str, ...]
    pack: PackSummary
    report: Report


def import_pack(
    engine: str,
    path: str | os.PathLike[str],
    source: PathOrPaths | None,
    target: AnyPath,
    *,
    layout: str | os.PathLike[str] | Layout = DEFAULT,
    hotness: str | os.PathLike[str] | Hotness | None = None,
    resume: bool = False,
    threads: int = DEFAULT_THREADS,
    progress: Progress | None = None,
) -> ImportSummary:
    """Pack the GGUF of another engine's experts, and compare every byte of these with the pack.

    `path` is the file or folder of `engine`, one of `export_formats()`. `source` is the GGUF that
    it was made of; None is the one that it names itself, if that is there. The pack is made of the
    source alone, as by `pack_model`, and stays if the comparison, that of `verify_export`, finds
    differences: see `report.findings`. `resume` continues an interrupted pack.

    Raises RequestError for an unknown engine, files that are not there or have nothing of the
    source, and the errors of `pack_model`.
    """
    require_export(path)
    if source is None:
        source = registry.find(engine).source_of(Path(path))
    if source is None:
        problem = "no GGUF that is here is named in it"
        raise RequestError(problem, path=path, hint="name the one it was made of with `source`")
    if not is_of_model(engine, path, source):  # before much is written
        problem = "nothing in it is of this model"
        hint = "name the GGUF that it was made of"
        raise RequestError(problem, path=path, found=", ".join(path_texts(source)), hint=hint)
    phases = Phases(progress)
    packed = pack_model(
        source,
        target,
        layout=layout,
        hotness=hotness,
        resume=resume,
        threads=threads,
        progress=phases.begin(),
    )
    report = verify_export(engine, path, pack=target, threads=threads, progress=phases.begin())
    return ImportSummary(engine, os.fspath(path), tuple(path_texts(source)), packed, report)
