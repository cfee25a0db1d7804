"""The memory a model takes, from its files: weights, a context, compute buffers.

Compute buffers are estimated: llama.cpp lays out the graph of a whole batch and reserves the need
of its fullest moment. For each token of the batch 5 times the width of the model is alive, and the
largest of the logits (they are reserved for each token of a prompt), three hidden layers of an FFN
or of the experts in use, the outputs of these experts, and the buffers of attention; beside that
the masks of attention. The outputs take the space of two hidden layers, which are free by then, or
lie behind them if they are longer; hidden layers no wider than the model lie where others were.
With an indexer the logits and attention are alive together. Compared by the tests with the buffers
that llama.cpp b11549 reserves on a CPU: see there for the errors. Other devices may take more.
"""

from __future__ import annotations

from typing import NamedTuple

from moepack.common.shape import ModelShape
from moepack.pack.opening.open_model import Model, pack_or_source
from moepack.pack.opening.source_header import read_source
from moepack.pack.reading.pack import Pack
from moepack.planning.footprint.attention import Attention, attention_of, states_attention
from moepack.planning.footprint.context import (
    DEFAULTS,
    CellCounts,
    ContextLengths,
    ContextOptions,
    context_of,
)
from moepack.planning.footprint.weights import Weights, weights_of_experts, weights_of_source
from moepack.source.experts import Experts, find_experts
from moepack.source.shards import Source

_STREAMS, _HIDDEN_COPIES, _FREE_COPIES = 5, 3, 2
_F32_LENGTH, _F16_LENGTH = 4, 2
_OUTPUTS = ("output.weight", "token_embd.weight")
_DOWN = ("ffn_down.weight", "ffn_down_shexp.weight")


class Widths(NamedTuple):
    """The elements of one token: as the model's width, as logits, and at most in an FFN."""

    model: int
    logits: int
    ffn: int


class Footprint(NamedTuple):
    """The memory a model takes; None is unknown.

    That is all but `weights` of a pack of experts alone; `attention` and `widths` of metadata
    without them.
    """

    weights: Weights
    attention: Attention | None
    widths: Widths | None
    experts: Experts | None

    def context(self, options: ContextOptions = DEFAULTS) -> ContextLengths | None:
        """Return the memory of a context, None if it is not known. Raises as `context_of`."""
        return None if self.attention is None else context_of(self.attention, options)

    def compute_length(self, options: ContextOptions = DEFAULTS) -> int | None:
        """Return about how many bytes compute buffers take; None if that is not known.

        Raises as `context_of`.
        """
        attention, widths = self.attention, self.widths
        if attention is None or widths is None:
            return None
        cells = CellCounts(attention, options)
        batch_count = min(options.batch_count, cells.full)
        full = cells.full if attention.layers else batch_count
        masked = full + (cells.window if attention.window else 0)
        has_flash_attention = options.has_flash_attention and attention.allows_flash
        attended = attention.width + (0 if has_flash_attention else attention.head_count * full)
        logits = widths.logits + (attended if attention.has_indexer else 0)
        largest = max(logits, widths.ffn, attended)
        mask_length = _F16_LENGTH if has_flash_attention else _F32_LENGTH
        length = _F32_LENGTH * (_STREAMS * widths.model + largest) + mask_length * masked
        if attention.has_indexer:  # which scores and sorts all cells
            length += 6 * full
        return batch_count * length


def footprint_of(model: Model) -> Footprint:
    """Return the footprint of a source, or of the source of a pack.

    `model` is a pack's directory, as for `open_source`, or an open pack. Raises SourceError or
    PackError for faults in either, RequestError for no path at all.
    """
    with pack_or_source(model) as opened:
        if isinstance(opened, Pack) and not opened.index.is_whole:
            return Footprint(weights_of_experts(opened), None, None, None)
        source = read_source(opened) if isinstance(opened, Pack) else opened
    experts = find_experts(source)
    weights = weights_of_source(source, experts)
    attention = attention_of(source) if states_attention(source) else None
    return Footprint(weights, attention, _widths(source, experts, weights.shape), experts)


def _widths(source: Source, experts: Experts, shape: ModelShape) -> Widths | None:
    """Return the widths of a model by its tensors; None if the experts of a token are unknown."""
    dims = {tensor.name: tensor.dims for _, tensor in source.tensors()}
    output = next((dims[name] for name in _OUTPUTS if name in dims), (0, 0))
    ffn = [_HIDDEN_COPIES * one[0] for name, one in dims.items() if name.split(".", 2)[-1] in _DOWN]
    for family, facts in zip(experts.families, shape.families, strict=True):
        if (used := facts.experts_used) is None:
            return None
        for part in family.parts:
            if "down" in part.name and part.is_weight:
                ffn.append(_expert_width(output[0], used * part.shape[0], used * part.shape[1]))
    return Widths(output[0], output[-1], max(ffn, default=0))


def _expert_width(width: int, hidden: int, outputs: int) -> int:
    """Return the most elements of one token in a model's experts: see above."""
    is_behind = hidden > width and outputs > _FREE_COPIES * hidden
    return max(_HIDDEN_COPIES * hidden + (outputs if is_behind else 0), outputs)
