"""Structs and callbacks of one llama.cpp, as llama.h, ggml.h and ggml-backend.h describe them.

Layouts belong to one version. They are checked as far as possible when the library is loaded.
"""

import ctypes
from types import MappingProxyType
from typing import Any

from moepack.common import extras
from moepack.common.errors import MachineError

TYPE_I32 = 26
_OBJECT_LENGTH = 32
"""The bytes that ggml puts in front of each tensor of a context."""

_bool, _float, _pointer = ctypes.c_bool, ctypes.c_float, ctypes.c_void_p
_i32, _u32, _i64 = ctypes.c_int32, ctypes.c_uint32, ctypes.c_int64
_size, _text = ctypes.c_size_t, ctypes.c_char_p

EvalCallback = ctypes.CFUNCTYPE(_bool, _pointer, _bool, _pointer)
"""Called with a tensor's address and whether this only asks if the tensor is wanted."""
ProgressCallback = ctypes.CFUNCTYPE(_bool, _float, _pointer)
"""Called while a model is loaded; False ends that."""
LogCallback = ctypes.CFUNCTYPE(None, ctypes.c_int, _text, _pointer)
"""Called with the level of a line, the line, and an address of the caller's."""


def _fields(kind: Any, names: str) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names.split()]


class ModelParams(ctypes.Structure):
    """`llama_model_params`."""

    _fields_ = (
        *_fields(_pointer, "devices tensor_buft_overrides"),
        *_fields(_i32, "n_gpu_layers split_mode load_mode lazy_mode main_gpu"),
        *_fields(_pointer, "tensor_split progress_callback progress_callback_user_data"),
        *_fields(_pointer, "kv_overrides"),
        *_fields(_bool, "vocab_only check_tensors use_extra_bufts no_host no_alloc load_mtp"),
    )


class ContextParams(ctypes.Structure):
    """`llama_context_params`."""

    _fields_ = (
        *_fields(_u32, "n_ctx n_batch n_ubatch n_seq_max n_rs_seq"),
        *_fields(_u32, "n_outputs_max n_outputs_max_per_seq"),
        *_fields(_i32, "n_threads n_threads_batch ctx_type rope_scaling_type"),
        *_fields(_i32, "pooling_type attention_type flash_attn_type"),
        *_fields(_float, "rope_freq_base rope_freq_scale yarn_ext_factor yarn_attn_factor"),
        *_fields(_float, "yarn_beta_fast yarn_beta_slow"),
        *_fields(_u32, "yarn_orig_ctx"),
        *_fields(_float, "defrag_thold"),
        *_fields(_pointer, "cb_eval cb_eval_user_data"),
        *_fields(_i32, "type_k type_v"),
        *_fields(_size, "moe_cache_size"),
        *_fields(_pointer, "abort_callback abort_callback_data"),
        *_fields(_bool, "embeddings offload_kqv no_perf op_offload swa_full kv_unified"),
        *_fields(_pointer, "samplers"),
        *_fields(_size, "n_samplers"),
        *_fields(_pointer, "ctx_other"),
    )


class DecodeBatch(ctypes.Structure):
    """`llama_batch`."""

    _fields_ = (
        *_fields(_i32, "n_tokens"),
        *_fields(_pointer, "token embd pos n_seq_id seq_id logits"),
    )


class TensorHeader(ctypes.Structure):
    """`ggml_tensor`: `ne` are its dimensions, `nb` its strides in bytes."""

    _fields_ = (
        *_fields(_i32, "type"),
        *_fields(_pointer, "buffer"),
        *_fields(_i64 * 4, "ne"),
        *_fields(_size * 4, "nb"),
        *_fields(_i32, "op"),
        *_fields(_i32 * 16, "op_params"),
        *_fields(_i32, "flags"),
        *_fields(_pointer * 10, "src"),
        *_fields(_pointer, "view_src"),
        *_fields(_size, "view_offs"),
        *_fields(_pointer, "data"),
        *_fields(ctypes.c_char * 64, "name"),
        *_fields(_pointer, "extra"),
        *_fields(ctypes.c_char * 8, "padding"),
    )


class InitParams(ctypes.Structure):
    """`ggml_init_params`."""

    _fields_ = (("mem_size", _size), ("mem_buffer", _pointer), ("no_alloc", _bool))


class SamplerParams(ctypes.Structure):
    """`llama_sampler_chain_params`."""

    _fields_ = (("no_perf", _bool),)


_LENGTHS = {ModelParams: 80, ContextParams: 168, DecodeBatch: 56, TensorHeader: 336}
_MODEL_DEFAULTS = MappingProxyType(
    {"devices": None, "n_gpu_layers": -1, "split_mode": 1, "kv_overrides": None}
    | {"vocab_only": False, "use_extra_bufts": True, "no_alloc": False, "load_mtp": False}
)
_CONTEXT_DEFAULTS = MappingProxyType(
    {"n_ctx": 512, "n_batch": 2048, "n_ubatch": 512, "n_seq_max": 1, "n_threads": 4}
    | {"n_threads_batch": 4, "rope_scaling_type": -1, "pooling_type": -1, "flash_attn_type": -1}
    | {"rope_freq_base": 0, "yarn_ext_factor": -1, "defrag_thold": -1, "cb_eval": None}
    | {"type_k": 1, "type_v": 1, "abort_callback": None, "embeddings": False}
    | {"offload_kqv": True, "no_perf": True, "op_offload": True, "swa_full": True}
    | {"kv_unified": False, "samplers": None, "n_samplers": 0, "ctx_other": None}
)


def check_layouts(library: Any) -> None:
    """Raise MachineError if a struct of the library is laid out otherwise than here."""
    for struct, length in _LENGTHS.items():
        _expect(struct.__name__, "length", length, ctypes.sizeof(struct))
    for params, defaults in (
        (library.llama_model_default_params(), _MODEL_DEFAULTS),
        (library.llama_context_default_params(), _CONTEXT_DEFAULTS),
    ):
        for field, value in defaults.items():
            _expect(type(params).__name__, field, value, getattr(params, field))
    overhead = library.ggml_tensor_overhead()
    _expect("Tensor", "length", ctypes.sizeof(TensorHeader), overhead - _OBJECT_LENGTH)
    context = library.ggml_init(InitParams(4 * overhead, None, True))
    try:
        _check_tensor(library, context)
    finally:
        library.ggml_free(context)


def _check_tensor(library: Any, context: int) -> None:
    whole = library.ggml_new_tensor_2d(context, TYPE_I32, 7, 5)
    address = library.ggml_view_2d(context, whole, 3, 5, 28, 4)
    library.ggml_set_name(address, b"name")
    view = TensorHeader.from_address(address)
    _expect("Tensor", "type", TYPE_I32, view.type)
    _expect("Tensor", "ne", [3, 5, 1, 1], list(view.ne))
    _expect("Tensor", "nb", [4, 28, 140, 140], list(view.nb))
    _expect("Tensor", "view_src", whole, view.view_src)
    _expect("Tensor", "view_offs", 4, view.view_offs)
    _expect("Tensor", "name", b"name", view.name)
    _expect("Tensor", "bytes", 4 * 28 + 3 * 4, library.ggml_nbytes(address))


def _expect(struct: str, field: str, expected: object, actual: object) -> None:
    if actual != expected:
        raise MachineError(
            "llama.cpp's structs have another layout",
            place=f"{struct}.{field}",
            expected=expected,
            found=actual,
            hint=extras.hint("record"),
        )
