"""What llama.cpp b11549 says that a model and a context take, without a byte of them allocated.

It is what its own `llama-fit-params` asks: `no_alloc`, and `llama_get_memory_breakdown`, which is a
C++ function. Its answer, a std::map, is read here as libstdc++ on x86-64 lays it out.
"""

import ctypes
import os
import re
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from tests.support import llama_cpp
from tests.support.llama_cpp import load

_BREAKDOWN = "_Z26llama_get_memory_breakdownPK13llama_context"
_TENSOR_MAP = "_Z29llama_internal_get_tensor_mapPK11llama_model"
_LOAD_MODE_NONE = 0
_NOTHING_ALLOCATED = {"no_alloc": True, "load_mode": _LOAD_MODE_NONE}
_CONTEXT_FIELDS = {"n_ctx", "n_batch", "n_ubatch", "n_seq_max", "type_k", "type_v", "swa_full"}
_CONTEXT_FIELDS |= {"flash_attn_type", "kv_unified", "n_threads"}


class Memory(NamedTuple):
    """What llama.cpp takes in bytes, on all devices together."""

    model: int
    context: int
    compute: int


def memory_of(path: Path, **options: Any) -> Memory:
    """Say what a model takes, which may be a file with holes, with a context as `options` have it.

    Options are fields of `llama_context_params`.
    """
    return memories_of(path, [options])[0]


def memories_of(path: Path, each: list[dict[str, Any]]) -> list[Memory]:
    """Say what a model takes with each of several contexts."""
    assert all(set(options) <= _CONTEXT_FIELDS for options in each)
    breakdown = _bound_breakdown()
    with ExitStack() as stack:
        model = llama_cpp.load_model(path, stack, **_NOTHING_ALLOCATED)
        return [_memory(model, options, breakdown) for options in each]


def wanted_tensors(header: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors of a model of any size, of which only a header is there."""
    tensor_map = getattr(load(), _TENSOR_MAP)
    tensor_map.restype, tensor_map.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    found: dict[str, tuple[int, ...]] = {}
    with ExitStack() as stack:
        opened = load().gguf_init_from_file(
            os.fsencode(header), llama_cpp.types["gguf_params"](True, None)
        )
        stack.callback(load().gguf_free, opened)
        params = llama_cpp.model_params(load_mtp=True, **_NOTHING_ALLOCATED)
        callback = llama_cpp.types["tensor_callback"](lambda *_: None)
        model = load().llama_model_init_from_user(opened, callback, None, params)
        stack.callback(load().llama_model_free, model)
        if model is None:
            raise ValueError(llama_cpp.last_errors())
        start, end = (ctypes.c_void_p * 2).from_address(tensor_map(model))
        for address in range(start or 0, end or 0, 16):  # text is one pointer in the old ABI
            name, place = (ctypes.c_size_t * 2).from_address(address)
            tensor = llama_cpp.TensorHead.from_address(place)
            shape = tensor.ne0, tensor.ne1, tensor.ne2, tensor.ne3
            count = max(number for number in range(1, 5) if number == 1 or shape[number - 1] > 1)
            found[ctypes.string_at(name).decode()] = shape[:count]
    return found


def _bound_breakdown() -> Any:
    breakdown = getattr(load(), _BREAKDOWN)
    breakdown.restype, breakdown.argtypes = None, [ctypes.c_void_p, ctypes.c_void_p]
    return breakdown


def _memory(model: int, options: dict[str, Any], breakdown: Any) -> Memory:
    with ExitStack() as stack:
        context = llama_cpp.open_context(model, stack, **options)
        tree = (ctypes.c_size_t * 6)()
        breakdown(ctypes.addressof(tree), context)
        root, count = tree[2], tree[5]
        held = list(_nodes(root))
        assert len(held) == count
        return Memory(*map(sum, zip(*held, strict=True)))


def _nodes(address: int) -> Any:
    """Walk a red-black tree of libstdc++; a node is colour, parent, left, right, key and values."""
    if address:
        _, _, left, right, _, model, context, compute = (ctypes.c_size_t * 8).from_address(address)
        yield from _nodes(left)
        yield model, context, compute
        yield from _nodes(right)


def reported(path: Path, **options: Any) -> Memory:
    """Load a model for good and make a context, and add up what llama.cpp logs of its buffers."""
    lines: list[str] = []
    callback = llama_cpp.types["log_callback"](
        lambda _level, text, _: lines.append(text.decode(errors="replace"))
    )
    with ExitStack() as stack:
        load().llama_log_set(callback, None)
        stack.callback(load().llama_log_set, llama_cpp.keep_errors, None)
        model = llama_cpp.load_model(path, stack, load_mode=_LOAD_MODE_NONE)
        _memory(model, options, _bound_breakdown())
    form = re.compile(r"(model|KV|RS|compute) buffer size = *([\d.]+) MiB")
    sums = {"model": 0.0, "KV": 0.0, "RS": 0.0, "compute": 0.0}
    for match in filter(None, map(form.search, lines)):
        sums[match[1]] += float(match[2]) * (1 << 20)
    return Memory(int(sums["model"]), int(sums["KV"] + sums["RS"]), int(sums["compute"]))
