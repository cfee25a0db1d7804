"""A llama.cpp program in its C interface, of any version: `python -m tests.support.c_api_program`.

Its arguments are the model and a folder with the libraries of a build. Of structs only the first
members are known here, which have lain where they do since 2024. Each line of standard input is a
JSON array of prompts, in token ids; it gets a line with an array of what came of each: greedy
tokens, and the digest of all their logits. It ends with its input.
"""

import argparse
import ctypes
import hashlib
import json
import os
import sys
from array import array
from pathlib import Path
from typing import Any

TOKEN_COUNT = 8
"""How many tokens each answer has."""


class _ModelParams(ctypes.Structure):
    _fields_ = (
        ("devices", ctypes.c_void_p),
        ("tensor_buft_overrides", ctypes.c_void_p),
        ("n_gpu_layers", ctypes.c_int32),
        ("others", ctypes.c_char * 1004),
    )


class _ContextParams(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_uint32) for name in ("n_ctx", "n_batch", "n_ubatch")),
        ("others", ctypes.c_char * 1012),
    )


class _Batch(ctypes.Structure):
    _fields_ = (
        ("n_tokens", ctypes.c_int32),
        *((name, ctypes.c_void_p) for name in ("token", "embd", "pos", "n_seq_id", "seq_id")),
        ("logits", ctypes.c_void_p),
    )


class _Override(ctypes.Structure):
    _fields_ = (("pattern", ctypes.c_char_p), ("buffer_type", ctypes.c_void_p))


_POINTER, _TEXT, _INT = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int32
_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "ggml_backend_load_all_from_path": (None, [_TEXT]),
    "ggml_backend_dev_by_name": (_POINTER, [_TEXT]),
    "ggml_backend_dev_buffer_type": (_POINTER, [_POINTER]),
    "llama_backend_init": (None, []),
    "llama_log_set": (None, [_POINTER, _POINTER]),
    "llama_model_default_params": (_ModelParams, []),
    "llama_context_default_params": (_ContextParams, []),
    "llama_model_load_from_file": (_POINTER, [_TEXT, _ModelParams]),
    "llama_init_from_model": (_POINTER, [_POINTER, _ContextParams]),
    "llama_set_n_threads": (None, [_POINTER, _INT, _INT]),
    "llama_model_get_vocab": (_POINTER, [_POINTER]),
    "llama_vocab_n_tokens": (_INT, [_POINTER]),
    "llama_get_memory": (_POINTER, [_POINTER]),
    "llama_memory_clear": (None, [_POINTER, ctypes.c_bool]),
    "llama_batch_get_one": (_Batch, [_POINTER, _INT]),
    "llama_decode": (_INT, [_POINTER, _Batch]),
    "llama_get_logits_ith": (_POINTER, [_POINTER, _INT]),
}


def _load_functions(folder: Path) -> dict[str, Any]:
    names = ("libllama", "libggml", "libggml-base")
    libraries = [ctypes.CDLL(str(next(folder.glob(f"{name}.*")))) for name in names]
    functions = {}
    for name, (result, arguments) in _SIGNATURES.items():
        function = next(getattr(one, name) for one in libraries if hasattr(one, name))
        function.restype, function.argtypes = result, arguments
        functions[name] = function
    return functions


class _Program:
    def __init__(self, options: argparse.Namespace) -> None:
        self._call = call = _load_functions(options.folder)
        # What it logs is of no use; a callback lives as long as the process.
        call["llama_log_set"](_SILENCE, None)
        call["ggml_backend_load_all_from_path"](str(options.folder).encode())
        call["llama_backend_init"]()
        params = call["llama_model_default_params"]()
        params.n_gpu_layers = options.gpu_layers
        overrides = self._overrides(options.on_cpu)
        params.tensor_buft_overrides = ctypes.addressof(overrides)
        model = call["llama_model_load_from_file"](options.model.encode(), params)
        assert model, "the model was not loaded"
        context_params = call["llama_context_default_params"]()
        context_params.n_ctx = context_params.n_batch = 1024
        self._context = call["llama_init_from_model"](model, context_params)
        assert self._context, "no context was made"
        call["llama_set_n_threads"](self._context, 1, 1)
        self._logits_length = 4 * call["llama_vocab_n_tokens"](call["llama_model_get_vocab"](model))

    def _overrides(self, pattern: str) -> Any:
        """Return where tensors go whose names match a pattern; the array ends with zeros."""
        overrides = (_Override * 2)()
        if pattern:
            cpu = self._call["ggml_backend_dev_by_name"](b"CPU")
            buffer_type = self._call["ggml_backend_dev_buffer_type"](cpu)
            overrides[0] = _Override(pattern.encode(), buffer_type)
        return overrides

    def continue_prompt(self, prompt: list[int]) -> dict[str, Any]:
        """Return greedy tokens that follow `prompt`, and the digest of their logits."""
        call = self._call
        call["llama_memory_clear"](call["llama_get_memory"](self._context), True)
        digest, tokens, batch_tokens = hashlib.sha256(), [], prompt
        for _ in range(TOKEN_COUNT):
            numbers = array("i", batch_tokens)
            batch = call["llama_batch_get_one"](numbers.buffer_info()[0], len(batch_tokens))
            assert call["llama_decode"](self._context, batch) == 0, "llama_decode failed"
            place = call["llama_get_logits_ith"](self._context, -1)
            logits = ctypes.string_at(place, self._logits_length)
            digest.update(logits)
            values = array("f", logits)
            arguments = [values.index(max(values))]
            tokens += arguments
        return {"tokens": tokens, "logits": digest.hexdigest()}


_SILENCE = ctypes.CFUNCTYPE(None, ctypes.c_int, _TEXT, _POINTER)(lambda *_: None)


def main() -> None:
    """Load a model, and continue what is asked."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gpu-layers", type=int, default=0)
    parser.add_argument("--on-cpu", default="", help="a pattern of tensors that the GPU lacks")
    program = _Program(parser.parse_args())
    print("ready", flush=True)
    for line in sys.stdin:
        results = [program.continue_prompt(prompt) for prompt in json.loads(line)]
        print(json.dumps(results), flush=True)
    os._exit(0)  # some drivers of GPUs do not end well


if __name__ == "__main__":
    main()
