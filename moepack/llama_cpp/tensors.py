"""Tensors of a graph that runs: which of them are watched, and what is in them."""

import ctypes
import struct
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
_NAME, _NAME_LENGTH = Tensor.name.offset, Tensor.name.size
_HEAD = struct.Struct("@iP4q4N")
"""How a `Tensor` begins: type, buffer, dimensions, strides. A struct of ctypes is slower."""
_I32_LENGTH = 4


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
    start = address + _NAME
    name: bytes = _memory[start : start + _NAME_LENGTH]
    return name.partition(b"\0")[0].decode(errors="replace")


def read_matrix(library: Any, address: int) -> NDArray[np.int32]:
    """Copy the I32 matrix at `address`, in whatever memory and however strided, as [ne1, ne0].

    Raises MachineError for a tensor that is none.
    """
    kind, _, *shape = _HEAD.unpack(_memory[address : address + _HEAD.size])
    columns, rows, planes, volumes, *strides = shape
    if kind != TYPE_I32 or (planes, volumes) != (1, 1) or not columns or not rows:
        found = f"type {kind}, dimensions {shape[:4]}"
        raise MachineError("not a matrix of I32", place=name_of(address), found=found)
    # From the first element to the last: what lies between the rows is copied too.
    length = (columns - 1) * strides[0] + (rows - 1) * strides[1] + _I32_LENGTH
    data = np.empty(length, np.uint8)
    library.ggml_backend_tensor_get(address, data.ctypes.data, 0, length)
    return np.ndarray((rows, columns), np.int32, data.data, strides=(strides[1], strides[0]))
