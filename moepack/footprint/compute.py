"""Room to compute in: what llama.cpp takes beside weights and context, estimated.

llama.cpp lays out the graph of a whole batch and reserves what that needs at its fullest moment.
The estimate: for each token of the batch 5 times the width of the model is alive, and the largest
of the logits (they are reserved for each token of a prompt), three hidden layers of an FFN or of
the experts in use, and what attention takes; beside that the masks of attention. With an indexer
the logits and attention are alive together. Compared by the tests with what llama.cpp b11549
reserves on a CPU: see there for how far it is off. Other devices may take more.
"""

from __future__ import annotations

from typing import NamedTuple

from moepack.footprint.attention import Attention
from moepack.footprint.context import DEFAULTS, CellCounts, ContextOptions
from moepack.shape import ModelShape
from moepack.source.experts import Experts
from moepack.source.shards import Source

_STREAMS, _HIDDEN_COPIES = 5, 3
_F32_LENGTH, _F16_LENGTH = 4, 2
_OUTPUTS = ("output.weight", "token_embd.weight")
_DOWN = ("ffn_down.weight", "ffn_down_shexp.weight")


class Widths(NamedTuple):
    """How many elements one token takes: as the model's width, as logits, and hidden in an FFN."""

    model: int
    logits: int
    hidden: int


def widths_of(source: Source, experts: Experts, shape: ModelShape) -> Widths | None:
    """Return the widths of a model by its tensors; None where it is not known what a token uses."""
    dims = {tensor.name: tensor.dims for _, tensor in source.tensors()}
    output = next((dims[name] for name in _OUTPUTS if name in dims), (0, 0))
    hidden = [held[0] for name, held in dims.items() if name.split(".", 2)[-1] in _DOWN]
    for family, facts in zip(experts.families, shape.families, strict=True):
        if facts.experts_used is None:
            return None
        widths = [part.shape[0] for part in family.parts if "down" in part.name and part.is_weight]
        hidden.extend(width * facts.experts_used for width in widths)
    return Widths(output[0], output[-1], max(hidden, default=0))


def compute_length(widths: Widths, attention: Attention, options: ContextOptions = DEFAULTS) -> int:
    """Return about how many bytes a context takes to compute in. Raises as `context_of`."""
    cells = CellCounts(attention, options)
    batch_count = min(options.batch_count, cells.full)
    full = cells.full if attention.layers else batch_count
    masked = full + (cells.window if attention.window else 0)
    has_flash_attention = options.has_flash_attention and attention.allows_flash
    attended = attention.width + (0 if has_flash_attention else attention.head_count * full)
    logits = widths.logits + (attended if attention.has_indexer else 0)
    largest = max(logits, _HIDDEN_COPIES * widths.hidden, attended)
    mask_length = _F16_LENGTH if has_flash_attention else _F32_LENGTH
    length = _F32_LENGTH * (_STREAMS * widths.model + largest) + mask_length * masked
    if attention.has_indexer:  # which scores and sorts all cells
        length += 6 * full
    return batch_count * length
