"""Drafts: tokens guessed by layers of the model or by another model, which one step then checks.

With some options llama.cpp goes on without drafts, and at most its log says so (server-context.cpp
of b11549, and tried).
"""

import glob
import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from moepack.common.errors import MoepackError, RequestError
from moepack.pack.opening.open_model import read_source
from moepack.pack.reading.pack import Pack
from moepack.planning.footprint.context import ContextOptions
from moepack.planning.footprint.model import Footprint, footprint_of_draft
from moepack.running.programs.command import Option
from moepack.running.streaming.budget import MemoryParts

_TYPES = Option("--spec-type", "LLAMA_ARG_SPEC_TYPE")
_MODEL = Option("-md --model-draft --spec-draft-model", "LLAMA_ARG_SPEC_DRAFT_MODEL")
_HUB_MODEL = Option("-hfd -hfrd --hf-repo-draft --spec-draft-hf", "LLAMA_ARG_SPEC_DRAFT_HF_REPO")
_TYPE_K = Option(
    "-ctkd --cache-type-k-draft --spec-draft-type-k", "LLAMA_ARG_SPEC_DRAFT_CACHE_TYPE_K"
)
_TYPE_V = Option(
    "-ctvd --cache-type-v-draft --spec-draft-type-v", "LLAMA_ARG_SPEC_DRAFT_CACHE_TYPE_V"
)
_BY_LAYERS = "draft-mtp"
_BY_MODEL = ("draft-simple", "draft-eagle3", "draft-dflash", "draft-dspark")
_SHARD = re.compile(r"-\d{5}(-of-\d{5}\.gguf)$")


def check_drafts(pack: Pack, command: Sequence[str]) -> None:
    """Raise RequestError for options of llama-server with which there would be no drafts."""
    types = (_TYPES.text(command) or "").split(",")
    has_model = _MODEL.is_set(command) or _HUB_MODEL.is_set(command)
    by_model = [one for one in types if one in _BY_MODEL]
    if by_model and not has_model:
        hint = "name a small model with the same vocabulary: -md DRAFT.gguf"
        raise RequestError(f"--spec-type {by_model[0]} needs a model that drafts", hint=hint)
    if has_model and not by_model and _BY_LAYERS not in types:
        hint = "--spec-type draft-simple"
        raise RequestError("llama.cpp uses no draft model without a --spec-type", hint=hint)
    if _BY_LAYERS in types and not has_model and not _has_layers(pack):
        problem = f"--spec-type {_BY_LAYERS}: no layers for multi-token prediction"
        hint = "leave it out, or have a small model draft: --spec-type draft-simple -md DRAFT.gguf"
        raise RequestError(problem, path=pack.path, hint=hint)


def _has_layers(pack: Pack) -> bool:
    return bool(pack.shape.mtp_layers or read_source(pack).model_value("nextn_predict_layers"))


def draft_parts(
    footprint: Footprint, command: Sequence[str], options: ContextOptions
) -> MemoryParts:
    """Return the memory that drafts of a command take beside the model's, with its `options`.

    A drafting context is as long as the model's, for as many texts and tokens at once; its buffers
    are about as large as those of the model that it is of (b11549's log). What is not known is
    None: all of a model on the hub, which llama.cpp fetches.
    """
    types = (_TYPE_K.text(command) or "f16", _TYPE_V.text(command) or "f16")
    options = options._replace(type_k=types[0], type_v=types[1])
    if (path := _MODEL.text(command)) is not None:
        try:
            drafting = _footprint_at(path)
        except MoepackError:  # llama.cpp says what is wrong with it
            return MemoryParts(dense=_file_length(Path(path)))
        cells = drafting.context(options)
        context, computing = cells and cells.length, drafting.compute_length(options)
        return MemoryParts(dense=_file_length(Path(path)), context=context, computing=computing)
    if _HUB_MODEL.is_set(command):
        return MemoryParts()
    if _BY_LAYERS not in (_TYPES.text(command) or "").split(","):
        return MemoryParts(dense=0, context=0, computing=0)
    cells = footprint.context(options)
    longest = max((layer.length for layer in cells.layers), default=0) if cells else 0
    count = len(footprint.weights.shape.mtp_layers)
    return MemoryParts(
        dense=0, context=count * longest, computing=footprint.compute_length(options)
    )


_footprint_at = lru_cache(1)(footprint_of_draft)  # which is asked for each context that is tried


def _file_length(path: Path) -> int:
    """Return the bytes of a model's files, 0 without any."""
    pattern = _SHARD.sub(r"-?????\1", glob.escape(path.name))
    shards = path.parent.glob(pattern) if pattern else ()
    return sum(one.stat().st_size for one in shards if one.is_file())
