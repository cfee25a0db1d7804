"""The parameter counts of a model: in all, in its experts, and for one token."""

import math
import re
from dataclasses import dataclass

from moepack.common.shape import ModelShape, is_row_table
from moepack.source.experts import Experts, SourceFamily, mtp_start
from moepack.source.shards import Source

OUTPUT, TOKEN_EMBEDDING = "output.weight", "token_embd.weight"
EMBEDDINGS = (
    TOKEN_EMBEDDING,
    "per_layer_token_embd.weight",
    "position_embd.weight",
    "token_types.weight",
)
"""Tensors looked up by row: LLM_TENSOR_LAYER_INPUT with GGML_OP_GET_ROWS in llama-arch.cpp."""
_LAYER = re.compile(r"blk\.(\d{1,5})\.")


@dataclass(frozen=True, slots=True)
class Parameters:
    """Numbers of parameters: of all tensors, of experts, of embeddings, and of all others.

    Row tables count as embeddings; an embedding that is the output as well counts as dense.
    `active` are those that compute one token, without multi-token-prediction layers, as llama.cpp
    decodes, and without embeddings, since a token takes one row of them; None if the number of used
    experts is unknown.
    """

    total: int
    expert: int
    embedding: int
    dense: int
    active: int | None


def count_parameters(source: Source, experts: Experts, shape: ModelShape) -> Parameters:
    """Count the parameters of a model."""
    counts = {tensor.name: math.prod(tensor.dims) for _, tensor in source.tensors()}
    total, expert = sum(counts.values()), sum(map(_elements, experts.families))
    embedding = sum(
        count
        for name, count in counts.items()
        if is_row_table(name)
        or (name in EMBEDDINGS and (name != TOKEN_EMBEDDING or OUTPUT in counts))  # the output then
    )
    dense = total - expert - embedding
    active = None
    decoded = [family for family in experts.families if family.layer not in shape.mtp_layers]
    if all(family.experts_used is not None for family in decoded):
        first_mtp = mtp_start(source)
        active = dense - sum(
            count
            for name, count in counts.items()
            if first_mtp is not None
            and name not in experts.names
            and not is_row_table(name)
            and (layer_of(name) or 0) >= first_mtp
        )
        for family in decoded:
            used = min(family.experts_used or 0, family.expert_count)
            active += _elements(family) * used // family.expert_count
    return Parameters(total, expert, embedding, dense, active)


def _elements(family: SourceFamily) -> int:
    return sum(math.prod(part.shape) for part in family.parts) * family.expert_count


def layer_of(name: str) -> int | None:
    """Return the layer in a tensor's name, None if it has none."""
    match = _LAYER.match(name)
    return int(match[1]) if match else None
