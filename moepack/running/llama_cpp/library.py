"""The functions of one exact llama.cpp that recording needs, bound through ctypes.

The wheel of xllamacpp carries llama.cpp b11549 as a shared library that exports its C functions.
Layouts of structs belong to one version, so any other is refused, and layouts are checked as far as
possible when the library is loaded. Functions and structs are described in llama.h,
ggml.h and ggml-backend.h.

llama.cpp aborts the process at a broken promise. Nothing in Python can catch that.
"""

import ctypes
from collections.abc import Mapping
from functools import cache
from importlib import metadata
from typing import Any

from moepack.common import extras
from moepack.common.errors import MachineError
from moepack.running.llama_cpp.structs import (
    ContextParams,
    DecodeBatch,
    InitParams,
    ModelParams,
    SamplerParams,
    check_layouts,
)

PACKAGE, VERSION = extras.LLAMA_CPP
LIBRARY = "xllamacpp/xllamacpp.abi3.so"

_bool, _float, _pointer = ctypes.c_bool, ctypes.c_float, ctypes.c_void_p
_i32, _u32, _i64 = ctypes.c_int32, ctypes.c_uint32, ctypes.c_int64
_size, _text = ctypes.c_size_t, ctypes.c_char_p

_SIGNATURES: Mapping[str, tuple[Any, ...]] = {  # the result's type, then the arguments'
    "ggml_backend_buffer_is_host": (_bool, _pointer),
    "ggml_backend_tensor_get": (None, _pointer, _pointer, _size, _size),
    "ggml_free": (None, _pointer),
    "ggml_init": (_pointer, InitParams),
    "ggml_nbytes": (_size, _pointer),
    "ggml_new_tensor_2d": (_pointer, _pointer, _i32, _i64, _i64),
    "ggml_set_name": (_pointer, _pointer, _text),
    "ggml_tensor_overhead": (_size,),
    "ggml_view_2d": (_pointer, _pointer, _pointer, _i64, _i64, _size, _size),
    "llama_backend_init": (None,),
    "llama_context_default_params": (ContextParams,),
    "llama_decode": (_i32, _pointer, DecodeBatch),
    "llama_free": (None, _pointer),
    "llama_get_memory": (_pointer, _pointer),
    "llama_init_from_model": (_pointer, _pointer, ContextParams),
    "llama_log_get": (None, _pointer, _pointer),
    "llama_log_set": (None, _pointer, _pointer),
    "llama_memory_clear": (None, _pointer, _bool),
    "llama_model_default_params": (ModelParams,),
    "llama_model_free": (None, _pointer),
    "llama_model_get_vocab": (_pointer, _pointer),
    "llama_model_load_from_file": (_pointer, _text, ModelParams),
    "llama_sampler_chain_add": (None, _pointer, _pointer),
    "llama_sampler_chain_init": (_pointer, SamplerParams),
    "llama_sampler_free": (None, _pointer),
    "llama_sampler_init_dist": (_pointer, _u32),
    "llama_sampler_init_greedy": (_pointer,),
    "llama_sampler_init_temp": (_pointer, _float),
    "llama_sampler_init_top_k": (_pointer, _i32),
    "llama_sampler_init_top_p": (_pointer, _float, _size),
    "llama_sampler_sample": (_i32, _pointer, _pointer, _i32),
    "llama_tokenize": (_i32, _pointer, _text, _i32, _pointer, _i32, _bool, _bool),
    "llama_print_system_info": (_text,),
    "llama_vocab_is_eog": (_bool, _pointer, _i32),
    "llama_vocab_n_tokens": (_i32, _pointer),
    "llama_vocab_type": (ctypes.c_int, _pointer),
}


def system_info() -> str:
    """Return the features that llama.cpp was built with. Raises the errors of `load`."""
    text: bytes = load().llama_print_system_info()
    return text.decode(errors="replace")


@cache
def load() -> ctypes.CDLL:
    """Return the library, bound and checked. Raises MachineError for another version."""
    extras.require("record")
    path = str(metadata.distribution(PACKAGE).locate_file(LIBRARY))
    try:
        library = ctypes.CDLL(path)
        for name, (result, *arguments) in _SIGNATURES.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        # It links to GNU's OpenMP, which slim containers leave out.
        hint = "apt-get install libgomp1" if "libgomp" in str(error) else extras.hint("record")
        raise MachineError(f"cannot be loaded: {error}", path=path, hint=hint) from None
    check_layouts(library)
    library.llama_backend_init()
    return library
