"""Placements for `moepack run`: as many experts in memory as fit, the others from the drive.

With a GPU there are three tiers: experts that llama.cpp keeps in VRAM for good are not kept in
memory too, so that all of memory is for the other layers.
"""

from __future__ import annotations

from collections.abc import Sequence

from moepack.common.errors import RequestError
from moepack.common.escaping import shell_words
from moepack.common.sizes import size_text
from moepack.planning.placing.facts import OptionFacts, PinFacts, PlacementFacts
from moepack.planning.placing.offload import Offload, missing_length, offload
from moepack.planning.placing.pins import pins_by_hotness, pins_by_trace
from moepack.planning.placing.placement import placement
from moepack.planning.placing.request import PlacementRequest
from moepack.planning.placing.stock import (
    cache_length,
    cache_words,
    cached_option,
    context_words,
    layer_words,
)
from moepack.traces.analysis.concentration import Concentration
from moepack.traces.hotness.model import Hotness
from moepack.traces.spool import SpooledTrace

PACK = "pack"

_BUILD = (
    "llama-server has to be a build of llama.cpp for this GPU (docs/engines.md); the one that "
    "comes with moepack computes on processors"
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
    budget = _budget(request, working, kept)
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
        command = _command(request, memory, layer_words(placed))
        option = request.option(command, end, budget, kept - budget)
        return placement(request, placed, option, _alternatives(request, placed), [_BUILD], pins)
    words = ["moepack", "run", request.footprint.path, "--context", str(request.context), *memory]
    command = shell_words([*words, "-ub", str(request.options.batch_count)])
    option = request.option(command, None, budget, kept - budget)
    unused = []
    if request.gpu_capacities:
        missing = size_text(missing_length(request))
        unused.append(f"no GPU is used: VRAM lacks {missing} for dense weights and context")
    return placement(request, None, option, notes=unused, pins=pins)


def _budget(request: PlacementRequest, working_length: int, most: int) -> int:
    """Return the bytes for experts in memory beside `working_length`, up to `most`.

    Raises RequestError below the floor, which is `most` if there are fewer experts.
    """
    capacity = request.memory_capacity
    budget = capacity - working_length
    least = min(most, request.floor)
    if budget < least:
        floor = working_length + least
        raise RequestError(
            "too little memory for this model",
            expected=f"{size_text(floor)} beside the margin ({size_text(least)} of them experts "
            "of one token, or of one layer for prompts)",
            found=size_text(capacity),
            hint=f"{size_text(floor - capacity)} are missing; a shorter `context` takes less",
        )
    return min(most, budget)


def _alternatives(request: PlacementRequest, placed: Offload) -> list[OptionFacts]:
    """Return the option with a cache in VRAM instead of whole layers, if it fits."""
    length = cache_length(request, placed)
    budget = min(request.expert_length, request.memory_capacity - request.embedding_length)
    if not length or budget < request.floor:
        return []
    memory = _memory_words(budget, request.expert_length, None)
    command = _command(request, memory, cache_words(length))
    return [cached_option(request, command, length, budget)]


def _command(request: PlacementRequest, memory: Sequence[str], words: Sequence[str]) -> str:
    """Return a command that streams experts to the user's own llama-server."""
    run = ["moepack", "run", request.footprint.path, *memory]
    server = ["llama-server", "-m", "{}", "-ngl", "999", *words, *context_words(request)]
    return shell_words([*run, "--", *server])


def _memory_words(budget: int, kept: int, pins: PinFacts | None) -> list[str]:
    """Return the options for the memory of experts.

    If all of them are in memory they name no size: in whole pages experts take more than their
    bytes.
    """
    words = ["--memory", f"{budget >> 20}MiB"] if budget < kept else []
    if pins is not None and pins.pin_length >> 20:
        words += ["--pin", f"{pins.pin_length >> 20}MiB"]
    return words
