"""Placements for llama.cpp and its descendants: whole layers, or tensors by a pattern."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from moepack.common.errors import RequestError
from moepack.common.escaping import shell_words
from moepack.common.sizes import size_text
from moepack.planning.placing.facts import DeviceFacts, OptionFacts, PlacementFacts
from moepack.planning.placing.offload import Offload, filled, missing_length, offload, pattern
from moepack.planning.placing.request import PlacementRequest, device_facts

LLAMA, IK_LLAMA = "llama.cpp", "ik_llama.cpp"

_LESS = "a shorter `context`, or other `cache_types`, take less"
_DRIVE = "`engine=pack` reads experts from the drive when they are needed"
_BATCH, _MICRO_BATCH = 2048, 512
"""llama-server's defaults of `-b` and `-ub`."""
_LEAST_GAIN = 0.01
"""The share of experts that a pattern has to bring into VRAM to be worth its length."""


def place_stock(request: PlacementRequest) -> PlacementFacts:
    """Place a model for a stock engine. Raises RequestError for too little VRAM or memory."""
    model = request.model
    placed = offload(model, request.gpu_capacities)
    if placed is None:
        return _in_memory(request)
    _check_memory(request, model.embedding_length + placed.memory_length)
    return request.facts(
        list(gpu_devices(request, placed, placed.memory_length)),
        _option(request, placed, layer_words(placed), placed.cpu_layer_count),
        list(_alternatives(request, placed)),
        list(notes_of_order(request)),
    )


def layer_words(placed: Offload) -> list[str]:
    """Return the options for the layers of each GPU, and for experts in memory."""
    count = placed.cpu_layer_count
    return [*_split(placed), *(["--n-cpu-moe", str(count)] if count else [])]


def _in_memory(request: PlacementRequest) -> PlacementFacts:
    """Place all in memory, if GPUs are absent or too small.

    Raises RequestError if memory is too small as well.
    """
    model, capacities = request.model, request.gpu_capacities
    needed = request.working_length + model.expert_length
    notes = []
    if capacities:
        missing = missing_length(model, capacities)
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
    _check_memory(request, needed)
    command = _command(request, *(["-ngl", "0"] if capacities else []))
    option = OptionFacts(command, None, 0, model.expert_length, 0, model.micro_batch)
    devices = [*unused_gpus(request), request.memory_device(model.expert_length)]
    return request.facts(devices, option, notes=notes)


def unused_gpus(request: PlacementRequest) -> list[DeviceFacts]:
    """Return the GPUs, with nothing on them."""
    return [
        device_facts(_name(request, number), int(gpu.memory.value))
        for number, gpu in enumerate(request.machine.gpus)
    ]


def notes_of_order(request: PlacementRequest) -> Iterator[str]:
    """Yield the order of GPUs, if there are several."""
    gpus = request.machine.gpus
    if len(gpus) > 1:
        names = (
            f"{_name(request, number)} ({size_text(int(gpu.memory.value))})"
            for number, gpu in enumerate(gpus)
        )
        yield (
            f"`-ts` counts layers GPU by GPU, in the order of `llama-server --list-devices`: that "
            f"has to be {', '.join(names)}"
        )


def _name(request: PlacementRequest, number: int) -> str:
    return request.machine.gpus[number].name or f"GPU {number}"


def _alternatives(request: PlacementRequest, placed: Offload) -> Iterator[OptionFacts]:
    """Yield an option with more experts in VRAM, and one that caches them there."""
    model = request.model
    fuller = filled(model, placed, request.gpu_capacities)
    if placed.memory_length - fuller.memory_length >= _LEAST_GAIN * model.expert_length:
        words = ["-ot", pattern(fuller.in_memory)] if fuller.in_memory else []
        yield _option(request, fuller, [*_split(placed), *words], None)
    # The latest experts in VRAM, with all of them in memory.
    length = cache_length(request, placed)
    needed = model.embedding_length + model.expert_length
    if length and request.engine == LLAMA and needed <= request.memory_capacity:
        command = _command(request, "-ngl", "999", *cache_words(length))
        yield cached_option(request, command, length, model.expert_length)


def cache_length(request: PlacementRequest, placed: Offload) -> int:
    """Return the bytes for a cache of experts in VRAM, in whole MiB; 0 if it cannot have one."""
    model, capacities = request.model, request.gpu_capacities
    if not placed.cpu_layer_count or len(capacities) != 1:
        return 0
    working = model.fixed_length + model.compute_length + model.staged_length
    return max(0, capacities[0] - working) >> 20 << 20


def cache_words(length: int) -> list[str]:
    """Return the options of llama.cpp for a cache of experts in VRAM."""
    return ["--cpu-moe", "--moe-cache-mib", str(length >> 20)]


def cached_option(
    request: PlacementRequest, command: str, length: int, memory_length: int
) -> OptionFacts:
    """Return the option with a cache in VRAM, and so many bytes of experts in memory."""
    model = request.model
    return OptionFacts(
        command=command,
        cpu_layer_count=model.layers[-1].layer + 1,
        vram_expert_length=length,
        memory_expert_length=memory_length,
        streamed_length=model.expert_length - memory_length,
        micro_batch=model.micro_batch,
        vram_cache_length=length,
    )


def _option(
    request: PlacementRequest, placed: Offload, words: Sequence[str], count: int | None
) -> OptionFacts:
    command = _command(request, "-ngl", "999", *words)
    model, kept = request.model, placed.memory_length
    return OptionFacts(command, count, model.expert_length - kept, kept, 0, model.micro_batch)


def _split(placed: Offload) -> list[str]:
    """Return the option that deals layers out to several GPUs."""
    counts = placed.layer_counts
    return ["-ts", ",".join(map(str, counts))] if len(counts) > 1 else []


def _command(request: PlacementRequest, *words: str) -> str:
    server = ["llama-server", "-m", request.model.path, *words, *context_words(request)]
    return shell_words(server)


def context_words(request: PlacementRequest) -> list[str]:
    """Return the options for the length of a context, its types, and micro-batches."""
    keys, values = request.cache_types
    types = [] if keys == values == "f16" else ["-ctk", keys, "-ctv", values]
    batch = request.model.micro_batch
    batches = ["-b", str(batch)] if batch > _BATCH else []
    if batch != _MICRO_BATCH:
        batches += ["-ub", str(batch)]
    return ["-c", str(request.context), *types, *batches]


def gpu_devices(
    request: PlacementRequest, placed: Offload, memory_expert_length: int
) -> Iterator[DeviceFacts]:
    """Yield the facts of each GPU, and of memory with so many bytes of experts."""
    model = request.model
    staged = model.staged_length if placed.cpu_layer_count else 0
    rest = list(model.layers)
    gpus = zip(request.machine.gpus, placed.layer_counts, strict=True)
    for number, (gpu, count) in enumerate(gpus):
        layers, rest = rest[:count], rest[count:]
        output = model.output_length if count > len(layers) else 0
        yield device_facts(
            _name(request, number),
            int(gpu.memory.value),
            dense=sum(layer.dense_length for layer in layers) + output,
            context=sum(layer.context_length for layer in layers),
            experts=sum(one.expert_length for one in layers if one.layer >= placed.cpu_layer_count),
            computing=model.compute_length + staged if count else 0,
        )
        staged = 0 if count else staged
    yield device_facts(
        "memory",
        int(request.machine.memory.value),
        dense=model.embedding_length,
        experts=memory_expert_length,
    )


def _check_memory(request: PlacementRequest, needed: int) -> None:
    capacity = request.memory_capacity
    if needed > capacity:
        raise RequestError(
            "too little memory for this model",
            expected=f"{size_text(needed)} beside the margin",
            found=size_text(capacity),
            hint=f"{size_text(needed - capacity)} are missing; {_DRIVE}",
        )
