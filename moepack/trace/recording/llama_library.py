"""The part of one exact llama.cpp that recording needs, bound through ctypes.

The wheel of xllamacpp carries llama.cpp b11549 as a shared library that exports its C functions.
Layouts of structs belong to one version, so any other is refused, and what can be checked of the
layouts is checked when the library is loaded. Functions and structs are described in llama.h,
ggml.h and ggml-backend.h.

Where llama.cpp finds a broken promise it aborts the process. Nothing in Python can catch that.
"""

import ctypes
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from functools import cache, partial
from importlib import metadata
from types import MappingProxyType
from typing import Any, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from moepack import extras
from moepack.errors import MachineError

PACKAGE, VERSION = "xllamacpp", "2026.10.11549"
LIBRARY = "xllamacpp/xllamacpp.abi3.so"
TYPE_I32 = 26
MAX_THREADS = 512
"""ggml aborts when asked for more."""

TOP_K, TOP_P = 40, 0.95
"""What llama.cpp samples from unless told otherwise."""

MAX_SEED = (1 << 32) - 2
"""The next one asks llama.cpp for a seed by chance."""

_hint = partial(extras.hint, "record")
_T = TypeVar("_T")
_ERROR = 4
_KEPT_LINES = 4
_OBJECT_LENGTH = 32
"""What ggml puts in front of each tensor of a context, in bytes."""

_bool, _float, _pointer = ctypes.c_bool, ctypes.c_float, ctypes.c_void_p
_i32, _u32, _i64 = ctypes.c_int32, ctypes.c_uint32, ctypes.c_int64
_size, _text = ctypes.c_size_t, ctypes.c_char_p

EvalCallback = ctypes.CFUNCTYPE(_bool, _pointer, _bool, _pointer)
"""Called with a tensor's address and whether this only asks if the tensor is wanted."""
ProgressCallback = ctypes.CFUNCTYPE(_bool, _float, _pointer)
"""Called while a model is loaded; False ends that."""
_LogCallback = ctypes.CFUNCTYPE(None, ctypes.c_int, _text, _pointer)


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


class Batch(ctypes.Structure):
    """`llama_batch`."""

    _fields_ = (
        *_fields(_i32, "n_tokens"),
        *_fields(_pointer, "token embd pos n_seq_id seq_id logits"),
    )


class Tensor(ctypes.Structure):
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


class _InitParams(ctypes.Structure):
    """`ggml_init_params`."""

    _fields_ = (("mem_size", _size), ("mem_buffer", _pointer), ("no_alloc", _bool))


class _SamplerParams(ctypes.Structure):
    """`llama_sampler_chain_params`."""

    _fields_ = (("no_perf", _bool),)


_SIGNATURES: Mapping[str, tuple[Any, ...]] = {  # the result's type, then the arguments'
    "ggml_backend_tensor_get": (None, _pointer, _pointer, _size, _size),
    "ggml_free": (None, _pointer),
    "ggml_init": (_pointer, _InitParams),
    "ggml_nbytes": (_size, _pointer),
    "ggml_new_tensor_2d": (_pointer, _pointer, _i32, _i64, _i64),
    "ggml_set_name": (_pointer, _pointer, _text),
    "ggml_tensor_overhead": (_size,),
    "ggml_view_2d": (_pointer, _pointer, _pointer, _i64, _i64, _size, _size),
    "llama_backend_init": (None,),
    "llama_context_default_params": (ContextParams,),
    "llama_decode": (_i32, _pointer, Batch),
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
    "llama_sampler_chain_init": (_pointer, _SamplerParams),
    "llama_sampler_free": (None, _pointer),
    "llama_sampler_init_dist": (_pointer, _u32),
    "llama_sampler_init_greedy": (_pointer,),
    "llama_sampler_init_temp": (_pointer, _float),
    "llama_sampler_init_top_k": (_pointer, _i32),
    "llama_sampler_init_top_p": (_pointer, _float, _size),
    "llama_sampler_sample": (_i32, _pointer, _pointer, _i32),
    "llama_tokenize": (_i32, _pointer, _text, _i32, _pointer, _i32, _bool, _bool),
    "llama_vocab_bos": (_i32, _pointer),
    "llama_vocab_get_add_bos": (_bool, _pointer),
    "llama_vocab_is_eog": (_bool, _pointer, _i32),
    "llama_vocab_n_tokens": (_i32, _pointer),
    "llama_vocab_type": (ctypes.c_int, _pointer),
}
_LENGTHS = {ModelParams: 80, ContextParams: 168, Batch: 56, Tensor: 336}
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


@cache
def load() -> ctypes.CDLL:
    """Return the library, bound and checked. Raises MachineError where it is not VERSION."""
    try:
        version = metadata.version(PACKAGE)
    except metadata.PackageNotFoundError:
        raise MachineError(f"{PACKAGE} is not installed", hint=_hint()) from None
    if version != VERSION:
        problem = f"{PACKAGE} is installed in another version"
        raise MachineError(problem, expected=VERSION, found=version, hint=_hint())
    path = str(metadata.distribution(PACKAGE).locate_file(LIBRARY))
    try:
        library = ctypes.CDLL(path)
        for name, (result, *arguments) in _SIGNATURES.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        raise MachineError(f"cannot be loaded: {error}", path=path, hint=_hint()) from None
    check_layouts(library)
    library.llama_backend_init()
    return library


def check_layouts(library: Any) -> None:
    """Raise MachineError where a struct of the library is laid out otherwise than here."""
    for struct, length in _LENGTHS.items():
        _expect(struct.__name__, "length", length, ctypes.sizeof(struct))
    for params, defaults in (
        (library.llama_model_default_params(), _MODEL_DEFAULTS),
        (library.llama_context_default_params(), _CONTEXT_DEFAULTS),
    ):
        for field, value in defaults.items():
            _expect(type(params).__name__, field, value, getattr(params, field))
    overhead = library.ggml_tensor_overhead()
    _expect("Tensor", "length", ctypes.sizeof(Tensor), overhead - _OBJECT_LENGTH)
    context = library.ggml_init(_InitParams(4 * overhead, None, True))
    try:
        _check_tensor(library, context)
    finally:
        library.ggml_free(context)


def _check_tensor(library: Any, context: int) -> None:
    whole = library.ggml_new_tensor_2d(context, TYPE_I32, 7, 5)
    address = library.ggml_view_2d(context, whole, 3, 5, 28, 4)
    library.ggml_set_name(address, b"name")
    view = Tensor.from_address(address)
    _expect("Tensor", "type", TYPE_I32, view.type)
    _expect("Tensor", "ne", [3, 5, 1, 1], list(view.ne))
    _expect("Tensor", "nb", [4, 28, 140, 140], list(view.nb))
    _expect("Tensor", "view_src", whole, view.view_src)
    _expect("Tensor", "view_offs", 4, view.view_offs)
    _expect("Tensor", "name", b"name", view.name)
    _expect("Tensor", "bytes", 4 * 28 + 3 * 4, library.ggml_nbytes(address))


def _expect(struct: str, field: str, expected: object, found: object) -> None:
    if found != expected:
        problem = "llama.cpp's structs are laid out otherwise"
        place = f"{struct}.{field}"
        raise MachineError(problem, place=place, expected=expected, found=found, hint=_hint())


# The whole address space of this process, as one array of bytes that begins at address 0. A slice
# copies just its own bytes, so `_memory[a:b]` is the cheapest way to read a few at an address:
# `ctypes.string_at` takes three times as long, and a callback does this thousands of times a token.
_memory: Any = (ctypes.c_char * sys.maxsize).from_address(0)
_NAME = Tensor.name.offset


def cpu_count() -> int:
    """Return how many threads this process can keep busy."""
    if hasattr(os, "sched_getaffinity"):
        return min(len(os.sched_getaffinity(0)), MAX_THREADS)
    return min(os.cpu_count() or 1, MAX_THREADS)


def watch(prefix: bytes, handle: Callable[[int, bool], bool]) -> Any:
    """Make an `EvalCallback` that hands on those tensors alone whose names start so.

    `handle` must raise nothing: C cannot carry an exception.
    """
    start, end = _NAME, _NAME + len(prefix)

    def called(tensor: int, asks: bool, _: object) -> bool:
        # Called for each of a graph's thousands of tensors: nearly all are done with here.
        if asks and _memory[tensor + start : tensor + end] != prefix:
            return False
        return handle(tensor, asks)

    return EvalCallback(called)


def name_of(address: int) -> str:
    """Return the name of the tensor at `address`."""
    return ctypes.string_at(address + _NAME).decode(errors="replace")


def read_matrix(library: Any, address: int) -> NDArray[np.int32]:
    """Copy the I32 matrix at `address`, in whatever memory and however strided, as [ne1, ne0].

    Raises MachineError for a tensor that is none.
    """
    tensor = Tensor.from_address(address)
    columns, rows, *others = tensor.ne
    if tensor.type != TYPE_I32 or others != [1, 1]:
        found = f"type {tensor.type}, dimensions {list(tensor.ne)}"
        raise MachineError("not a matrix of I32", place=name_of(address), found=found)
    # ggml_nbytes goes from the first element to the last: what lies between the rows is copied too.
    data = np.empty(library.ggml_nbytes(address), np.uint8)
    library.ggml_backend_tensor_get(address, data.ctypes.data, 0, len(data))
    strides = tensor.nb[1], tensor.nb[0]
    return np.ndarray((rows, columns), np.int32, data.data, strides=strides)


# Two that are left in the order they were entered give llama.cpp a callback of the past.
_kept_callbacks: list[Any] = []


@contextmanager
def sampler(library: Any, temperature: float, seed: int) -> Iterator[int]:
    """Make a sampler: of the likeliest tokens by temperature, or always the likeliest at 0."""
    chain = library.llama_sampler_chain_init(_SamplerParams(True))
    if temperature > 0:
        links = [
            library.llama_sampler_init_top_k(TOP_K),
            library.llama_sampler_init_top_p(TOP_P, 1),
            library.llama_sampler_init_temp(temperature),
            library.llama_sampler_init_dist(seed),
        ]
    else:
        links = [library.llama_sampler_init_greedy()]
    for link in links:
        library.llama_sampler_chain_add(chain, link)
    try:
        yield chain
    finally:
        library.llama_sampler_free(chain)


class ErrorLines:
    """Keeps llama.cpp's last error lines, and all else that it logs off the terminal.

    A context manager: whoever had the log before has it again afterwards.
    """

    def __init__(self, library: Any) -> None:
        self._library = library
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._callback = _LogCallback(self._add)
        _kept_callbacks.append(self._callback)
        self._before = _pointer(), _pointer()

    def __enter__(self) -> Self:
        self._library.llama_log_get(*map(ctypes.addressof, self._before))
        self._library.llama_log_set(ctypes.cast(self._callback, _pointer), None)
        return self

    def __exit__(self, *exception: object) -> None:
        self._library.llama_log_set(*self._before)

    def _add(self, level: int, text: bytes, _: object) -> None:
        if level == _ERROR:
            self._lines.append(text.decode(errors="replace").strip())

    def clear(self) -> None:
        """Forget the lines so far."""
        self._lines.clear()

    def __str__(self) -> str:
        return "; ".join(self._lines) or "no reason given"


class Calls:
    """Makes long calls into llama.cpp, in a thread of their own. A context manager.

    What a signal's handler raises (as KeyboardInterrupt) comes up in Python's main thread, between
    two instructions: were llama.cpp called there, that would be in a callback, ahead of its `try`,
    and ctypes would drop it. So the main thread waits; if that is interrupted, `stop` asks the call
    to end, and the interruption goes on when it has.
    """

    def __init__(self, stop: Callable[[], None]) -> None:
        self._stop = stop
        self._pool = ThreadPoolExecutor(1, "llama.cpp")

    def run(self, call: Callable[[], _T]) -> _T:
        """Make a call and give its result."""
        try:
            return self._pool.submit(call).result()
        except BaseException:
            self._finish()
            raise

    def _finish(self) -> None:
        last = self._pool.submit(self._stop)
        while not last.done():
            with suppress(BaseException):  # what the call uses is freed next: it must end first
                self._stop()
                wait([last])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._pool.shutdown()
