"""The inputs of a placement: a model in bytes by layer, a machine, and an engine."""

from __future__ import annotations

from moepack.common.errors import RequestError
from moepack.planning.footprint.context import ContextOptions
from moepack.planning.footprint.model import Footprint
from moepack.planning.footprint.weights import LayerWeights
from moepack.planning.machine.model import Machine
from moepack.planning.placing.facts import OptionFacts


class PlacementRequest:
    """A model with a context for an engine on a machine, in bytes.

    `margin` bytes of each memory are left free. `embedding_length` stays in memory, `output_length`
    follows the last layer; each device that computes takes `compute_length`. `floor` is the least
    for experts in memory: those of a token, and of a layer for prompts. Raises RequestError if not
    all of that is known, and for a model without experts.
    """

    def __init__(
        self,
        footprint: Footprint,
        options: ContextOptions,
        machine: Machine,
        engine: str,
        margin: int,
    ) -> None:
        weights, context = footprint.weights, footprint.context(options)
        compute_length, outer = footprint.compute_length(options), weights.outer
        step, parameters = weights.read_expert_length, weights.parameters
        unknown = RequestError(
            "the memory that the model needs is unknown",
            path=footprint.path,
            hint="name the source, or a pack with the dense part and all metadata",
        )
        if context is None or compute_length is None or outer is None:
            raise unknown
        if step is None or parameters is None:
            raise unknown
        if not weights.expert_length:
            raise RequestError("the model has no experts to place", path=footprint.path)
        self.footprint, self.weights, self.parameters = footprint, weights, parameters
        self.options, self.machine, self.engine, self.margin = options, machine, engine, margin
        self.context = options.token_count or context.token_count
        self.layers = weights.layers
        self.expert_length = weights.expert_length
        self.compute_length = compute_length
        self.embedding_length = outer.embedding_length
        self.output_length = (
            outer.output_length + outer.other_length + (weights.loaded_mtp_length or 0)
        )
        self.floor = max(step, *(layer.expert_length for layer in weights.layers))
        by_layer = {layer.layer: layer.length for layer in context.layers}
        self.context_lengths = {one.layer: by_layer.get(one.layer, 0) for one in weights.layers}
        self.fixed_length = sum(map(self.fixed_length_of, self.layers)) + self.output_length
        """The bytes of all but experts and embeddings, computed on one device."""
        self.gpu_capacities = [max(0, int(gpu.memory.value) - margin) for gpu in machine.gpus]
        self.memory_capacity = max(0, int(machine.memory.value) - margin)
        """The bytes of memory beside the margin."""
        self.working_length = (weights.dense_length or 0) + compute_length
        self.working_length += sum(self.context_lengths.values())
        """The bytes of all but experts, with all in memory."""

    def fixed_length_of(self, layer: LayerWeights) -> int:
        """Return the bytes that a device takes for a layer that it computes, without experts."""
        return (layer.dense_length or 0) + self.context_lengths[layer.layer]

    def option(
        self,
        command: str,
        cpu_layer_count: int | None,
        memory_length: int,
        streamed_length: int = 0,
        vram_cache_length: int | None = None,
    ) -> OptionFacts:
        """Return an option with so many bytes of experts in memory, and others streamed.

        The rest is in VRAM, if that has no cache.
        """
        vram_length = self.expert_length - memory_length - streamed_length
        return OptionFacts(
            command=command,
            cpu_layer_count=cpu_layer_count,
            vram_expert_length=vram_length if vram_cache_length is None else vram_cache_length,
            memory_expert_length=memory_length,
            streamed_length=streamed_length,
            micro_batch=self.options.batch_count,
            vram_cache_length=vram_cache_length,
        )
