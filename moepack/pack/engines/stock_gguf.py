"""One stock GGUF of a whole pack, which llama.cpp loads as any other."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from moepack.common.errors import RequestError
from moepack.common.escaping import shell_word, shell_words
from moepack.pack.engines.contract import (
    Engine,
    ExportOption,
    ExportPlan,
    Need,
    Settings,
    checked_alignment,
)
from moepack.pack.engines.gguf_layout import lay_out
from moepack.pack.reading.pack import Pack
from moepack.source import gguf_header
from moepack.source.folder import SHARD_NAME

ALIGNMENT = 4096
_LEAST_ALIGNMENT = 32
MAX_ALIGNMENT = 1 << 21


def _needs(_pack: Pack, _settings: Settings) -> Iterable[Need]:
    return ()


def _plan(pack: Pack, target: Path, settings: Settings) -> ExportPlan:
    alignment = checked_alignment(settings["alignment"], _LEAST_ALIGNMENT, MAX_ALIGNMENT)
    match = SHARD_NAME.match(target.name)
    if match and int(match["count"]) > 1:
        problem = "the name of one shard of several, and this is the whole model"
        hint = f"name it {shell_word(match['prefix'] + '.gguf')}"
        raise RequestError(problem, path=target, hint=hint)
    layout = lay_out(pack, alignment)
    return ExportPlan(
        folder=target.parent,
        files=(layout.file(target.name, len(pack.file_paths)),),
        heads=lambda _threads, _progress: (layout.header,),
        tensor_count=len(layout.dense) + len(layout.experts),
        alignment=alignment,
        command=shell_words(("llama-server", "-m", str(target))),
    )


def _settings_of(_pack: Pack, path: Path) -> Settings:
    alignment = int(gguf_header.read(path).value("general.alignment"))
    return {"alignment": checked_alignment(alignment, _LEAST_ALIGNMENT, MAX_ALIGNMENT)}


ENGINE = Engine(
    name="gguf",
    title="stock llama.cpp",
    summary="Write a whole pack as one stock GGUF: dense tensors first, experts last by layer.",
    reads="a GGUF",
    writes="one GGUF: dense tensors first, experts last",
    copies="the whole model",
    proof="the same logits: a test",
    is_folder=False,
    needs=_needs,
    plan=_plan,
    settings_of=_settings_of,
    options=(ExportOption("alignment", "size", "Alignment of all tensors.", ALIGNMENT),),
)
