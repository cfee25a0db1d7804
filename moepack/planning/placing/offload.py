"""The bytes of a placement, and experts in memory, as few as the VRAM of GPUs allows.

Facts of b11549: `--n-cpu-moe N` keeps the experts of the first N blocks in memory (common/arg.cpp).
`-ts` deals out layers, and the output behind the last of them, in proportion to its numbers, one
GPU after the other (llama-model.cpp, `load_tensors`): counts of layers give just these. Embeddings
stay in memory.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

from moepack.common.errors import RequestError
from moepack.planning.footprint.context import ContextOptions
from moepack.planning.footprint.model import Footprint
from moepack.planning.footprint.weights import LayerWeights
from moepack.planning.machine.model import Machine
from moepack.planning.placing.facts import OptionFacts

PACK = "pack"
"""The engine that streams experts: `moepack run`."""
_PARTS = 1000
"""Parts of a GPU's memory, to fill GPUs alike."""


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
        if (
            context is None
            or compute_length is None
            or outer is None
            or step is None
            or parameters is None
        ):
            raise RequestError(
                "the memory that the model needs is unknown",
                path=footprint.path,
                hint="name the source, or a pack with the dense part and all metadata",
            )
        if not weights.expert_length:
            raise RequestError("the model has no experts to place", path=footprint.path)
        self.footprint, self.weights, self.parameters = footprint, weights, parameters
        self.options, self.machine, self.engine, self.margin = options, machine, engine, margin
        self.streams = engine == PACK
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
        self.memory_capacity = max(0, int(machine.memory.value) - margin)
        """The bytes of memory beside the margin."""
        self.gpu_capacities = [max(0, int(gpu.memory.value) - margin) for gpu in machine.gpus]
        if machine.is_unified:
            most = max(0, self.memory_capacity - self.embedding_length)
            self.gpu_capacities = [min(one, most) for one in self.gpu_capacities]
        self.working_length = (weights.dense_length or 0) + compute_length
        self.working_length += sum(self.context_lengths.values())
        """The bytes of all but experts, with all in memory."""

    def memory_beside(self, placed: Offload | None) -> int:
        """Return the bytes of memory beside the margin, and beside a GPU's in unified memory."""
        used = sum(placed.used_lengths) if placed and self.machine.is_unified else 0
        return self.memory_capacity - used

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


class Offload(NamedTuple):
    """A placement: the bytes of the experts in memory, and the layers of each GPU.

    `cpu_layer_count` is N. `layer_counts` are by GPU, the output counts as a layer of the last;
    `used_lengths` are the bytes on each.
    """

    cpu_layer_count: int
    memory_length: int
    layer_counts: tuple[int, ...]
    used_lengths: tuple[int, ...]


def offload(request: PlacementRequest) -> Offload | None:
    """Return the placement on GPUs with the smallest N; None if none fits.

    All GPUs are filled to about the same share. Of experts that are streamed into unified memory
    none stay in VRAM, unless all do.
    """
    capacities = request.gpu_capacities

    def deal(part: int, end: int) -> tuple[Offload, list[int]]:
        return _deal(request, [capacity * part // _PARTS for capacity in capacities], end)

    ends = [layer.layer + 1 for layer in request.layers if layer.expert_length]
    if request.streams and request.machine.is_unified:
        ends = ends[-1:]
    for end in (0, *ends):
        if not deal(_PARTS, end)[1]:
            least = bisect_left(range(_PARTS), True, key=lambda part: not deal(part, end)[1])
            return deal(least, end)[0]
    return None


def missing_length(request: PlacementRequest) -> int:
    """Return the missing bytes of VRAM, with all experts in memory."""
    capacities, compute_length = request.gpu_capacities, request.compute_length
    computing_count = sum(capacity > compute_length for capacity in capacities) or 1
    needed = request.fixed_length + compute_length * computing_count + request.weights.staged_length
    if needed > sum(capacities):
        return needed - sum(capacities)
    # Together they would be large enough, but layers are not divided.
    return sum(_deal(request, capacities, request.layers[-1].layer + 1)[1])


def _deal(
    request: PlacementRequest, capacities: Sequence[int], end: int
) -> tuple[Offload, list[int]]:
    """Deal layers out to GPUs in their order, as many as fit, with N of `end`.

    Returns the placement, and the bytes of each layer that does not fit.

    For a prompt the first of them computes with all experts that are in memory, and has room for a
    copy of the longest tensor of them (ggml-backend.cpp: op offload).
    """
    items = [
        request.fixed_length_of(layer) + (0 if layer.layer < end else layer.expert_length)
        for layer in request.layers
    ]
    items.append(request.output_length)
    counts: list[int] = []
    used: list[int] = []
    staged = request.weights.staged_length if end else 0
    for capacity in capacities:
        count, length = 0, request.compute_length + (0 if any(counts) else staged)
        while items and length + items[0] <= capacity:
            length += items.pop(0)
            count += 1
        counts.append(count)
        used.append(length if count else 0)
    in_memory = sum(layer.expert_length for layer in request.layers if layer.layer < end)
    return Offload(end, in_memory, tuple(counts), tuple(used)), items
