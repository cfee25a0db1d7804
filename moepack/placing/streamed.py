"""Placements for `moepack run`: as many experts in memory as fit, the others from the drive."""

from __future__ import annotations

from collections.abc import Sequence

from moepack.errors import RequestError
from moepack.escaping import shell_words
from moepack.placing.facts import OptionFacts, PinFacts
from moepack.placing.pins import pins_by_hotness, pins_by_trace
from moepack.placing.request import Request
from moepack.sizes import size_text

PACK = "pack"


def expert_budget(request: Request) -> int:
    """Return the bytes for experts in memory. Raises RequestError below the floor."""
    load, room = request.load, request.memory_room
    budget = room - request.working_length
    if budget < load.step_length:
        floor = request.working_length + load.step_length
        raise RequestError(
            "too little memory for this model",
            expected=f"{size_text(floor)} beside the margin ({size_text(load.step_length)} of them "
            "experts of one token)",
            found=size_text(room),
            hint=f"{size_text(floor - room)} are missing; a shorter --context takes less",
        )
    return min(budget, load.expert_length)


def pins(
    request: Request, budget: int, hotness: str | None, traces: Sequence[str]
) -> PinFacts | None:
    """Judge whether to pin experts; None where nothing says it, or all are in memory."""
    if budget == request.load.expert_length:
        return None
    shape, room = request.load.weights.shape.without_mtp(), budget - request.load.step_length
    if traces:
        return pins_by_trace(traces, shape, budget, room)
    return None if hotness is None else pins_by_hotness(hotness, shape, budget, room)


def run_option(request: Request, budget: int, pinned: PinFacts | None) -> OptionFacts:
    """Return the command line.

    Where all experts are in memory it names no size: in whole pages they take more than they
    have bytes.
    """
    load = request.load
    words = ["moepack", "run", load.path, "--context", str(request.context)]
    if budget < load.expert_length:
        words += ["--memory", f"{budget >> 20}MiB"]
    if pinned is not None and pinned.pin_length >> 20:
        words += ["--pin", f"{pinned.pin_length >> 20}MiB"]
    return OptionFacts(shell_words(words), None, 0, budget, load.expert_length - budget)
