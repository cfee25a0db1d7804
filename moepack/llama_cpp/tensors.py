"""Tensors of a graph that runs: which of them are watched, and what is in them."""

import ctypes
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moepack.errors import MachineError
from moepack.llama_cpp.structs import TYPE_I32, EvalCallback, Tensor

# The whole address space of this process, as one array of bytes that begins at address 0. A slice
# copies just its own bytes, so `_memory[a:b]` is the cheapest way to read a few at an address:
# `ctypes.string_at` takes three times as long, and a callback does this thousands of times a token.
_memory: Any = (ctypes.c_char * sys.maxsize).from_address(0)
_NAME = Tensor.name.offset


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
