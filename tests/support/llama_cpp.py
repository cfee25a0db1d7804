"""Bind one exact llama.cpp (b11549, from the xllamacpp wheel) through ctypes, for tests only."""

import ctypes
import json
import os
import re
import resource
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

PACKAGE, VERSION, LIBRARY = "xllamacpp", "2026.10.11549", "xllamacpp/xllamacpp.abi3.so"
TYPE_COUNT = 43  # GGML_TYPE_COUNT; ggml indexes a table with the id, unchecked
Floats = np.ndarray[Any, np.dtype[np.float32]]

_errors: list[str] = []  # what llama.cpp logged at level 4, as errors, since the last load
types: dict[str, Any] = {"void": None, "ptr": ctypes.c_void_p, "str": ctypes.c_char_p}
types |= {"bool": ctypes.c_bool, "f32": ctypes.c_float, "size": ctypes.c_size_t}
types |= {"i32": ctypes.c_int32, "i64": ctypes.c_int64, "u32": ctypes.c_uint32}


def _struct(text: str) -> Any:
    fields = [(n, types[kind]) for kind, *names in map(str.split, text.split(";")) for n in names]
    return type("_Struct", (ctypes.Structure,), {"_fields_": fields})


types["batch"] = _struct("i32 n_tokens; ptr token embd pos n_seq_id seq_id logits")
types["gguf_params"] = _struct("bool no_alloc; ptr ctx")
types["model_params"] = _struct("""ptr devices tensor_buft_overrides;
    i32 n_gpu_layers split_mode load_mode lazy_mode main_gpu;
    ptr tensor_split progress_callback progress_callback_user_data kv_overrides;
    bool vocab_only check_tensors use_extra_bufts no_host no_alloc load_mtp""")
types["context_params"] = _struct("""u32 n_ctx n_batch n_ubatch n_seq_max n_rs_seq n_outputs_max;
    u32 n_outputs_max_per_seq; i32 n_threads n_threads_batch ctx_type rope_scaling_type;
    i32 pooling_type attention_type flash_attn_type; f32 rope_freq_base rope_freq_scale;
    f32 yarn_ext_factor yarn_attn_factor yarn_beta_fast yarn_beta_slow; u32 yarn_orig_ctx;
    f32 defrag_thold; ptr cb_eval cb_eval_user_data; i32 type_k type_v; size moe_cache_size;
    ptr abort_callback abort_callback_data; bool embeddings offload_kqv no_perf op_offload;
    bool swa_full kv_unified; ptr samplers; size n_samplers; ptr ctx_other""")
types["log_callback"] = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
types["tensor_callback"] = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)
TensorHead = _struct("i32 type; ptr buffer; i64 ne0 ne1 ne2 ne3")  # of ggml_tensor
keep_errors = types["log_callback"](
    lambda level, text, _: _errors.append(text.decode(errors="replace")) if level == 4 else None
)
_SIGNATURES = """
    i64 ggml_blck_size(i32) size ggml_type_size(i32) size ggml_row_size(i32 i64)
    str ggml_type_name(i32)
    ptr gguf_init_from_file(str gguf_params) void gguf_free(ptr)
    void llama_log_set(log_callback ptr) void llama_backend_init()
    model_params llama_model_default_params() context_params llama_context_default_params()
    ptr llama_model_load_from_file(str model_params)
    ptr llama_model_init_from_user(ptr tensor_callback ptr model_params)
    ptr llama_init_from_model(ptr context_params) ptr llama_model_get_vocab(ptr)
    i32 llama_vocab_n_tokens(ptr) i32 llama_decode(ptr batch) ptr llama_get_logits(ptr)
    void llama_free(ptr) void llama_model_free(ptr)"""


@cache
def load() -> ctypes.CDLL:
    """Return the bound library; raise unless exactly VERSION is installed."""
    if (found := metadata.version(PACKAGE)) != VERSION:
        raise RuntimeError(f"{PACKAGE} {found} has other struct layouts than {VERSION}")
    library = ctypes.CDLL(str(metadata.distribution(PACKAGE).locate_file(LIBRARY)))
    for result, name, kinds in re.findall(r"(\w+) (\w+)\((.*?)\)", _SIGNATURES):
        function = getattr(library, name)
        function.restype, function.argtypes = types[result], [types[k] for k in kinds.split()]
    library.llama_log_set(keep_errors, None)
    library.llama_backend_init()
    return library


def last_errors() -> str:
    """Return what llama.cpp logged last as errors."""
    return "".join(_errors[-4:]).strip() or "no reason given"


@cache
def why_not() -> str | None:
    """Say why `load` does not work here; None where it does."""
    try:
        load()
    except metadata.PackageNotFoundError:
        return f"{PACKAGE} is not installed"
    except (RuntimeError, OSError, AttributeError) as error:  # OSError: such as no libgomp
        return f"{PACKAGE} cannot be loaded: {error}"
    return None


@cache
def type_ids() -> tuple[int, ...]:
    """List the ids of all live ggml types."""
    return tuple(i for i in range(TYPE_COUNT) if load().ggml_blck_size(i) > 0)


def block_size(type_id: int) -> int:
    """Return the elements of one block; raise if ggml has no such type."""
    # Removed types stay in ggml's table with empty blocks, by which it would divide.
    if type_id not in type_ids():
        raise ValueError(f"no live ggml type has id {type_id}")
    return int(load().ggml_blck_size(type_id))


def type_size(type_id: int) -> int:
    """Return the bytes of one block."""
    return int(load().ggml_type_size(type_id)) if block_size(type_id) else 0


def type_name(type_id: int) -> str:
    """Return ggml's own name, such as "q4_K"."""
    return str(load().ggml_type_name(type_id), "ascii") if block_size(type_id) else ""


def row_size(type_id: int, ne0: int) -> int:
    """Return the bytes of one row of ne0 elements."""
    if ne0 <= 0 or ne0 % block_size(type_id):
        raise ValueError(f"{ne0} elements are not whole blocks of type {type_id}")
    return int(load().ggml_row_size(type_id, ne0))


def accepts_header(path: Path) -> bool:
    """Tell whether llama.cpp reads the GGUF header; a malformed file may kill the process."""
    header = load().gguf_init_from_file(os.fsencode(path), types["gguf_params"](True, None))
    load().gguf_free(header)
    return header is not None


def accepts_headers_isolated(paths: Sequence[Path]) -> list[bool | None]:
    """Return `accepts_header` of each path from a child process; None where it died."""
    answers: list[bool | None] = []
    command = [sys.executable, "-P", __file__]  # -P: no imports from here
    while len(answers) < len(paths):
        child = subprocess.run([*command, *paths[len(answers) :]], capture_output=True, check=False)
        if child.returncode > 0:  # not a death by signal but a mistake in this file
            raise RuntimeError(child.stderr.decode())
        answers += [*map(json.loads, child.stdout.splitlines()), None]
    return answers[: len(paths)]


def model_params(**options: Any) -> Any:
    """Return `llama_model_params` with some fields of one's own."""
    # Repacked weights round differently.
    return _with_fields(load().llama_model_default_params(), use_extra_bufts=False, **options)


def _with_fields(params: Any, **options: Any) -> Any:
    for name, value in options.items():
        setattr(params, name, value)
    return params


def load_model(path: Path, stack: ExitStack, **options: Any) -> Any:
    """Load a model (first shard if split) with these `model_params`; `stack` frees it."""
    _errors.clear()
    model = load().llama_model_load_from_file(os.fsencode(path), model_params(**options))
    stack.callback(load().llama_model_free, model)
    if model is None:
        raise ValueError(last_errors())
    return model


def open_context(model: Any, stack: ExitStack, **options: Any) -> Any:
    """Make a context with these fields of `llama_context_params`; `stack` frees it."""
    params = _with_fields(load().llama_context_default_params(), **options)
    context = load().llama_init_from_model(model, params)
    stack.callback(load().llama_free, context)
    if context is None:
        raise ValueError(last_errors())
    return context


def logits(path: Path, tokens: Sequence[int]) -> Floats:
    """Load a model as usual; return logits [token, vocabulary id]."""
    return _decode_all(path, [tokens], context=len(tokens), is_each_wanted=True)


def stepwise_logits(path: Path, batches: Sequence[Sequence[int]], *, context: int) -> Floats:
    """Load a model as usual and decode one batch after the other.

    Returns the logits behind each [batch, vocabulary id].
    """
    return _decode_all(path, batches, context=context, is_each_wanted=False)


def _decode_all(
    path: Path, batches: Sequence[Sequence[int]], *, context: int, is_each_wanted: bool
) -> Floats:
    """Return the logits behind each token, or behind the last one of each batch alone."""
    most, rows = max(map(len, batches)), []
    with ExitStack() as stack:
        model = load_model(path, stack)
        threads = {"n_threads": 1, "n_threads_batch": 1}
        lengths = {"n_ctx": context, "n_batch": most, "n_ubatch": most}
        # As llama.cpp's programs have it.
        opened = open_context(model, stack, swa_full=False, **threads, **lengths)
        count = load().llama_vocab_n_tokens(load().llama_model_get_vocab(model))
        for tokens in batches:
            ids, wanted = np.array(tokens, np.int32), np.full(len(tokens), is_each_wanted, np.int8)
            wanted[-1] = True
            batch = types["batch"](len(ids), ids.ctypes.data, logits=wanted.ctypes.data)
            if load().llama_decode(opened, batch) != 0:
                raise RuntimeError(last_errors())
            values = ctypes.c_float * (int(wanted.sum()) * count)
            rows.append(np.array(values.from_address(load().llama_get_logits(opened)), np.float32))
    return np.concatenate(rows).reshape(-1, count)


if __name__ == "__main__":
    # Deaths are expected: no core files, and no debugger that ggml starts when it aborts.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.environ["GGML_NO_BACKTRACE"] = "1"
    for argument in sys.argv[1:]:
        print(json.dumps(accepts_header(Path(argument))), flush=True)
