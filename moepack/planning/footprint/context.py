"""The memory of a context, layer by layer: keys and values, and states, as in llama.cpp b11549.

The rules are those of `llama_context` (llama-context.cpp), of the caches (llama-kv-cache*.cpp) and
of `llama_memory_recurrent`.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from moepack.common.errors import RequestError
from moepack.common.sizes import align, divide_up
from moepack.planning.footprint.attention import Attention, LayerAttention
from moepack.planning.footprint.rules import COARSE, FINE
from moepack.source import ggml_types
from moepack.source.ggml_types import GgmlType

CACHE_TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")
"""The types that llama.cpp offers for keys and values."""

_PADDING = 256
_F32_LENGTH = 4


class ContextOptions(NamedTuple):
    """The options of a context.

    `token_count` is of all sequences together; None is the length the model was trained for.
    `batch_count` is tokens computed at once (`n_ubatch`). With `is_unified` sequences share all
    cells; with `swa_full` layers with a window keep all tokens nevertheless, which is the default
    of llama.cpp's library, and not of its programs. With `has_checkpoint` there is a copy of one
    sequence's windows and states beside it.
    """

    token_count: int | None = None
    type_k: str = "f16"
    type_v: str = "f16"
    batch_count: int = 512
    sequence_count: int = 1
    is_unified: bool = False
    has_flash_attention: bool = True
    swa_full: bool = False
    has_checkpoint: bool = False


LLAMA_SERVER = ContextOptions(sequence_count=4, is_unified=True)
"""The context of llama.cpp's `llama-server` without `--parallel` (server.cpp)."""
IK_LLAMA_SERVER = ContextOptions(swa_full=True)
"""The same of ik_llama.cpp (September 2026): windows take less only with `--swa-compress`."""
MOEPACK_RUN = ContextOptions(has_checkpoint=True)
"""The context of `moepack run`."""


class Cells(NamedTuple):
    """Cells for `cell_count` tokens, of `cell_length` bytes each."""

    cell_count: int
    cell_length: int


class LayerContext(NamedTuple):
    """The memory of a layer of the context: cells for tokens, and a state of `state_length` bytes.

    `checkpoint_length` is the bytes of a copy of its window and state.
    """

    layer: int
    cells: tuple[Cells, ...]
    state_length: int
    checkpoint_length: int = 0

    @property
    def length(self) -> int:
        """All bytes."""
        kv_length = sum(cells.cell_count * cells.cell_length for cells in self.cells)
        return kv_length + self.state_length + self.checkpoint_length


class ContextLengths(NamedTuple):
    """The memory of a context, by layer, and its number of tokens."""

    layers: tuple[LayerContext, ...]
    token_count: int

    @property
    def length(self) -> int:
        """All bytes."""
        return sum(layer.length for layer in self.layers)

    def read_length(self, token_count: int) -> int:
        """Return the bytes that are read for one more token after so many, at most."""
        cells = (cells for layer in self.layers for cells in layer.cells)
        read = sum(min(one.cell_count, token_count) * one.cell_length for one in cells)
        return read + sum(layer.state_length for layer in self.layers)


def context_of(attention: Attention, options: ContextOptions) -> ContextLengths:
    """Return the memory of a context for a model.

    Raises RequestError for options that llama.cpp refuses.
    """
    cache = KvCache(attention, options)
    layers = tuple(cache.layer(layer) for layer in attention.layers)
    return ContextLengths(layers, cache.full * cache.stream_count)


class KvCache:
    """The cells of a sequence: `full` for all tokens, `window` in layers with a window.

    `stream_count` sequences have cells of their own. Raises RequestError for options that llama.cpp
    refuses, and if neither they nor the model give a number of tokens.
    """

    def __init__(self, attention: Attention, options: ContextOptions) -> None:
        self._attention, self._options = attention, options
        type_k, type_v = _type("K", options.type_k), _type("V", options.type_v)
        self._keys = partial(_row_length, "K", type_k)
        self._values = partial(_row_length, "V", type_v)
        self.has_flash_attention = options.has_flash_attention and attention.allows_flash
        if type_v.block_count > 1 and not self.has_flash_attention:
            problem = "quantised values need flash attention"
            raise RequestError(problem, place="cache type of V", found=options.type_v)
        token_count = options.token_count or attention.context_length
        if not token_count:
            raise RequestError(
                "the model does not state its context length", hint="give a count of tokens"
            )
        self.stream_count = 1 if options.is_unified else options.sequence_count
        self.full = align(align(token_count, _PADDING) // self.stream_count, _PADDING)
        # The batch comes in before old tokens leave. Compressed layers never share cells.
        is_shared = options.is_unified and not attention.is_compressed
        needed = attention.window * (options.sequence_count if is_shared else 1)
        self.window = align(min(self.full, needed + options.batch_count), _PADDING)
        if options.swa_full:
            self.window = self.full

    def layer(self, layer: LayerAttention) -> LayerContext:
        """Return the memory of a layer."""
        is_compressed = self._attention.is_compressed
        cells = self._compressed(layer) if is_compressed else self._plain(layer)
        state_length = layer.state_count * _F32_LENGTH
        checkpoint_length = 0
        if self._options.has_checkpoint:
            checkpoint_length = state_length
            if layer.has_window and self.window != self.full:  # which moves on
                checkpoint_length += self._attention.window * cells[0].cell_length
        return LayerContext(
            layer.layer,
            tuple(one for one in cells if one.cell_count and one.cell_length),
            state_length * self._options.sequence_count,
            checkpoint_length,
        )

    def _plain(self, layer: LayerAttention) -> list[Cells]:
        """Return the cells of a layer, and of its indexer."""
        values = layer.value_count
        if values and not self.has_flash_attention:
            values = self._attention.largest_value_count
        own = self._keys(layer.key_count) + self._values(values)
        index = self._keys(layer.index_key_count) + self._values(layer.index_value_count)
        count = self.window if layer.has_window else self.full
        streams = self.stream_count
        return [Cells(count * streams, own), Cells(self.full * streams, index)]

    def _compressed(self, layer: LayerAttention) -> list[Cells]:
        """Return the cells of a window, and rows that stand for several tokens each.

        Sequences share none of them.
        """
        streams = self._options.sequence_count
        length = self._keys(layer.key_count)
        cells = [Cells(self.window * streams, length)]
        if layer.compression in (FINE, COARSE):
            rows = divide_up(self.full, layer.compression)
            rows = align(max(1, rows), _PADDING) * streams
            cells.append(Cells(rows, length))
            if layer.compression == FINE:
                cells.append(Cells(rows, self._keys(layer.index_key_count)))
        return cells


def _type(which: str, name: str) -> GgmlType:
    if name not in CACHE_TYPES:
        raise RequestError(
            "not a type for a cache",
            place=f"cache type of {which}",
            expected=", ".join(CACHE_TYPES),
            found=name,
        )
    return next(one for one in ggml_types.TYPES.values() if one.name == name.upper())


def _row_length(which: str, ggml_type: GgmlType, count: int) -> int:
    if count % ggml_type.block_count:
        raise RequestError(
            "the model's heads are not whole blocks of the cache's type",
            place=f"cache type of {which}",
            expected=f"a multiple of {ggml_type.block_count}",
            found=count,
        )
    return ggml_type.row_length(count)
