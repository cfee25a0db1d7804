"""Limits of forecasts: effects that no sum of bytes over bandwidths covers."""

from collections.abc import Iterator

from moepack.common.sizes import size_text
from moepack.planning.forecasting.misses import Misses
from moepack.planning.forecasting.modes import ExecutionMode, ModelOnMachine
from moepack.planning.forecasting.reads import STREAMS

_NEARLY = 0.9
_ALIKE = 0.1


def warnings_of(model: ModelOnMachine, mode: ExecutionMode, misses: Misses | None) -> Iterator[str]:
    """Yield the warnings of a forecast."""
    machine, (vram_length, memory_length) = model.machine, model.needs(mode) or (0, 0)
    vram = sum(int(gpu.memory.value) for gpu in machine.gpus)
    if vram_length > vram:
        first = next(filter(model.fits, model.offloads()), None)
        least = (
            f"; `cpu_layer_count={first.cpu_layer_count}` is the least that fits" if first else ""
        )
        yield (
            f"takes {size_text(vram_length)} of {size_text(vram)} of VRAM: where a driver then "
            f"uses memory instead, speed falls to a fraction{least}"
        )
    memory = int(machine.memory.value)
    # A mapped file needs more memory than its length; a cache takes just its budget.
    is_stream = mode.kind in STREAMS
    if model.fits(mode) is False if is_stream else memory_length > _NEARLY * memory:
        fate = "it is swapped out, or killed"
        if not is_stream:
            fate = "pages of the file will have to be read repeatedly"
        yield (
            f"takes {size_text(memory_length)} of {size_text(memory)} of memory: {fate}, which no "
            "forecast sees"
        )
    slowest, fastest = machine.vram_bandwidth, machine.highest_vram_bandwidth
    if vram_length and slowest and fastest and slowest.value < fastest.value:
        yield (
            "all VRAM is taken to be as slow as that of the slowest GPU, and for the ceiling as "
            "fast as that of the fastest: it is faster the more lies in the fastest"
        )
    if misses is not None:
        yield from _of_misses(model, mode, misses)
        unsteady = machine.drive.unsteady if machine.drive else []
        if unsteady:
            yield (
                f"the drive was up to {max(unsteady):.1f} times as fast in one moment as in "
                "another: it is shared, or throttled"
            )


def _of_misses(model: ModelOnMachine, mode: ExecutionMode, misses: Misses) -> Iterator[str]:
    step = model.step_length
    if mode.budget is not None and mode.budget < (step or 0):
        yield (
            f"the budget is less than the {size_text(step or 0)} that a token uses: "
            "LRU finds little there"
        )
    if misses.source == "working set":
        yield (
            "the formula of U and D says up to 1.1 times too little if U fits, up to 2 times with "
            "half of it, and ignores the cliff below one token's experts: a trace is exact"
        )
    if misses.source == "even router":
        yield (
            "without a trace a uniform router is assumed; real ones come back to some experts more "
            "often, and miss less: the upper end of the range is for a tenth of these misses"
        )
    if step and misses.step_length and abs(misses.step_length / step - 1) > _ALIKE:
        yield (
            f"a token of the trace uses {100 * misses.step_length / step:.0f} % of the experts "
            "that one of this model does, with fewer a token or in fewer layers: "
            "it misses as little"
        )
    if misses.is_short:
        yield "the trace is too short to tell experts apart: other texts may miss 30 % more or less"
