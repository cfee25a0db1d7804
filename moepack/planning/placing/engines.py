"""Placements for engines: llama.cpp and its descendants, and `moepack run`.

Stock engines have whole layers of experts in VRAM and in memory.
`moepack run` has as many in memory as fit, and reads the others from the drive. With a GPU there
are three tiers: experts that llama.cpp keeps in VRAM for good are not kept in memory too, so that
all of memory is for the other layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from moepack.common.errors import RequestError
from moepack.common.escaping import shell_words
from moepack.common.sizes import size_text
from moepack.planning.placing.facts import DeviceFacts, OptionFacts, PinFacts, PlacementFacts
from moepack.planning.placing.offload import (
    Offload,
    PlacementRequest,
    missing_length,
    offload,
)
from moepack.planning.placing.pins import pins_by_hotness, pins_by_trace
from moepack.traces.analysis.concentration import Concentration
from moepack.traces.hotness.model import Hotness
from moepack.traces.spool import SpooledTrace

LLAMA, IK_LLAMA = "llama.cpp", "ik_llama.cpp"

_LESS = "a shorter `context`, or other `cache_types`, take less"
_DRIVE = "`engine=pack` reads experts from the drive when they are needed"
_BUILD = (
    "llama-server has to be a build of llama.cpp for this GPU (docs/run-a-model.md); the one that "
    "comes with moepack computes on processors"
)
_CACHE_NOTE = "`llama-server --moe-cache-mib` takes llama.cpp b11480 or later"
_ON_GPU = ("-ngl", "999")
_BATCH, _MICRO_BATCH = 2048, 512
"""llama-server's defaults of `-b` and `-ub`."""


def place_stock(request: PlacementRequest) -> PlacementFacts:
    """Place a model for a stock engine. Raises RequestError for too little VRAM or memory."""
    placed = offload(request)
    if placed is None:
        return _in_memory(request)
    length = placed.memory_length
    _check_memory(request, request.embedding_length + length, request.memory_beside(placed))
    command = _command(request, [*_ON_GPU, *_layer_words(placed)])
    option = request.option(command, placed.cpu_layer_count, length)
    cached = _cached(request, placed, request.expert_length) if request.engine == LLAMA else ()
    return _placement(request, placed, option, list(cached))


def _in_memory(request: PlacementRequest) -> PlacementFacts:
    """Place all in memory, if GPUs are absent or too small.

    Raises RequestError if memory is too small as well.
    """
    capacities = request.gpu_capacities
    needed = request.working_length + request.expert_length
    notes = []
    if capacities:
        missing = missing_length(request)
        if needed > request.memory_capacity:
            raise RequestError(
                "too little VRAM even with all experts in memory, and too little memory to do "
                "without",
                expected=f"{size_text(sum(capacities) + missing)} of VRAM beside the margin",
                found=size_text(sum(capacities)),
                hint=f"{size_text(missing)} are missing; {_LESS}; {_DRIVE}",
            )
        notes.append(
            f"all is in memory: VRAM lacks {size_text(missing)} beside the margin for dense "
            f"weights and context; {_LESS}"
        )
    _check_memory(request, needed, request.memory_capacity)
    command = _command(request, ["-ngl", "0"] if capacities else [])
    option = request.option(command, None, request.expert_length)
    return _placement(request, None, option, notes=notes)


def _check_memory(request: PlacementRequest, needed: int, capacity: int) -> None:
    if needed > capacity:
        raise RequestError(
            "too little memory for this model",
            expected=f"{size_text(needed)} beside the margin",
            found=size_text(capacity),
            hint=f"{size_text(needed - capacity)} are missing; {_DRIVE}",
        )


def place_streamed(
    request: PlacementRequest,
    hotness: tuple[Hotness, Concentration] | None,
    trace: SpooledTrace | None,
) -> PlacementFacts:
    """Place a model for `moepack run`, which reads experts from the drive as they are needed.

    Raises RequestError below the floor, and what `pins_by_trace` raises.
    """
    placed = offload(request)
    kept, working, end = request.expert_length, request.working_length, request.layers[-1].layer + 1
    if placed is not None:
        kept, working, end = placed.memory_length, request.embedding_length, placed.cpu_layer_count
    budget = _budget(request, request.memory_beside(placed) - working, kept)
    pins = None
    layers = [layer.layer for layer in request.layers if layer.layer < end]
    if budget != kept:
        shape, most = request.weights.shape.without_mtp(), budget - request.floor
        if trace is not None:
            pins = pins_by_trace(trace, budget, most, layers)
        elif hotness is not None:
            pins = pins_by_hotness(hotness, shape, budget, most, layers)
    memory = _memory_words(budget, kept, pins)
    if placed is not None:
        command = _command(request, [*_ON_GPU, *_layer_words(placed)], memory)
        option = request.option(command, end, budget, kept - budget)
        alternatives = list(_cached(request, placed, request.floor))
        return _placement(request, placed, option, alternatives, [_BUILD], pins)
    words = ["moepack", "run", request.footprint.path, "--context", str(request.context), *memory]
    command = shell_words([*words, "-ub", str(request.options.batch_count)])
    option = request.option(command, None, budget, kept - budget)
    unused = []
    if request.gpu_capacities:
        missing = size_text(missing_length(request))
        unused.append(f"no GPU is used: VRAM lacks {missing} for dense weights and context")
    return _placement(request, None, option, notes=unused, pins=pins)


def _budget(request: PlacementRequest, left: int, most: int) -> int:
    """Return the bytes for experts in memory, of which so many are `left`, up to `most`.

    Raises RequestError below the floor, which is `most` if there are fewer experts.
    """
    capacity = request.memory_capacity
    least = min(most, request.floor)
    if left < least:
        floor = capacity - left + least
        raise RequestError(
            "too little memory for this model",
            expected=f"{size_text(floor)} beside the margin ({size_text(least)} of them experts "
            "of one token, or of one layer for prompts)",
            found=size_text(capacity),
            hint=f"{size_text(floor - capacity)} are missing; a shorter `context` takes less",
        )
    return min(most, left)


def _cached(request: PlacementRequest, placed: Offload, least: int) -> Iterator[OptionFacts]:
    """Yield an option with the latest experts in VRAM, if `least` bytes of them are in memory."""
    capacities, expert_length = request.gpu_capacities, request.expert_length
    if not placed.cpu_layer_count or len(capacities) != 1 or request.machine.is_unified:
        return
    working = request.fixed_length + request.compute_length + request.weights.staged_length
    length = max(0, capacities[0] - working) >> 20 << 20
    memory = min(expert_length, request.memory_capacity - request.embedding_length)
    if length and memory >= least:
        words = [*_ON_GPU, "--cpu-moe", "--moe-cache-mib", str(length >> 20)]
        command = _command(request, words, _memory_words(memory, expert_length, None))
        count = request.layers[-1].layer + 1
        yield request.option(command, count, memory, expert_length - memory, length)


def _command(request: PlacementRequest, words: Sequence[str], memory: Sequence[str] = ()) -> str:
    """Return a command of llama-server, to which `moepack run` streams experts of a pack."""
    options, batch = request.options, request.options.batch_count
    words = [*words, "-c", str(request.context)]
    if (options.type_k, options.type_v) != ("f16", "f16"):
        words += ["-ctk", options.type_k, "-ctv", options.type_v]
    words += ["-b", str(batch)] if batch > _BATCH else []
    words += ["-ub", str(batch)] if batch != _MICRO_BATCH else []
    path = request.footprint.path
    if not request.streams:
        return shell_words(["llama-server", "-m", path, *words])
    return shell_words(["moepack", "run", path, *memory, "--", "llama-server", "-m", "{}", *words])


def _memory_words(budget: int, kept: int, pins: PinFacts | None) -> list[str]:
    """Return the options for the memory of experts.

    If all of them are in memory they name no size: in whole pages experts take more than their
    bytes.
    """
    words = ["--memory", f"{budget >> 20}MiB"] if budget < kept else []
    if pins is not None and pins.pin_length >> 20:
        words += ["--pin", f"{pins.pin_length >> 20}MiB"]
    return words


def _layer_words(placed: Offload) -> list[str]:
    """Return the options for the layers of each GPU, and for experts in memory."""
    count, layers = placed.cpu_layer_count, placed.layer_counts
    words = ["-ts", ",".join(map(str, layers))] if len(layers) > 1 else []
    return [*words, *(["--n-cpu-moe", str(count)] if count else [])]


def _placement(
    request: PlacementRequest,
    placed: Offload | None,
    option: OptionFacts,
    alternatives: Sequence[OptionFacts] = (),
    notes: Sequence[str] = (),
    pins: PinFacts | None = None,
) -> PlacementFacts:
    """Return the facts of a placement, without forecasts: all is in memory if `placed` is None."""
    *gpus, memory = _devices(request, placed, option.memory_expert_length)
    if request.machine.is_unified:  # what one takes is taken from the other
        (gpu,) = gpus
        left = memory.left_length - (gpu.length - gpu.left_length)
        memory = replace(memory, left_length=left)
        gpus = [replace(gpu, left_length=min(gpu.left_length, left))]
        notes = [*notes, f"{gpu.name} and memory are the same memory, listed twice"]
    notes = [*notes]
    if placed is not None and len(gpus) > 1:
        names = ", ".join(f"{gpu.name} ({size_text(gpu.length)})" for gpu in gpus)
        notes.append(
            "`-ts` counts layers GPU by GPU, in the order of `llama-server --list-devices`: that "
            f"has to be {names}"
        )
    if any(one.vram_cache_length is not None for one in alternatives):
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
    is_whole = placed is None
    yield _device(
        "memory",
        int(request.machine.memory.value),
        dense=(request.weights.dense_length or 0) if is_whole else request.embedding_length,
        context=sum(request.context_lengths.values()) if is_whole else 0,
        experts=expert_length,
        computing=request.compute_length if is_whole else 0,
    )


def _device(
    name: str, length: int, *, dense: int, context: int, experts: int, computing: int
) -> DeviceFacts:
    left = length - dense - context - experts - computing
    return DeviceFacts(name, length, dense, context, experts, computing, left)
