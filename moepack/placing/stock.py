"""Placements for llama.cpp and what descends from it: whole layers, or tensors by a pattern."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from moepack.errors import RequestError
from moepack.escaping import shell_words
from moepack.placing.facts import DeviceFacts, OptionFacts
from moepack.placing.offload import Offload, filled, missing_length, offload, pattern
from moepack.placing.request import Placement, Request, device_facts
from moepack.sizes import size_text

LLAMA, IK_LLAMA = "llama.cpp", "ik_llama.cpp"

_LESS = "a shorter `context`, or other `cache_types`, take less"
_BATCH, _MICRO_BATCH = 2048, 512
"""What llama-server takes for `-b` and `-ub` where it is not told."""
_LEAST_GAIN = 0.01
"""Of the experts: what a pattern has to bring into VRAM to be worth its length."""


def place_stock(request: Request) -> Placement:
    """Place a model for a stock engine. Raises RequestError for too little VRAM or memory."""
    load = request.load
    placed = offload(load, request.rooms)
    if placed is None:
        return _in_memory(request)
    _check_memory(request, load.embedding_length + placed.memory_length)
    return Placement(
        tuple(gpu_devices(request, placed, placed.memory_length)),
        _option(request, placed, layer_words(placed), placed.cpu_layer_count),
        tuple(_alternatives(request, placed)),
        tuple(notes_of_order(request)),
    )


def layer_words(placed: Offload) -> list[str]:
    """Return the options that say which layers and experts lie where."""
    count = placed.cpu_layer_count
    return [*_split(placed), *(["--n-cpu-moe", str(count)] if count else [])]


def _in_memory(request: Request) -> Placement:
    """Place all in memory, which GPUs, if there are any, have no room to share.

    Raises RequestError where memory has none either.
    """
    load, gpus = request.load, request.machine.gpus
    needed = request.working_length + load.expert_length
    if gpus and needed > request.memory_room:
        raise _too_little_vram(request)
    _check_memory(request, needed)
    words = ["-ngl", "0"] if gpus else []
    command = _command(request, *words)
    option = OptionFacts(command, None, 0, load.expert_length, 0, load.micro_batch)
    devices = (*unused_gpus(request), request.memory_device(load.expert_length))
    return Placement(devices, option, notes=tuple(_of_unused(request)))


def unused_gpus(request: Request) -> list[DeviceFacts]:
    """Return the GPUs, with nothing on them."""
    return [
        device_facts(_name(request, number), int(gpu.memory.value), 0, 0, 0, 0)
        for number, gpu in enumerate(request.machine.gpus)
    ]


def _of_unused(request: Request) -> Iterator[str]:
    """Yield why GPUs are not used."""
    if request.machine.gpus:
        missing = size_text(missing_length(request.load, request.rooms))
        yield (
            f"all is in memory: VRAM lacks {missing} beside the margin for dense weights and "
            f"context; {_LESS}"
        )


def notes_of_order(request: Request) -> Iterator[str]:
    """Yield which GPU is which, where there are several."""
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


def _name(request: Request, number: int) -> str:
    return request.machine.gpus[number].name or f"GPU {number}"


def _alternatives(request: Request, placed: Offload) -> Iterator[OptionFacts]:
    """Yield what holds more experts in VRAM, and what caches them there."""
    load, count = request.load, placed.cpu_layer_count
    fuller = filled(load, placed, request.rooms)
    if placed.memory_length - fuller.memory_length >= _LEAST_GAIN * load.expert_length:
        words = ["-ot", pattern(fuller.in_memory)] if fuller.in_memory else []
        yield _option(request, fuller, [*_split(placed), *words], None)
    if count and len(request.rooms) == 1 and request.engine == LLAMA:
        # Of host memory, where all experts are then, b11480 and later cache the latest in VRAM.
        room = cache_room(request)
        if room <= 0 or load.embedding_length + load.expert_length > request.memory_room:
            return
        words = ["--cpu-moe", "--moe-cache-mib", str(room >> 20)]
        command = _command(request, "-ngl", "999", *words)
        yield OptionFacts(
            command,
            load.layers[-1].layer + 1,
            *(room >> 20 << 20, load.expert_length, 0, load.micro_batch),
            vram_cache_length=room >> 20 << 20,
        )


def cache_room(request: Request) -> int:
    """Return what the first GPU has for a cache of experts beside all else."""
    load = request.load
    return request.rooms[0] - load.fixed_length - load.compute_length - load.staged_length


def _option(
    request: Request, placed: Offload, words: Sequence[str], count: int | None
) -> OptionFacts:
    command = _command(request, "-ngl", "999", *words)
    load, kept = request.load, placed.memory_length
    return OptionFacts(command, count, load.expert_length - kept, kept, 0, load.micro_batch)


def _split(placed: Offload) -> list[str]:
    """Return how to deal layers out to several GPUs."""
    counts = placed.layer_counts
    return ["-ts", ",".join(map(str, counts))] if len(counts) > 1 else []


def _command(request: Request, *words: str) -> str:
    server = ["llama-server", "-m", request.load.path, *words, *context_words(request)]
    return shell_words(server)


def context_words(request: Request) -> list[str]:
    """Return the options that say how long a context is, and how many tokens come at once."""
    keys, values = request.cache_types
    types = [] if keys == values == "f16" else ["-ctk", keys, "-ctv", values]
    batch = request.load.micro_batch
    batches = ["-b", str(batch)] if batch > _BATCH else []
    if batch != _MICRO_BATCH:
        batches += ["-ub", str(batch)]
    return ["-c", str(request.context), *types, *batches]


def gpu_devices(
    request: Request, placed: Offload, memory_expert_length: int
) -> Iterator[DeviceFacts]:
    """Yield what lies on each GPU, and in memory with so many bytes of experts."""
    load = request.load
    staged = load.staged_length if placed.cpu_layer_count else 0
    layers = list(load.layers)
    gpus = zip(request.machine.gpus, placed.layer_counts, strict=True)
    for number, (gpu, count) in enumerate(gpus):
        held, layers = layers[:count], layers[count:]
        computing = load.compute_length + staged if count else 0
        staged = 0 if count else staged
        output = load.output_length if count > len(held) else 0
        yield device_facts(
            _name(request, number),
            int(gpu.memory.value),
            sum(layer.dense_length for layer in held) + output,
            sum(layer.context_length for layer in held),
            sum(one.expert_length for one in held if one.layer >= placed.cpu_layer_count),
            computing,
        )
    memory = int(request.machine.memory.value)
    yield device_facts("memory", memory, load.embedding_length, 0, memory_expert_length, 0)


def _too_little_vram(request: Request) -> RequestError:
    missing = missing_length(request.load, request.rooms)
    return RequestError(
        "too little VRAM even with all experts in memory, and too little memory to do without",
        expected=f"{size_text(sum(request.rooms) + missing)} of VRAM beside the margin",
        found=size_text(sum(request.rooms)),
        hint=f"{size_text(missing)} are missing; {_LESS}; `engine=pack` reads experts from the "
        "drive when they are needed",
    )


def _check_memory(request: Request, needed: int) -> None:
    room = request.memory_room
    if needed > room:
        raise RequestError(
            "too little memory for this model",
            expected=f"{size_text(needed)} beside the margin",
            found=size_text(room),
            hint=f"{size_text(needed - room)} are missing; `engine=pack` reads experts from the "
            "drive when they are needed",
        )
