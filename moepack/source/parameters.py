"""How many parameters a model has: in all, in its experts, and for one token."""

import math
from dataclasses import dataclass

from moepack.shape import ModelShape
from moepack.source.experts import Experts, SourceFamily, mtp_start
from moepack.source.shards import Source


@dataclass(frozen=True, slots=True)
class Parameters:
    """Numbers of parameters: of all tensors, of those that one token uses, of all experts."""

    total: int
    active: int | None
    expert: int


def count_parameters(source: Source, experts: Experts, shape: ModelShape) -> Parameters:
    """Count elements: all, those of experts, and those that one token uses.

    Active are all dense tensors and the experts used per token, without multi-token-prediction
    layers, as llama.cpp decodes; None where the metadata does not say how many experts are used.
    """
    total = sum(math.prod(tensor.dims) for _, tensor in source.tensors())
    in_experts = sum(map(_elements, experts.families))
    dense = total - in_experts - _elements_of_dense_mtp(source, experts)
    used = [
        _used_elements(family, family_shape.experts_used)
        for family, family_shape in zip(experts.families, shape.families, strict=True)
        if family.layer not in shape.mtp_layers
    ]
    active = None if None in used else dense + sum(count for count in used if count is not None)
    return Parameters(total, active, in_experts)


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
        if tensor.name not in experts.names and (layer_of(tensor.name) or 0) >= first_layer
    )


def layer_of(name: str) -> int | None:
    """Return the layer in a tensor's name, None where it has none."""
    fields = name.split(".")
    return int(fields[1]) if len(fields) > 2 and fields[1].isdecimal() else None
