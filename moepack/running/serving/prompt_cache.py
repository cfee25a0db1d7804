"""Whether our server keeps the states of texts on disk, for which model, and how many bytes."""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from moepack.common import extras
from moepack.common.sizes import Size, parse_size
from moepack.pack.reading.pack import Pack
from moepack.running.programs.command import CONTEXT, option_values
from moepack.running.serving.prompt_files import PromptFiles, model_folder, stored_prompts
from moepack.storage.folders import free_space

DEFAULT_LENGTH = 8 << 30
_SHARE = 10
"""By default the states of all models take a tenth of the free space of their drive at most."""
_VARIABLE = "MOEPACK_PROMPT_STATES"
"""For our server: the model's id, the bytes for states, and 1 if states are by the context."""
_LONG_CONTEXT = "rope_factors_long"
"""A tensor that llama.cpp uses in contexts longer than the first of the training alone: positions
have other values there (`get_rope_factors` of llama-model.cpp in b11549)."""
_VALUE = re.compile("[^-]|-[0-9]")
_CONTROL_VECTORS = {"--control-vector", "--control-vector-scaled"}
_OF_NO_STATE = {
    *("-m", "--model", "--host", "--port", "-a", "--alias", "--api-key", "--cors-origins"),
    *("-t", "--threads", "-tb", "--threads-batch", "-b", "--batch-size", "-ub", "--ubatch-size"),
    *("-cram", "--cache-ram", "-ctxcp", "--ctx-checkpoints", "--swa-checkpoints"),
    *("--chat-template", "--chat-template-file", "--jinja", "--sse-ping-interval"),
    *("--ssl-cert-file", "--ssl-key-file", "-lv", "--verbosity", "--log-verbosity", "--log-jsonl"),
}
"""Options that change no state of the same tokens. With any other, texts begin anew."""
_OF_NO_STATE |= {f"LLAMA_ARG_{name}" for name in ("HOST", "PORT", "ALIAS", "THREADS", "BATCH")}
_OF_NO_STATE |= {f"LLAMA_ARG_{name}" for name in ("MODEL", "UBATCH", "CACHE_RAM", "LOAD_MODE")}
_OF_NO_STATE |= {f"LLAMA_ARG_LOG_{name}" for name in ("VERBOSITY", "JSONL")}


def model_id(pack: Pack) -> str:
    """Return the id of a model's weights, the name of the folder with the states of its texts.

    Shards have no digests of their tensors: their lengths and times stand for these.
    """
    return weights_id(pack.manifest_bytes, pack.file_paths if pack.source is not None else ())


def weights_id(manifest_bytes: bytes, shards: Iterable[Path] = ()) -> str:
    """Return the id of a model by its manifest, and by its shards if it is no pack."""
    facts = hashlib.sha256(manifest_bytes)
    for path in shards:
        status = path.stat()
        facts.update(b"%d %d " % (status.st_size, status.st_mtime_ns))
    return facts.hexdigest()[:32]


def prompt_cache_variables(pack: Pack, length: Size | None) -> dict[str, str]:
    """Return variables with which our server keeps states within `length` bytes; none for 0.

    None is DEFAULT_LENGTH, or less on a drive with less space. Raises RequestError.
    """
    if length is not None:
        limit = parse_size(length, "prompt_cache")
    elif (folder := model_folder(model_id(pack))) is not None:
        length_on_disk = sum(stored_prompts().values())
        limit = min(DEFAULT_LENGTH, (free_space(folder) + length_on_disk) // _SHARE)
    else:
        limit = 0
    has_long = any(tensor.name.startswith(_LONG_CONTEXT) for tensor in pack.index.tensors())
    return {_VARIABLE: f"{model_id(pack)} {limit} {int(has_long)}"} if limit else {}


def open_prompt_files(params: Any, arguments: Sequence[str]) -> PromptFiles | None:
    """Return the states for this server, of llama-server's `arguments`; None if it keeps none.

    It keeps none if its client saves texts, or if a text has a state that its tokens do not give:
    with adapters, media, drafts, and where parts of texts are moved.
    """
    words = os.environ.get(_VARIABLE, "").split(" ")
    model, limit, is_by_context = words if len(words) == 3 else ("", "0", "0")
    unfit = (params.slot_save_path, params.lora_adapters, params.mmproj.path, params.embedding)
    moved = (params.ctx_shift, params.n_cache_reuse > 0, params.sleep_idle_seconds >= 0)
    needed = (model, params.endpoint_slots, params.cache_prompt)
    ignored = (
        _OF_NO_STATE if is_by_context == "1" else _OF_NO_STATE | CONTEXT.words | {CONTEXT.variable}
    )
    settings = _settings(arguments, ignored)
    is_unfit = any(
        (*unfit, *moved, *map(int, params.speculative.types), _CONTROL_VECTORS & settings.keys())
    )
    if is_unfit or not all(needed) or (folder := model_folder(model)) is None:
        return None
    facts = json.dumps([model, extras.LLAMA_CPP, settings], sort_keys=True)
    return PromptFiles(folder, hashlib.sha256(facts.encode()).digest(), int(limit))


def _settings(arguments: Sequence[str], ignored: Set[str]) -> Mapping[str, list[str]]:
    """Return the options and variables that may change the state of a text, and their values."""
    settings: dict[str, list[str]] = {}
    variables = [
        (name, value) for name, value in os.environ.items() if name.startswith("LLAMA_ARG_")
    ]
    for name, value in [*option_values(arguments), *variables]:
        if name not in ignored:
            settings.setdefault(name, []).append(value if _VALUE.match(value) else "")
    return settings
