"""How many parameters a model has: in all, in its experts, and for one token."""

import math
from dataclasses import dataclass

from moepack.shape import ModelShape, is_row_table
from moepack.source.experts import Experts, SourceFamily, mtp_start
from moepack.source.shards import Source

OUTPUT, TOKEN_EMBEDDING = "output.weight", "token_embd.weight"
EMBEDDINGS = (
    TOKEN_EMBEDDING,
    "per_layer_token_embd.weight",
    "position_embd.weight",
    "token_types.weight",
)
"""What is looked up by row: LLM_TENSOR_LAYER_INPUT with GGML_OP_GET_ROWS in llama-arch.cpp."""


@dataclass(frozen=True, slots=True)
class Parameters:
    """Numbers of parameters: of all tensors, those of experts, of embeddings, and of all else.

    Row tables count as embeddings; an embedding that is the output as well counts as dense.
    `active` are those that one token is computed with, without multi-token-prediction layers, as
    llama.cpp decodes, and without embeddings, of which it is but a row; None where it is not known
    how many experts are used.
    """

    total: int
    expert: int
    embedding: int
    dense: int
    active: int | None


def count_parameters(source: Source, experts: Experts, shape: ModelShape) -> Parameters:
    """Count the parameters of a model whose experts were found."""
    counts = {tensor.name: math.prod(tensor.dims) for _, tensor in source.tensors()}
    total, expert = sum(counts.values()), sum(map(_elements, experts.families))
    embedding = sum(
        count
        for name, count in counts.items()
        if is_row_table(name)
        or (name in EMBEDDINGS and (name != TOKEN_EMBEDDING or OUTPUT in counts))  # the output then
    )
    dense = total - expert - embedding
    used = [
        _used_elements(family, family_shape.experts_used)
        for family, family_shape in zip(experts.families, shape.families, strict=True)
        if family.layer not in shape.mtp_layers
    ]
    active = None
    if None not in used:
        active = dense - _elements_of_dense_mtp(source, experts)
        active += sum(count for count in used if count is not None)
    return Parameters(total, expert, embedding, dense, active)


def _elements(family: SourceFamily) -> int:
    return sum(math.prod(part.shape) for part in family.parts) * family.expert_count


def _used_elements(family: SourceFamily, experts_used: int | None) -> int | None:
    if experts_used is None:
        return None
    return _elements(family) * min(experts_used, family.expert_count) // family.expert_count


def _elements_of_dense_mtp(source: Source, experts: Experts) -> int:
    """Count the elements of prediction layers that are no expert's."""
    first_layer = mtp_start(source)
    if first_layer is None:
        return 0
    return sum(
        math.prod(tensor.dims)
        for _, tensor in source.tensors()
        if tensor.name not in experts.names
        and not is_row_table(tensor.name)
        and (layer_of(tensor.name) or 0) >= first_layer
    )


def layer_of(name: str) -> int | None:
    """Return the layer in a tensor's name, None where it has none."""
    fields = name.split(".")
    return int(fields[1]) if len(fields) > 2 and fields[1].isdecimal() else None
