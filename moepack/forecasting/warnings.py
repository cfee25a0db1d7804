"""Where forecasts break: what no sum of bytes over bandwidths sees."""

from collections.abc import Iterator

from moepack.forecasting.misses import Misses
from moepack.forecasting.reads import STREAMS
from moepack.forecasting.ways import Model, Needs, Way
from moepack.machine.model import Machine
from moepack.sizes import size_text

_NEARLY = 0.9
_ALIKE = 0.1


def warnings_of(
    model: Model, machine: Machine, way: Way, needs: Needs, misses: Misses | None
) -> Iterator[str]:
    """Yield what a reader of a forecast has to know."""
    yield from _of_room(model, machine, way, needs)
    yield from _of_gpus(machine, needs)
    if misses is not None:
        yield from _of_misses(model, way, misses)
        yield from _of_drive(machine)


def _of_room(model: Model, machine: Machine, way: Way, needs: Needs) -> Iterator[str]:
    vram = sum(int(gpu.memory.value) for gpu in machine.gpus)
    if needs.vram and needs.vram > vram:
        fitting = (way for way in model.offloads() if model.needs(way).fit(machine))
        first = next(fitting, None)
        least = (
            f"; `cpu_layer_count={first.cpu_layer_count}` is the least that fits" if first else ""
        )
        yield (
            f"takes {size_text(needs.vram)} of {size_text(vram)} of VRAM: where a driver then uses "
            f"memory instead, speed falls to a fraction{least}"
        )
    memory = int(machine.memory.value)
    if needs.memory is None:
        return
    # A file that is mapped needs more room than itself; a cache takes what it was given.
    is_stream = way.kind in STREAMS
    is_short = needs.fit(machine) is False if is_stream else needs.memory > _NEARLY * memory
    if is_short:
        fate = "pages of the file will have to be read again and again"
        if is_stream:
            fate = "it is swapped out, or killed"
        yield (
            f"takes {size_text(needs.memory)} of {size_text(memory)} of memory: {fate}, which no "
            "forecast sees"
        )


def _of_gpus(machine: Machine, needs: Needs) -> Iterator[str]:
    slowest, fastest = machine.vram_bandwidth, machine.highest_vram_bandwidth
    if needs.vram and slowest and fastest and slowest.value < fastest.value:
        yield (
            "all VRAM is taken to be as slow as that of the slowest GPU, and for the ceiling as "
            "fast as that of the fastest: it is faster the more lies in the fastest"
        )


def _of_misses(model: Model, way: Way, misses: Misses) -> Iterator[str]:
    if way.budget is not None and way.budget < (model.step_length or 0):
        yield (
            f"the budget is less than the {size_text(model.step_length or 0)} that a token uses: "
            "LRU finds little there"
        )
    if misses.source == "working set":
        yield (
            "the formula of U and D says up to 1.1 times too little where U has room, up to 2 "
            "times with half of it, and knows no cliff below what a token uses: a trace is exact"
        )
    if misses.source == "even router":
        yield (
            "without a trace an even router is assumed; real ones come back to some experts more "
            "often, and miss less: the upper end of the range is for a tenth of these misses"
        )
    step = model.step_length
    if step and misses.step_length and abs(misses.step_length / step - 1) > _ALIKE:
        yield (
            f"a token of the trace uses {100 * misses.step_length / step:.0f} % of the experts "
            "that one of this model does, with fewer a token or in fewer layers: "
            "it misses as little"
        )
    if misses.is_short:
        yield "the trace is too short to tell experts apart: other texts may miss 30 % more or less"


def _of_drive(machine: Machine) -> Iterator[str]:
    unsteady = machine.drive.unsteady if machine.drive else []
    if unsteady:
        yield (
            f"the drive was up to {max(unsteady):.1f} times as fast in one moment as in another: "
            "it is shared, or throttled"
        )
