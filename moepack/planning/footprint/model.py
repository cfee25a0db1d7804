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
from moepack.pack.opening.open_model import Model, is_pack, pack_or_source, path_of, read_source
from moepack.pack.reading.pack import Pack
from moepack.planning.footprint.attention import Attention, attention_of, states_attention
from moepack.planning.footprint.context import ContextLengths, ContextOptions, KvCache, context_of
from moepack.planning.footprint.weights import Weights, weights_of_experts, weights_of_source
from moepack.source.experts import Experts, find_experts
from moepack.source.shards import Source, open_source

_STREAMS, _HIDDEN_COPIES, _FREE_COPIES = 5, 3, 2
_F32_LENGTH, _F16_LENGTH = 4, 2
_OUTPUTS = ("output.weight", "token_embd.weight")
_DOWN = ("ffn_down.weight", "ffn_down_shexp.weight")


class Footprint(NamedTuple):
    """The memory a model takes, by layer; None is unknown.

    That is all but `weights` of a pack of experts alone; `attention` of metadata without it.
    `widths` are the elements of one token: as the model's width, as logits, and at most in an FFN.
    """

    path: str
    is_pack: bool
    weights: Weights
    attention: Attention | None
    widths: tuple[int, int, int] | None

    def context(self, options: ContextOptions) -> ContextLengths | None:
        """Return the memory of a context, None if it is not known. Raises as `context_of`."""
        return None if self.attention is None else context_of(self.attention, options)

    def compute_length(self, options: ContextOptions) -> int | None:
        """Return about how many bytes compute buffers take; None if that is not known.

        Raises as `context_of`.
        """
        attention, widths = self.attention, self.widths
        if attention is None or widths is None:
            return None
        cache = KvCache(attention, options)
        batch_count = min(options.batch_count, cache.full)
        model_width, logits, ffn = widths
        full = cache.full if attention.layers else batch_count
        masked = full + (cache.window if attention.window else 0)
        attended = attention.width
        if not cache.has_flash_attention:
            attended += attention.head_count * full
        logits += attended if attention.has_indexer else 0
        largest = max(logits, ffn, attended)
        mask_length = _F16_LENGTH if cache.has_flash_attention else _F32_LENGTH
        length = _F32_LENGTH * (_STREAMS * model_width + largest) + mask_length * masked
        if attention.has_indexer:  # which scores and sorts all cells
            length += 6 * full
        return batch_count * length

    def prompt_operations(self, count: int) -> float | None:
        """Return the operations that a prompt of `count` tokens takes; None if they are not known.

        Two for each active parameter and token, a product and a sum, and those of attention.
        """
        parameters, attention = self.weights.parameters, self.attention
        if parameters is None or parameters.active is None:
            return None
        attending = 0.0 if attention is None else attention.operations(count)
        return 2.0 * parameters.active * count + attending


def footprint_of(model: Model | Footprint) -> Footprint:
    """Return the footprint of a source, or of the source of a pack; the same for a footprint.

    `model` is a pack's directory, as for `open_source`, or an open pack. Raises SourceError or
    PackError for faults in either, RequestError for no path at all.
    """
    if isinstance(model, Footprint):
        return model
    path, packed = path_of(model), is_pack(model)
    with pack_or_source(model) as opened:
        if isinstance(opened, Pack) and not opened.index.is_whole:
            return Footprint(path, packed, weights_of_experts(opened), None, None)
        source = read_source(opened) if isinstance(opened, Pack) else opened
    return _footprint(path, packed, source, find_experts(source))


def footprint_of_draft(path: str) -> Footprint:
    """Return the footprint of a model in a GGUF that may have no experts. Raises SourceError."""
    source = open_source(path)
    return _footprint(path, False, source, find_experts(source, may_be_dense=True))


def _footprint(path: str, packed: bool, source: Source, experts: Experts) -> Footprint:
    weights = weights_of_source(source, experts)
    attention = attention_of(source) if states_attention(source) else None
    return Footprint(path, packed, weights, attention, _widths(source, experts, weights.shape))


def _widths(source: Source, experts: Experts, shape: ModelShape) -> tuple[int, int, int] | None:
    """Return the widths of a token by the tensors; None if its number of experts is unknown."""
    dims = {tensor.name: tensor.dims for _, tensor in source.tensors()}
    output = next((dims[name] for name in _OUTPUTS if name in dims), (0, 0))
    ffn = [_HIDDEN_COPIES * one[0] for name, one in dims.items() if name.split(".", 2)[-1] in _DOWN]
    for family, facts in zip(experts.families, shape.families, strict=True):
        if (used := facts.experts_used) is None:
            return None
        for part in family.parts:
            if "down" in part.name and part.is_weight:
                hidden, outputs = used * part.shape[0], used * part.shape[1]
                is_behind = hidden > output[0] and outputs > _FREE_COPIES * hidden
                ffn += [_HIDDEN_COPIES * hidden + (outputs if is_behind else 0), outputs]
    return output[0], output[-1], max(ffn, default=0)
