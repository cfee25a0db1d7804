"""The routers of a model that runs: the experts that each layer's selects.

The eval callback (`cb_eval`) of llama.cpp shows each tensor of the graph; those that are named
`ffn_moe_topk-N` have the selection of layer N's router for each token of the batch, before the
experts are used.
"""

import ctypes
import re
import struct
import sys
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from moepack.common.errors import MachineError
from moepack.running.llama_cpp.structs import TYPE_I32, EvalCallback, TensorHeader

_PREFIX = b"ffn_moe_topk-"
_ROUTER = re.compile(r"ffn_moe_topk-(\d+)", re.ASCII)
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


class Routers:
    """Reads the selections of all routers from each graph, once of each layer.

    C cannot carry an exception, so the first is kept in `error`; the graph is left then.
    """

    def __init__(self, library: Any) -> None:
        self._library = library
        self._token_count = 0
        self._matrices = Matrices(library)
        self.selections: dict[int, Matrix] = {}
        """By layer, in the order in which they ran: experts, a row for each token."""
        self.error: BaseException | None = None
        self.stopped = False
        self.callback = watch(_PREFIX, self._handle)

    def begin(self, token_count: int) -> None:
        """Expect a graph in which each layer routes `token_count` tokens."""
        self.selections, self.error, self.stopped = {}, None, False
        self._token_count = token_count
        self._matrices = Matrices(self._library)

    def stop(self) -> None:
        """Leave the graph at its next router."""
        self.stopped = True

    def _handle(self, tensor: int, asks: bool) -> bool:
        try:
            layer = _layer_of(name_of(tensor))
            if asks:
                return layer is not None
            if layer is not None:
                self._add(layer, self._matrices.read(tensor))
        except BaseException as error:
            self.error = self.error or error
        return not self.stopped and self.error is None

    def _add(self, layer: int, selection: Matrix) -> None:
        if layer in self.selections:
            self._check_same(layer, selection)
            return
        if selection.row_count != self._token_count:
            # llama.cpp leaves out tokens that no output needs: the last layer's counts would lack
            # them.
            raise MachineError(
                "the router did not run for each token",
                place=f"layer {layer}",
                expected=f"{self._token_count} tokens",
                found=selection.row_count,
            )
        self.selections[layer] = selection

    def _check_same(self, layer: int, selection: Matrix) -> None:
        # Grovemoe's router selects once more, the same, for the experts that others share. For
        # another selection, or after another layer, the experts may not be there.
        is_last = layer == next(reversed(self.selections))
        first, again = self.selections[layer].array(), selection.array()
        if not is_last or not np.array_equal(again, first[:, : again.shape[1]]):
            raise MachineError("the router selected twice in one step", place=f"layer {layer}")


@cache
def _layer_of(name: bytes) -> int | None:
    """Return the layer in a router's name; None for a copy's, which has more to it."""
    match = _ROUTER.fullmatch(text_of(name))
    return None if match is None else int(match[1])
