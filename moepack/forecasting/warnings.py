"""Where forecasts break: what no sum of bytes over bandwidths sees."""

from collections.abc import Iterator

from moepack.forecasting.misses import Misses
from moepack.forecasting.reads import STREAMS
from moepack.forecasting.ways import Model, Needs, Way
from moepack.machine.model import Machine
from moepack.sizes import size_text

_NEARLY = 0.9
_SPREAD = 1.5


def warnings_of(
    model: Model, machine: Machine, way: Way, needs: Needs, misses: Misses | None
) -> Iterator[str]:
    """Yield what a reader of a forecast has to know."""
    yield from _of_room(model, machine, way, needs)
    if misses is not None:
        yield from _of_misses(model, way, misses)
        yield from _of_drive(machine)


def _of_room(model: Model, machine: Machine, way: Way, needs: Needs) -> Iterator[str]:
    vram = sum(int(gpu.memory.value) for gpu in machine.gpus)
    if needs.vram and needs.vram > vram:
        fitting = [way.cpu_layer_count for way in model.offloads() if model.needs(way).fit(machine)]
        least = f"; --n-cpu-moe {fitting[0]} is the least that fits" if fitting else ""
        yield (
            f"takes {size_text(needs.vram)} of {size_text(vram)} of VRAM: where a driver then uses "
            f"memory instead, speed falls to a fraction{least}"
        )
    memory = int(machine.memory.value)
    # A cache is as large as it was asked to be; a file that is mapped needs more room than itself.
    most = memory if way.kind in STREAMS else _NEARLY * memory
    if needs.memory is not None and needs.memory > most:
        fate = "pages of the file will have to be read again and again"
        if way.kind in STREAMS:
            fate = "it is swapped out, or killed"
        yield (
            f"takes {size_text(needs.memory)} of {size_text(memory)} of memory: {fate}, which no "
            "forecast sees"
        )


def _of_misses(model: Model, way: Way, misses: Misses) -> Iterator[str]:
    if way.budget is not None and way.budget < (model.step_length or 0):
        yield (
            f"the budget is less than the {size_text(model.step_length or 0)} that a token uses: "
            "LRU finds little there"
        )
    if misses.source == "working set":
        yield (
            "the formula of U and D says 1.0 to 1.1 times too little where U has room, 1.2 to 2 "
            "times with half of it, and knows no cliff below what a token uses: a trace is exact"
        )
    if misses.source == "even router":
        yield (
            "without a trace an even router is assumed; real ones come back to some experts more "
            "often, and miss less"
        )


def _of_drive(machine: Machine) -> Iterator[str]:
    drive = machine.drive
    spreads = [read.bandwidth.spread or 1.0 for read in drive.reads] if drive else []
    if max(spreads, default=1.0) > _SPREAD:
        yield (
            f"the drive was up to {max(spreads):.1f} times as fast in one moment as in another: it "
            "is shared, or throttled"
        )
