"""What of a model is to be placed, in bytes: layers with their context, experts by tensor."""

from __future__ import annotations

from typing import NamedTuple

from moepack.errors import RequestError
from moepack.footprint.context import ContextOptions
from moepack.footprint.model import footprint_of_source
from moepack.footprint.weights import Weights, source_named
from moepack.paths import PathOrPaths, listed
from moepack.source.experts import Experts, find_experts
from moepack.source.parameters import Parameters


class ExpertTensor(NamedTuple):
    """A projection of all experts of a layer: its name without suffixes, and bytes."""

    layer: int
    name: str
    length: int


class LayerLoad(NamedTuple):
    """A layer: its weights that are no expert's, its share of the context, its experts."""

    layer: int
    dense_length: int
    context_length: int
    expert_length: int
    tensors: tuple[ExpertTensor, ...]

    @property
    def fixed_length(self) -> int:
        """What has to lie where the layer is computed."""
        return self.dense_length + self.context_length


class Load(NamedTuple):
    """A model to be placed, with a context.

    `embedding_length` stays in memory, `output_length` is what follows the last layer;
    `compute_length` is room to compute in, on each device that computes. `step_length` are the
    experts that a token uses. Prompts are computed in batches of `micro_batch` tokens.
    """

    path: str
    weights: Weights
    layers: tuple[LayerLoad, ...]
    embedding_length: int
    output_length: int
    compute_length: int
    step_length: int
    micro_batch: int

    @property
    def parameters(self) -> Parameters:
        """The model's numbers of parameters."""
        counted = self.weights.parameters
        assert counted is not None, "whoever knows the dense part has counted it"
        return counted

    @property
    def staged_length(self) -> int:
        """The bytes of a GPU's copy of an expert tensor that lies in memory, for prompts."""
        return self.weights.staged_length

    @property
    def floor(self) -> int:
        """The least bytes of experts in memory: those of a token, and of a layer for prompts."""
        return max(self.step_length, *(layer.expert_length for layer in self.layers))

    @property
    def expert_length(self) -> int:
        """The bytes of all experts."""
        return sum(layer.expert_length for layer in self.layers)

    @property
    def fixed_length(self) -> int:
        """All that is no expert's, where it is computed on one device."""
        return sum(layer.fixed_length for layer in self.layers) + self.output_length


def load_of(paths: PathOrPaths, options: ContextOptions) -> Load:
    """Return what is to be placed of a source or a whole pack.

    Raises what opening it does, and RequestError where it does not say what it takes.
    """
    path = str(listed(paths)[0])
    source = source_named(paths)
    if source is None:
        raise _unknown(path)
    experts = find_experts(source)
    footprint = footprint_of_source(source, experts)
    weights, context = footprint.weights, footprint.context(options)
    computing, outer = footprint.compute_length(options), weights.outer
    step = weights.read_expert_length
    if context is None or computing is None or outer is None or step is None:
        raise _unknown(path)
    if not weights.expert_length:
        raise RequestError("the model has no experts to place", path=path)
    contexts = {held.layer: held.length for held in context.layers}
    tensors = _tensors(experts)
    return Load(
        path=path,
        weights=weights,
        layers=tuple(
            LayerLoad(
                *(layer.layer, layer.dense_length or 0, contexts.get(layer.layer, 0)),
                layer.expert_length,
                tensors.get(layer.layer, ()),
            )
            for layer in weights.layers
        ),
        embedding_length=outer.embedding_length,
        output_length=outer.output_length + outer.other_length + (weights.loaded_mtp_length or 0),
        compute_length=computing,
        step_length=step,
        micro_batch=options.batch_count,
    )


def _unknown(path: str) -> RequestError:
    return RequestError(
        "it is not known what the model takes",
        path=path,
        hint="name the source, or a pack with the dense part and all metadata",
    )


def _tensors(experts: Experts) -> dict[int, tuple[ExpertTensor, ...]]:
    """Return the expert tensors of each layer, a projection's small parts with its matrix."""
    lengths: dict[tuple[int, str], int] = {}
    for family in experts.families:
        for part in family.parts:
            key = family.layer, part.name.partition(".")[0]
            lengths[key] = lengths.get(key, 0) + part.length * family.expert_count
    found: dict[int, list[ExpertTensor]] = {}
    for (layer, name), length in lengths.items():
        found.setdefault(layer, []).append(ExpertTensor(layer, name, length))
    return {layer: tuple(held) for layer, held in found.items()}
