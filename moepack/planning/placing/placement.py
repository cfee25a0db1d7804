"""The facts of a placement: the contents of each memory, the options, and notes on them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from moepack.common.sizes import size_text
from moepack.planning.placing.facts import DeviceFacts, OptionFacts, PinFacts, PlacementFacts
from moepack.planning.placing.offload import Offload
from moepack.planning.placing.request import PlacementRequest

_CACHE_NOTE = "`llama-server --moe-cache-mib` takes llama.cpp b11480 or later"


def placement(
    request: PlacementRequest,
    placed: Offload | None,
    option: OptionFacts,
    alternatives: Sequence[OptionFacts] = (),
    notes: Sequence[str] = (),
    pins: PinFacts | None = None,
) -> PlacementFacts:
    """Return the facts of a placement, without forecasts: all is in memory if `placed` is None."""
    *gpus, memory = _devices(request, placed, option.memory_expert_length)
    notes = [*notes]
    if placed is not None and len(gpus) > 1:
        names = ", ".join(f"{gpu.name} ({size_text(gpu.length)})" for gpu in gpus)
        notes.append(
            "`-ts` counts layers GPU by GPU, in the order of `llama-server --list-devices`: that "
            f"has to be {names}"
        )
    if any(one.vram_cache_length is not None for one in (option, *alternatives)):
        notes.append(_CACHE_NOTE)
    return PlacementFacts(
        model=request.footprint.path,
        engine=request.engine,
        context=request.context,
        margin_length=request.margin,
        parameters=request.parameters,
        table_length=request.weights.table_length,
        devices=(*gpus, memory),
        option=option,
        alternatives=tuple(alternatives),
        notes=tuple(notes),
        pins=pins,
    )


def _devices(
    request: PlacementRequest, placed: Offload | None, expert_length: int
) -> Iterator[DeviceFacts]:
    """Yield the facts of each GPU, and of memory with so many bytes of experts."""
    gpus, rest = request.machine.gpus, list(request.layers)
    counts = [0] * len(gpus) if placed is None else placed.layer_counts
    end = 0 if placed is None else placed.cpu_layer_count
    staged = request.weights.staged_length if end else 0
    for number, (gpu, count) in enumerate(zip(gpus, counts, strict=True)):
        layers, rest = rest[:count], rest[count:]
        output = request.output_length if count > len(layers) else 0
        yield _device(
            gpu.name or f"GPU {number}",
            int(gpu.memory.value),
            dense=sum(layer.dense_length or 0 for layer in layers) + output,
            context=sum(request.context_lengths[layer.layer] for layer in layers),
            experts=sum(layer.expert_length for layer in layers if layer.layer >= end),
            computing=request.compute_length + staged if count else 0,
        )
        staged = 0 if count else staged
    length = int(request.machine.memory.value)
    if placed is not None:
        yield _device("memory", length, dense=request.embedding_length, experts=expert_length)
        return
    yield _device(
        "memory",
        length,
        dense=request.weights.dense_length or 0,
        context=sum(request.context_lengths.values()),
        experts=expert_length,
        computing=request.compute_length,
    )


def _device(
    name: str, length: int, *, dense: int, experts: int, context: int = 0, computing: int = 0
) -> DeviceFacts:
    left = length - dense - context - experts - computing
    return DeviceFacts(name, length, dense, context, experts, computing, left)
