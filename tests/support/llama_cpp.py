"""Bind one exact llama.cpp (b11549, from the xllamacpp wheel) through ctypes, for tests only."""

import ctypes
import json
import os
import re
import resource
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

PACKAGE, VERSION, LIBRARY = "xllamacpp", "2026.10.11549", "xllamacpp/xllamacpp.abi3.so"
TYPE_COUNT = 43  # GGML_TYPE_COUNT; ggml indexes a table with the id, unchecked
# Values that make an optional F32 tensor a no-op (or fill an unused MTP head), by name ending.
NEUTRAL = {".bias": 0, "scale": 1, "freqs.weight": 1, "_tokens.weight": 0, "head_head.weight": 0}
TensorSource = Callable[[str, memoryview], None]
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
types["eval_callback"] = ctypes.CFUNCTYPE(
    ctypes.c_bool, ctypes.c_void_p, ctypes.c_bool, ctypes.c_void_p
)
TensorHead = _struct("i32 type; ptr buffer; i64 ne0 ne1 ne2 ne3")  # of ggml_tensor
types["params"], types["sources"] = ctypes.c_int32 * 16, ctypes.c_void_p * 10
_Tensor = _struct("""i32 type; ptr buffer; i64 ne0 ne1 ne2 ne3; size nb0 nb1 nb2 nb3; i32 op;
    params op_params; i32 flags; sources src""")
keep_errors = types["log_callback"](
    lambda level, text, _: _errors.append(text.decode(errors="replace")) if level == 4 else None
)
_SIGNATURES = """
    i64 ggml_blck_size(i32) size ggml_type_size(i32) size ggml_row_size(i32 i64)
    str ggml_type_name(i32)
    ptr gguf_init_from_file(str gguf_params) i64 gguf_find_tensor(ptr str)
    void gguf_add_tensor(ptr ptr) void gguf_free(ptr) ptr ggml_get_first_tensor(ptr)
    ptr ggml_get_next_tensor(ptr ptr) str ggml_get_name(ptr) ptr ggml_set_name(ptr str)
    size ggml_nbytes(ptr) str ggml_op_name(i32) void ggml_backend_tensor_get(ptr ptr size size)
    void ggml_backend_tensor_set(ptr ptr size size) void ggml_free(ptr)
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


def model_verdict(path: Path) -> str:
    """Return "" if llama.cpp loads the model, else its errors; may kill the process."""
    with ExitStack() as stack:
        return "" if _load_model(path, stack) else "".join(_errors).strip() or "no reason given"


def accepts_headers_isolated(paths: Sequence[Path]) -> list[bool | None]:
    """Return `accepts_header` of each path from a child process; None where it died."""
    return isolated(accepts_header, paths)


def isolated(function: Callable[[Path], Any], paths: Sequence[Path]) -> list[Any]:
    """Call a function of this module on each path in a child process; None where it died."""
    answers: list[Any] = []
    command = [sys.executable, "-P", __file__, function.__name__]  # -P: no imports from here
    while len(answers) < len(paths):
        child = subprocess.run([*command, *paths[len(answers) :]], capture_output=True, check=False)
        if child.returncode > 0:  # not a death by signal but a mistake in this file
            raise RuntimeError(child.stderr.decode())
        answers += [*map(json.loads, child.stdout.splitlines()), None]
    return answers[: len(paths)]


def _params() -> Any:
    params = load().llama_model_default_params()
    params.use_extra_bufts = False  # virtual models never repack, and repacked rounds differently
    return params


def _load_model(path: Path, stack: ExitStack) -> Any:
    _errors.clear()
    model = load().llama_model_load_from_file(os.fsencode(path), _params())
    stack.callback(load().llama_model_free, model)
    return model


def logits(path: Path, tokens: Sequence[int]) -> Floats:
    """Load a model (first shard if split) as usual; return logits [token, vocabulary id]."""
    with ExitStack() as stack:
        return _decode(_load_model(path, stack), tokens, stack)


def stepwise_logits(
    path: Path, batches: Sequence[Sequence[int]], *, context: int, batch_count: int, threads: int
) -> list[Floats]:
    """Load a model as usual and decode one batch after the other; return the logits behind each.

    Batches are computed in pieces of up to `batch_count` tokens: others would round otherwise.
    """
    with ExitStack() as stack:
        model = _load_model(path, stack)
        params = load().llama_context_default_params()
        params.n_ctx, params.n_threads, params.n_threads_batch = context, threads, threads
        params.n_batch = params.n_ubatch = batch_count
        params.swa_full = False  # as llama.cpp's programs have it
        opened = load().llama_init_from_model(model, params)
        stack.callback(load().llama_free, opened)
        return [_last_logits(model, opened, batch, batch_count) for batch in batches]


def _last_logits(model: Any, context: Any, tokens: Sequence[int], batch_count: int) -> Floats:
    for start in range(0, len(tokens), batch_count):
        ids = np.array(tokens[start : start + batch_count], np.int32)
        wanted = np.zeros(len(ids), np.int8)
        wanted[-1] = 1
        batch = types["batch"](len(ids), ids.ctypes.data, logits=wanted.ctypes.data)
        assert load().llama_decode(context, batch) == 0
    count = load().llama_vocab_n_tokens(load().llama_model_get_vocab(model))
    values = (ctypes.c_float * count).from_address(load().llama_get_logits(context))
    return np.array(values, np.float32)


def imatrix_counts(
    path: Path, requests: Sequence[Sequence[int]], *, repack: bool = True
) -> dict[int, list[int]]:
    """Count experts by layer as llama-imatrix does: by the operands of expert multiplications.

    All parameters that are not the requests' and not told are llama.cpp's defaults.
    """
    counts: dict[int, list[int]] = {}

    def called(address: int, asks: bool, _user_data: object) -> bool:
        tensor = _Tensor.from_address(address)
        if load().ggml_op_name(tensor.op) != b"MUL_MAT_ID":
            return not asks
        name = re.search(rb"blk\.(\d+)\.ffn_down_exps", load().ggml_get_name(tensor.src[0]))
        if not asks and name is not None:
            weights = TensorHead.from_address(tensor.src[0])
            found = counts.setdefault(int(name[1]), [0] * weights.ne2)
            for expert in _matrix(tensor.src[2]).ravel():
                found[expert] += 1
        return name is not None or not asks

    params = load().llama_context_default_params()
    callback = types["eval_callback"](called)
    params.cb_eval = ctypes.cast(callback, ctypes.c_void_p)
    model_params = load().llama_model_default_params() if repack else _params()
    with ExitStack() as stack:
        model = load().llama_model_load_from_file(os.fsencode(path), model_params)
        stack.callback(load().llama_model_free, model)
        for tokens in requests:
            with ExitStack() as inner:
                _decode(model, tokens, inner, params)
    return counts


def _matrix(address: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    tensor = _Tensor.from_address(address)
    data = np.empty(load().ggml_nbytes(address), np.uint8)
    load().ggml_backend_tensor_get(address, data.ctypes.data, 0, len(data))
    shape, strides = (tensor.ne1, tensor.ne0), (tensor.nb1, tensor.nb0)
    return np.ndarray(shape, np.int32, data.data, strides=strides)


def logits_from(paths: Sequence[Path], tokens: Sequence[int], source: TensorSource) -> Floats:
    """Load headers from paths but let source fill each tensor's bytes; return logits."""
    params = _params()
    params.load_mtp = True  # a virtual model aborts on tensors that it shall skip
    with ExitStack() as stack:
        feeder = _Feeder(paths, source, stack)
        callback = types["tensor_callback"](feeder.serve)
        _errors.clear()
        model = load().llama_model_init_from_user(feeder.header, callback, None, params)
        stack.callback(load().llama_model_free, model)
        if feeder.error is not None:
            raise feeder.error
        return _decode(model, tokens, stack)


def wanted_tensors(header: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors, optional ones too, of a model of which only this is there.

    They are in GGUF order. Metadata that llama.cpp can do nothing with may kill the process.
    """
    found: dict[str, tuple[int, ...]] = {}

    def want(tensor: int, _user_data: object) -> None:
        head = TensorHead.from_address(tensor)
        shape = head.ne0, head.ne1, head.ne2, head.ne3
        count = max(number for number in range(1, 5) if number == 1 or shape[number - 1] > 1)
        found[load().ggml_get_name(tensor).decode()] = shape[:count]

    params = _params()
    params.load_mtp = True
    with ExitStack() as stack:
        opened = load().gguf_init_from_file(os.fsencode(header), types["gguf_params"](True, None))
        stack.callback(load().gguf_free, opened)
        callback = types["tensor_callback"](want)
        _errors.clear()
        model = load().llama_model_init_from_user(opened, callback, None, params)
        stack.callback(load().llama_model_free, model)
        if model is None:
            raise ValueError("".join(_errors).strip() or "no reason given")
    return found


class _Feeder:
    """Serve llama.cpp's requests for tensor data, and keep the first error."""

    def __init__(self, paths: Sequence[Path], source: TensorSource, stack: ExitStack) -> None:
        self.source = source
        self.error: BaseException | None = None
        self.tensors: dict[str, int] = {}  # name to ggml_tensor address
        self.header, *_ = [self._open(path, stack) for path in paths]
        self.parts = self._joined() | {name: [name] for name in self.tensors}
        for name, parts in self.parts.items():
            if load().gguf_find_tensor(self.header, name.encode()) < 0:
                # llama.cpp only uses name and type: a joined tensor may keep its part's shape.
                load().ggml_set_name(self.tensors[parts[0]], name.encode())
                load().gguf_add_tensor(self.header, self.tensors[parts[0]])

    def _open(self, path: Path, stack: ExitStack) -> Any:
        context = ctypes.c_void_p()
        params = types["gguf_params"](True, ctypes.addressof(context))
        header = load().gguf_init_from_file(os.fsencode(path), params)
        if header is None:
            raise ValueError(f"llama.cpp refuses the header of {path}")
        stack.callback(load().gguf_free, header)
        stack.callback(load().ggml_free, context)
        tensor = load().ggml_get_first_tensor(context)
        while tensor is not None:
            self.tensors[load().ggml_get_name(tensor).decode()] = tensor
            tensor = load().ggml_get_next_tensor(context, tensor)
        return header

    def _joined(self) -> dict[str, list[str]]:
        # A virtual model creates every optional tensor: as F32 if the header lacks it. Where the
        # files hold the same rows under other names, it must get these in their own type.
        joined = {"output.weight": ["token_embd.weight"]}
        for gate in self.tensors:
            parts = [gate, gate.replace("ffn_gate_exps.weight", "ffn_up_exps.weight")]
            types = {TensorHead.from_address(self.tensors[part]).type for part in parts}
            if gate != parts[1] and len(types) == 1:
                joined[gate.replace("gate_exps", "gate_up_exps")] = parts
        return joined

    def serve(self, tensor: int, _user_data: object) -> None:
        """Fill one tensor; C cannot carry an exception, so the first is kept for later."""
        with suppress(BaseException):
            try:
                if self.error is None:
                    self._fill(tensor)
            finally:
                self.error = self.error or sys.exc_info()[1]

    def _fill(self, tensor: int) -> None:
        name, size = load().ggml_get_name(tensor).decode(), load().ggml_nbytes(tensor)
        parts = self.parts.get(name, [name])
        experts = TensorHead.from_address(tensor).ne2
        rows = [np.frombuffer(self._read(p, size), np.uint8).reshape(experts, -1) for p in parts]
        data = np.concatenate(rows, axis=1).tobytes()
        if len(data) != size:
            raise ValueError(f"llama.cpp wants {size} bytes of {name}, the file has {len(data)}")
        load().ggml_backend_tensor_set(tensor, data, 0, size)  # host and device memory alike

    def _read(self, name: str, size: int) -> bytes | bytearray:
        if name not in self.tensors:
            values = [value for end, value in NEUTRAL.items() if name.endswith(end)]
            if not values:
                raise LookupError(f"llama.cpp wants {name}, which the files lack")
            return np.full(size // 4, values[0], np.float32).tobytes()
        # All bits set is NaN in floats and scales: bytes left unfilled show in the logits.
        data = bytearray(b"\xff" * load().ggml_nbytes(self.tensors[name]))
        self.source(name, memoryview(data))
        return data


def _decode(model: Any, tokens: Sequence[int], stack: ExitStack, params: Any = None) -> Floats:
    params = params or load().llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = len(tokens)
    params.n_threads = params.n_threads_batch = 1
    context = load().llama_init_from_model(model, params)
    stack.callback(load().llama_free, context)
    ids, wanted = np.array(tokens, np.int32), np.ones(len(tokens), np.int8)
    batch = types["batch"](len(ids), ids.ctypes.data, logits=wanted.ctypes.data)
    if context is None or load().llama_decode(context, batch) != 0:
        raise RuntimeError("".join(_errors).strip() or "no reason given")
    shape = len(ids), load().llama_vocab_n_tokens(load().llama_model_get_vocab(model))
    values = (ctypes.c_float * (shape[0] * shape[1])).from_address(load().llama_get_logits(context))
    return np.array(values, np.float32).reshape(shape)


if __name__ == "__main__":
    # Deaths are expected: no core files, and no debugger that ggml starts when it aborts.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.environ["GGML_NO_BACKTRACE"] = "1"
    for argument in sys.argv[2:]:
        print(json.dumps(globals()[sys.argv[1]](Path(argument))), flush=True)
