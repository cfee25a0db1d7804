"""Placements for llama.cpp and its descendants: whole layers, or tensors by a pattern."""

from __future__ import annotations

from collections.abc import Iterator

from moepack.common.errors import RequestError
from moepack.common.escaping import shell_words
from moepack.common.sizes import size_text
from moepack.planning.placing.facts import OptionFacts, PlacementFacts
from moepack.planning.placing.offload import Offload, filled, missing_length, offload, pattern
from moepack.planning.placing.placement import placement
from moepack.planning.placing.request import PlacementRequest

LLAMA, IK_LLAMA = "llama.cpp", "ik_llama.cpp"

_LESS = "a shorter `context`, or other `cache_types`, take less"
_DRIVE = "`engine=pack` reads experts from the drive when they are needed"
_BATCH, _MICRO_BATCH = 2048, 512
"""llama-server's defaults of `-b` and `-ub`."""
_LEAST_GAIN = 0.01
"""The share of experts that a pattern has to bring into VRAM to be worth its length."""


def place_stock(request: PlacementRequest) -> PlacementFacts:
    """Place a model for a stock engine. Raises RequestError for too little VRAM or memory."""
    placed = offload(request)
    if placed is None:
        return _in_memory(request)
    length = placed.memory_length
    _check_memory(request, request.embedding_length + length)
    command = _command(request, "-ngl", "999", *layer_words(placed))
    option = request.option(command, placed.cpu_layer_count, length)
    return placement(request, placed, option, list(_alternatives(request, placed)))


def layer_words(placed: Offload) -> list[str]:
    """Return the options for the layers of each GPU, and for experts in memory."""
    count = placed.cpu_layer_count
    return [*_split(placed), *(["--n-cpu-moe", str(count)] if count else [])]


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
    _check_memory(request, needed)
    command = _command(request, *(["-ngl", "0"] if capacities else []))
    option = request.option(command, None, request.expert_length)
    return placement(request, None, option, notes=notes)


def _alternatives(request: PlacementRequest, placed: Offload) -> Iterator[OptionFacts]:
    """Yield an option with more experts in VRAM, and one that caches them there."""
    in_memory = filled(request, placed)
    length = sum(tensor.length for tensor in in_memory)
    if placed.memory_length - length >= _LEAST_GAIN * request.expert_length:
        words = ["-ot", pattern(in_memory)] if in_memory else []
        command = _command(request, "-ngl", "999", *_split(placed), *words)
        yield request.option(command, None, length)
    # The latest experts in VRAM, with all of them in memory.
    length = cache_length(request, placed)
    needed = request.embedding_length + request.expert_length
    if length and request.engine == LLAMA and needed <= request.memory_capacity:
        command = _command(request, "-ngl", "999", *cache_words(length))
        yield cached_option(request, command, length, request.expert_length)


def cache_length(request: PlacementRequest, placed: Offload) -> int:
    """Return the bytes for a cache of experts in VRAM, in whole MiB; 0 if it cannot have one."""
    capacities, staged_length = request.gpu_capacities, request.weights.staged_length
    if not placed.cpu_layer_count or len(capacities) != 1:
        return 0
    working = request.fixed_length + request.compute_length + staged_length
    return max(0, capacities[0] - working) >> 20 << 20


def cache_words(length: int) -> list[str]:
    """Return the options of llama.cpp for a cache of experts in VRAM."""
    return ["--cpu-moe", "--moe-cache-mib", str(length >> 20)]


def cached_option(
    request: PlacementRequest, command: str, length: int, memory_length: int
) -> OptionFacts:
    """Return the option with a cache in VRAM, and so many bytes of experts in memory."""
    streamed_length = request.expert_length - memory_length
    count = request.layers[-1].layer + 1
    return request.option(command, count, memory_length, streamed_length, length)


def _split(placed: Offload) -> list[str]:
    """Return the option that deals layers out to several GPUs."""
    counts = placed.layer_counts
    return ["-ts", ",".join(map(str, counts))] if len(counts) > 1 else []


def _command(request: PlacementRequest, *words: str) -> str:
    server = ["llama-server", "-m", request.footprint.path, *words, *context_words(request)]
    return shell_words(server)


def context_words(request: PlacementRequest) -> list[str]:
    """Return the options for the length of a context, its types, and micro-batches."""
    options, batch = request.options, request.options.batch_count
    words = ["-c", str(request.context)]
    if (options.type_k, options.type_v) != ("f16", "f16"):
        words += ["-ctk", options.type_k, "-ctv", options.type_v]
    words += ["-b", str(batch)] if batch > _BATCH else []
    return words if batch == _MICRO_BATCH else [*words, "-ub", str(batch)]


def _check_memory(request: PlacementRequest, needed: int) -> None:
    capacity = request.memory_capacity
    if needed > capacity:
        raise RequestError(
            "too little memory for this model",
            expected=f"{size_text(needed)} beside the margin",
            found=size_text(capacity),
            hint=f"{size_text(needed - capacity)} are missing; {_DRIVE}",
        )
