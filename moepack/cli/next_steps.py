"""What is done next with what a command made or said: one line to paste, with the real names.

None where nothing follows, or where a name is missing that only the user knows.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from moepack.cli.parameters import STANDARD_STREAM
from moepack.escaping import shell_words
from moepack.reading.directory import named_pack
from moepack.sizes import divide_up

if TYPE_CHECKING:
    from moepack.analysis.concentration import Concentration
    from moepack.diagnosis.doctor import DoctorFacts
    from moepack.engines.stock_gguf import ExportSummary
    from moepack.mounting.mount import MountFacts
    from moepack.packing.pack_summary import PackSummary
    from moepack.report.facts import PackFacts, SourceFacts
    from moepack.report.listing import Row
    from moepack.simulation.facts import Simulation
    from moepack.verifying.report import Report

_MIB = 1 << 20
_SHARD = re.compile(r"(-\d{5}-of-\d{5})?\.gguf\Z")


def _moepack(*words: str) -> str:
    return shell_words(("moepack", *words))


def run(*model: str) -> str:
    """Run a model."""
    return _moepack("run", *model)


def after_pack(summary: PackSummary, source: Sequence[str], *, is_in_place: bool) -> str | None:
    """Verify the pack, against its source where that is still there."""
    if summary.written_length is None:
        return None
    sources = () if is_in_place else [word for path in source for word in ("--source", path)]
    return _moepack("verify", summary.path, *sources)


def after_verify(report: Report) -> str | None:
    """Run a pack in which nothing is wrong, if it is a whole model."""
    import moepack

    if report.findings:
        return None
    with moepack.open(report.path) as pack:
        return run(report.path) if pack.manifest.is_whole else None


def after_inspect(facts: SourceFacts | PackFacts, paths: Sequence[str]) -> str | None:
    """Run a model that has experts."""
    from moepack.report.facts import PackFacts

    runs = facts.is_whole if isinstance(facts, PackFacts) else bool(facts.families)
    return run(*paths) if runs else None


def after_doctor(facts: DoctorFacts, paths: Sequence[str]) -> str | None:
    """Run a model that runs here."""
    runs = facts.prognosis is not None and facts.prognosis.forecast is not None
    return run(*paths) if runs else None


def after_list(path: str, row: Row) -> str | None:
    """Locate the parts of an expert, where they lie apart."""
    if row.kind != "blob" or row.path is not None:
        return None
    return _moepack("locate", path, "--layer", str(row.layer), "--expert", str(row.expert))


def after_machine(model: Sequence[str], output: str | None) -> str | None:
    """Place the model on the machine that was measured."""
    if not model or output in (None, STANDARD_STREAM):
        return None
    return _moepack("place", *model, "--machine", str(output))


def after_trace(output: str) -> str | None:
    """Count the choices of a trace."""
    if output == STANDARD_STREAM:
        return None
    stem = os.path.splitext(output)[0]
    counts = f"{stem}-hotness.csv" if os.path.exists(f"{stem}.csv") else f"{stem}.csv"
    return _moepack("hotness", output, "-o", counts)


def after_hotness(output: str, model: str | None) -> str | None:
    """Pack the model in the order of its hotness, or rank the pack anew."""
    if output == STANDARD_STREAM or model is None:
        return None
    if named_pack(model) is not None:
        return _moepack("rank", model, "--hotness", output)
    name = _SHARD.sub("", os.path.basename(model.rstrip("/")))
    return _moepack("pack", model, "--hotness", output, "-o", f"{name}.moepack")


def after_concentration(facts: Concentration, paths: Sequence[str]) -> str | None:
    """Count the choices, if some experts are so much hotter that pinning them is worth it."""
    if facts.verdict != "static" or len(paths) != 1:
        return None
    return after_trace(paths[0])


def after_simulate(facts: Simulation, model: str | None) -> str | None:
    """Run the model with the memory that is enough for it."""
    if facts.enough_length is None or model is None:
        return None
    return _moepack("run", model, "--memory", f"{divide_up(facts.enough_length, _MIB)}MiB")


def after_export(summary: ExportSummary) -> str:
    """Run the GGUF by llama.cpp."""
    return shell_words(("llama-server", "-m", summary.path))


def after_mount(facts: MountFacts) -> str:
    """Run the shards by llama.cpp."""
    return shell_words(("llama-server", "-m", os.path.join(facts.path, facts.files[0].name)))
