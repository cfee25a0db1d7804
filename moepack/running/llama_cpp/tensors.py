"""Tensors of a running graph: watched by name, and read."""

import ctypes
import struct
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from moepack.common.errors import MachineError
from moepack.running.llama_cpp.structs import TYPE_I32, EvalCallback, TensorHeader

# The whole address space of this process, as one array of bytes that begins at address 0. A slice
# copies just its own bytes, so `_memory[a:b]` is the cheapest way to read a few at an address:
# `ctypes.string_at` takes three times as long, and a callback does this thousands of times a token.
_memory: Any = (ctypes.c_char * sys.maxsize).from_address(0)
_NAME, _NAME_LENGTH = TensorHeader.name.offset, TensorHeader.name.size
_HEAD = struct.Struct(f"@iP4q4N{TensorHeader.data.offset - TensorHeader.op.offset}xP")
"""Type, buffer, dimensions, strides and data of a tensor. A struct of ctypes is slower."""
_I32_LENGTH = 4


def watch(prefix: bytes, handle: Callable[[int, bool], bool]) -> Any:
    """Make an `EvalCallback` that hands on only tensors with names that begin with `prefix`.

    `handle` must raise nothing: C cannot carry an exception.
    """
    start, end = _NAME, _NAME + len(prefix)

    def called(tensor: int, asks: bool, _: object) -> bool:
        # Called for each of a graph's thousands of tensors: nearly all are done with here.
        if asks and _memory[tensor + start : tensor + end] != prefix:
            return False
        return handle(tensor, asks)

    return EvalCallback(called)


def name_of(address: int) -> bytes:
    """Return the name of the tensor at `address` as it lies there: something may follow a zero."""
    start = address + _NAME
    name: bytes = _memory[start : start + _NAME_LENGTH]
    return name


def text_of(name: bytes) -> str:
    """Return a name of `name_of` as text."""
    return name.partition(b"\0")[0].decode(errors="replace")


class Matrix(NamedTuple):
    """A matrix of integers: its `values` row by row, in so many columns."""

    values: list[int]
    column_count: int

    @property
    def row_count(self) -> int:
        """The number of rows."""
        return len(self.values) // self.column_count

    def array(self) -> NDArray[np.int32]:
        """Return it as an array [row, column]."""
        return np.array(self.values, np.int32).reshape(-1, self.column_count)


class Matrices:
    """Reads matrices of I32 of a graph, in any memory and with any strides.

    For one run of the graph: it remembers which buffers are the host's.
    """

    # Between a layer's products nothing of Python is left in the processor's caches: what runs here
    # takes twenty times as long as in a loop, so it is short, and one row goes without numpy.

    def __init__(self, library: Any) -> None:
        self._library = library
        self._are_host: dict[int, bool] = {}

    def read(self, address: int) -> Matrix:
        """Copy the matrix at `address`. Raises MachineError for another tensor."""
        head = _HEAD.unpack(_memory[address : address + _HEAD.size])
        kind, buffer, columns, rows, planes, volumes, step, row_step, _, _, data = head
        if kind != TYPE_I32 or planes != 1 or volumes != 1 or not columns or not rows:
            place = text_of(name_of(address))
            description = f"type {kind}, dimensions {head[2:6]}"
            raise MachineError("not a matrix of I32", place=place, found=description)
        if rows == 1 and step == _I32_LENGTH and self._is_host(buffer):
            row = memoryview(_memory[data : data + columns * _I32_LENGTH])
            return Matrix(row.cast("i").tolist(), columns)
        # From the first element to the last: what lies between the rows is copied too.
        length = (columns - 1) * step + (rows - 1) * row_step + _I32_LENGTH
        copy = np.empty(length, np.uint8)
        self._library.ggml_backend_tensor_get(address, copy.ctypes.data, 0, length)
        array = np.ndarray((rows, columns), np.int32, copy.data, strides=(row_step, step))
        return Matrix(array.ravel().tolist(), columns)

    def _is_host(self, buffer: int) -> bool:
        if buffer not in self._are_host:
            is_host = bool(self._library.ggml_backend_buffer_is_host(buffer))
            self._are_host[buffer] = is_host
        return self._are_host[buffer]
