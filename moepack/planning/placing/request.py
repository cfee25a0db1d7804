"""The inputs of a placement: a model in bytes by layer, a machine, and an engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from moepack.common.errors import RequestError
from moepack.pack.opening.open_model import Model, path_of
from moepack.planning.footprint.context import ContextOptions
from moepack.planning.footprint.model import footprint_of
from moepack.planning.footprint.weights import Weights
from moepack.planning.machine.model import Machine
from moepack.planning.placing.facts import DeviceFacts, OptionFacts, PinFacts, PlacementFacts
from moepack.source.parameters import Parameters

_CACHE_NOTE = "`llama-server --moe-cache-mib` takes llama.cpp b11480 or later"


class ExpertTensor(NamedTuple):
    """A projection of all experts of a layer: its name without suffixes, and bytes."""

    layer: int
    name: str
    length: int


class LayerLengths(NamedTuple):
    """The bytes of a layer: its dense weights, its share of the context, its experts."""

    layer: int
    dense_length: int
    context_length: int
    expert_length: int
    tensors: tuple[ExpertTensor, ...]

    @property
    def fixed_length(self) -> int:
        """The bytes that have to lie where the layer is computed."""
        return self.dense_length + self.context_length


class ModelLengths(NamedTuple):
    """The bytes of a model to be placed, with a context.

    `embedding_length` stays in memory, `output_length` follows the last layer; each device that
    computes takes `compute_length`. A token uses `step_length` bytes of experts. Prompts are
    computed in batches of `micro_batch` tokens.
    """

    path: str
    weights: Weights
    parameters: Parameters
    layers: tuple[LayerLengths, ...]
    embedding_length: int
    output_length: int
    compute_length: int
    step_length: int
    micro_batch: int

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
        return self.weights.expert_length

    @property
    def fixed_length(self) -> int:
        """The bytes of all but experts and embeddings, computed on one device."""
        return sum(layer.fixed_length for layer in self.layers) + self.output_length


def model_lengths(model: Model, options: ContextOptions) -> ModelLengths:
    """Return the bytes of a source or a whole pack.

    Raises what opening it does, and RequestError if they are not known.
    """
    path = path_of(model)
    footprint = footprint_of(model)
    weights, context, experts = footprint.weights, footprint.context(options), footprint.experts
    computing, outer = footprint.compute_length(options), weights.outer
    step, parameters = weights.read_expert_length, weights.parameters
    unknown = RequestError(
        "the memory that the model needs is unknown",
        path=path,
        hint="name the source, or a pack with the dense part and all metadata",
    )
    if context is None or computing is None or outer is None:
        raise unknown
    if step is None or parameters is None or experts is None:
        raise unknown
    if not weights.expert_length:
        raise RequestError("the model has no experts to place", path=path)
    contexts = {layer.layer: layer.length for layer in context.layers}
    tensors: dict[int, dict[str, int]] = {}
    for family in experts.families:
        by_name = tensors.setdefault(family.layer, {})
        for part in family.parts:  # a projection's small parts with its matrix
            name = part.name.partition(".")[0]
            by_name[name] = by_name.get(name, 0) + part.length * family.expert_count
    return ModelLengths(
        path=path,
        weights=weights,
        parameters=parameters,
        layers=tuple(
            LayerLengths(
                layer=number,
                dense_length=layer.dense_length or 0,
                context_length=contexts.get(number, 0),
                expert_length=layer.expert_length,
                tensors=tuple(
                    ExpertTensor(number, name, length)
                    for name, length in tensors.get(number, {}).items()
                ),
            )
            for number, layer in ((layer.layer, layer) for layer in weights.layers)
        ),
        embedding_length=outer.embedding_length,
        output_length=outer.output_length + outer.other_length + (weights.loaded_mtp_length or 0),
        compute_length=computing,
        step_length=step,
        micro_batch=options.batch_count,
    )


class PlacementRequest(NamedTuple):
    """A model for an engine on a machine: `margin` bytes of each memory are left free.

    `context` is in tokens, its keys and values are of `cache_types`.
    """

    model: ModelLengths
    machine: Machine
    engine: str
    context: int
    margin: int
    cache_types: tuple[str, str]

    @property
    def gpu_capacities(self) -> list[int]:
        """The bytes of each GPU beside the margin."""
        return [max(0, int(gpu.memory.value) - self.margin) for gpu in self.machine.gpus]

    @property
    def memory_capacity(self) -> int:
        """The bytes of memory beside the margin."""
        return max(0, int(self.machine.memory.value) - self.margin)

    @property
    def working_length(self) -> int:
        """The bytes of all but experts, with all in memory."""
        device = self.memory_device(0)
        return device.dense_length + device.context_length + device.compute_length

    def memory_device(self, expert_length: int) -> DeviceFacts:
        """Return the facts of memory if all lies there, with so many bytes of experts."""
        model = self.model
        return device_facts(
            "memory",
            int(self.machine.memory.value),
            dense=model.weights.dense_length or 0,
            context=sum(layer.context_length for layer in model.layers),
            experts=expert_length,
            computing=model.compute_length,
        )

    def facts(
        self,
        devices: Sequence[DeviceFacts],
        option: OptionFacts,
        alternatives: Sequence[OptionFacts] = (),
        notes: Sequence[str] = (),
        pins: PinFacts | None = None,
    ) -> PlacementFacts:
        """Return the facts of a placement, without forecasts."""
        if any(one.vram_cache_length is not None for one in (option, *alternatives)):
            notes = [*notes, _CACHE_NOTE]
        return PlacementFacts(
            model=self.model.path,
            engine=self.engine,
            context=self.context,
            margin_length=self.margin,
            parameters=self.model.parameters,
            table_length=self.model.weights.table_length,
            devices=tuple(devices),
            option=option,
            alternatives=tuple(alternatives),
            notes=tuple(notes),
            pins=pins,
        )


def device_facts(
    name: str,
    length: int,
    *,
    dense: int = 0,
    context: int = 0,
    experts: int = 0,
    computing: int = 0,
) -> DeviceFacts:
    """Return the facts of a device, and its free bytes."""
    left = length - dense - context - experts - computing
    return DeviceFacts(name, length, dense, context, experts, computing, left)
