"""Placements for `moepack run`: as many experts in memory as fit, the others from the drive.

With a GPU there are three tiers: what llama.cpp holds in VRAM for good is not kept in memory too,
so that all of that is for the other layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from moepack.errors import RequestError
from moepack.escaping import shell_words
from moepack.placing.facts import OptionFacts, PinFacts
from moepack.placing.offload import Offload, missing_length, offload
from moepack.placing.pins import pins_by_hotness, pins_by_trace
from moepack.placing.request import Placement, Request
from moepack.placing.stock import (
    cache_room,
    context_words,
    gpu_devices,
    layer_words,
    notes_of_order,
    unused_gpus,
)
from moepack.sizes import size_text

PACK = "pack"

_BUILD = (
    "llama-server has to be a build of llama.cpp for this GPU (docs/engines.md); the one that "
    "comes with moepack computes on processors"
)


def place_streamed(request: Request, hotness: str | None, traces: Sequence[str]) -> Placement:
    """Place a model for `moepack run`, whose experts come from the drive as they are needed.

    Raises RequestError below the floor, and what reading hotness and traces raises.
    """
    placed = offload(request.load, request.rooms) if request.machine.gpus else None
    if placed is None:
        return _without_gpu(request, hotness, traces)
    kept = placed.memory_length
    budget = min(kept, _checked(request, request.load.embedding_length, kept))
    layers = [layer.layer for layer in request.load.layers if layer.layer < placed.cpu_layer_count]
    pinned = _pins(request, budget, kept, layers, hotness, traces)
    words = layer_words(placed)
    return Placement(
        tuple(gpu_devices(request, placed, budget)),
        _option(request, placed, words, budget, pinned),
        tuple(_alternatives(request, placed)),
        (_BUILD, *notes_of_order(request)),
        pinned,
    )


def _without_gpu(request: Request, hotness: str | None, traces: Sequence[str]) -> Placement:
    """Place all that is no expert's in memory."""
    load = request.load
    budget = min(load.expert_length, _checked(request, request.working_length, load.expert_length))
    layers = [layer.layer for layer in load.layers]
    pinned = _pins(request, budget, load.expert_length, layers, hotness, traces)
    notes = []
    if request.machine.gpus:
        missing = size_text(missing_length(load, request.rooms))
        notes.append(f"no GPU is used: VRAM lacks {missing} for dense weights and context")
    return Placement(
        (*unused_gpus(request), request.memory_device(budget)),
        _processor_option(request, budget, pinned),
        notes=tuple(notes),
        pins=pinned,
    )


def _checked(request: Request, working_length: int, most: int) -> int:
    """Return the bytes for experts in memory beside what works there.

    Raises RequestError below the floor; where there are fewer experts than that, `most` is it.
    """
    load, room = request.load, request.memory_room
    budget = room - working_length
    least = min(most, load.floor)
    if budget < least:
        floor = working_length + least
        raise RequestError(
            "too little memory for this model",
            expected=f"{size_text(floor)} beside the margin ({size_text(least)} of them experts "
            "of one token, or of one layer for prompts)",
            found=size_text(room),
            hint=f"{size_text(floor - room)} are missing; a shorter `context` takes less",
        )
    return budget


def _pins(
    request: Request,
    budget: int,
    kept: int,
    layers: Sequence[int],
    hotness: str | None,
    traces: Sequence[str],
) -> PinFacts | None:
    """Judge whether to pin experts; None where nothing says it, or all are in memory.

    Experts of layers that are in VRAM are left out.
    """
    if budget == kept:
        return None
    shape, room = request.load.weights.shape.without_mtp(), budget - request.load.floor
    if traces:
        return pins_by_trace(traces, shape, budget, room, layers)
    return None if hotness is None else pins_by_hotness(hotness, shape, budget, room, layers)


def _alternatives(request: Request, placed: Offload) -> Iterator[OptionFacts]:
    """Yield a cache in VRAM instead of whole layers."""
    load = request.load
    room = cache_room(request)
    budget = min(load.expert_length, request.memory_room - load.embedding_length)
    if placed.cpu_layer_count and room > 0 and len(request.rooms) == 1 and budget >= load.floor:
        words = ["--cpu-moe", "--moe-cache-mib", str(room >> 20)]
        command = _command(request, budget, load.expert_length, None, words)
        yield OptionFacts(
            command,
            load.layers[-1].layer + 1,
            *(room >> 20 << 20, budget, load.expert_length - budget, load.micro_batch),
            vram_cache_length=room >> 20 << 20,
        )


def _option(
    request: Request,
    placed: Offload,
    words: Sequence[str],
    budget: int,
    pinned: PinFacts | None,
) -> OptionFacts:
    load, kept = request.load, placed.memory_length
    return OptionFacts(
        _command(request, budget, kept, pinned, words),
        placed.cpu_layer_count,
        *(load.expert_length - kept, budget, kept - budget, load.micro_batch),
    )


def _command(
    request: Request,
    budget: int,
    kept: int,
    pinned: PinFacts | None,
    words: Sequence[str],
) -> str:
    """Return a command that brings experts to the user's own llama-server."""
    run = ["moepack", "run", request.load.path, *_memory_words(budget, kept, pinned)]
    server = ["llama-server", "-m", "{}", "-ngl", "999", *words, *context_words(request)]
    return shell_words([*run, "--", *server])


def _processor_option(request: Request, budget: int, pinned: PinFacts | None) -> OptionFacts:
    """Return the command for processors alone."""
    load = request.load
    words = ["moepack", "run", load.path, "--context", str(request.context)]
    words += _memory_words(budget, load.expert_length, pinned)
    words += ["-ub", str(load.micro_batch)]
    streamed = load.expert_length - budget
    return OptionFacts(shell_words(words), None, 0, budget, streamed, load.micro_batch)


def _memory_words(budget: int, kept: int, pinned: PinFacts | None) -> list[str]:
    """Return how to say how much memory experts have.

    Where all of them are in memory it names no size: in whole pages they take more than they have
    bytes.
    """
    words = ["--memory", f"{budget >> 20}MiB"] if budget < kept else []
    if pinned is not None and pinned.pin_length >> 20:
        words += ["--pin", f"{pinned.pin_length >> 20}MiB"]
    return words
