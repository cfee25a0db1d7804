"""The speed of a model on this machine, its limits, and the changes that would help most."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from moepack.common.errors import RequestError
from moepack.common.paths import PathOrPaths
from moepack.planning.footprint.model import Footprint, footprint_of
from moepack.planning.forecasting.facts import ForecastFacts, SpeedFacts
from moepack.planning.forecasting.forecast import forecast
from moepack.planning.forecasting.modes import MARGIN, MICRO_BATCHES
from moepack.planning.machine.model import Figure, Machine

ANSWER_TOKENS = 200
"""Length of an answer: changes are ranked by the time of a prompt and an answer."""
_LEAST_GAIN = 0.02
_TWICE = 2.0


@dataclass(frozen=True, slots=True)
class Change:
    """A change of the machine, and the speeds after it.

    `seconds` are those of a prompt and ANSWER_TOKENS tokens.
    """

    what: str
    tokens_per_second: float
    prompt_seconds: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Prognosis:
    """The forecast of a model, and its limits: `drive`, `memory`, `processor` or `GPU`.

    `seconds` are those of a prompt and ANSWER_TOKENS tokens of an answer; `changes` would help, the
    best first. `refusal` says why it does not run here. None if unknown.
    """

    forecast: ForecastFacts | None
    decode_limit: str | None
    prompt_limit: str | None
    seconds: float | None
    changes: tuple[Change, ...]
    refusal: str | None = None
    refusal_hint: str | None = None


_LIMITS = {
    "drive": "drive",
    "memory": "memory",
    "layers": "processor",
    "computing": "processor",
    "vram": "GPU",
    "link": "GPU",
}


def prognosis(
    paths: PathOrPaths,
    machine: Machine,
    available: int,
    prompt: int,
    *,
    is_slow_build: bool = False,
) -> Prognosis:
    """Forecast a model with `available` bytes of memory, as `run` has it.

    `is_slow_build` is whether llama.cpp was not built for this processor. Raises what opening the
    model raises.
    """
    now = machine._replace(gpus=(), memory=Figure(available + MARGIN, "read"))
    footprint = footprint_of(paths)
    try:
        facts = _forecast(footprint, now, prompt)
    except RequestError as error:
        return Prognosis(None, None, None, None, (), str(error), error.hint)
    (speed,) = facts.forecasts
    seconds = _seconds(speed)
    changes = []
    for what, other in _changed_machines(now, is_slow_build=is_slow_build):
        (changed,) = _forecast(footprint, other, prompt).forecasts
        takes = _seconds(changed)
        if seconds and takes and takes < (1 - _LEAST_GAIN) * seconds:
            assert changed.tokens_per_second is not None
            assert changed.prompt.seconds is not None
            changes.append(Change(what, changed.tokens_per_second, changed.prompt.seconds, takes))
    return Prognosis(
        forecast=facts,
        decode_limit=_LIMITS.get(speed.binding or ""),
        prompt_limit=_LIMITS.get(speed.prompt.binding or ""),
        seconds=seconds,
        changes=tuple(sorted(changes, key=lambda change: change.seconds)),
    )


def _forecast(footprint: Footprint, machine: Machine, prompt: int) -> ForecastFacts:
    facts = forecast(footprint, machine, dense_in_memory=True, prompt=prompt)
    if facts.forecasts[0].budget_length is not None:
        return facts
    # `run` computes prompts in such micro-batches wherever the experts lie, llama.cpp does not.
    batch = MICRO_BATCHES["stream"]
    return forecast(footprint, machine, dense_in_memory=True, prompt=prompt, micro_batch=batch)


def _seconds(speed: SpeedFacts) -> float | None:
    if speed.tokens_per_second is None or speed.prompt.seconds is None:
        return None
    return speed.prompt.seconds + ANSWER_TOKENS / speed.tokens_per_second


def _changed_machines(machine: Machine, *, is_slow_build: bool) -> Iterator[tuple[str, Machine]]:
    """Yield machines that differ in one thing, each with its change in words."""
    if machine.drive is not None:
        bandwidth, reads = machine.drive.bandwidth, machine.drive.reads
        drive = machine.drive._replace(
            bandwidth=bandwidth and _times(bandwidth),
            reads=tuple(read._replace(bandwidth=_times(read.bandwidth)) for read in reads),
        )
        yield "a drive twice as fast, or a second one", machine._replace(drive=drive)
    memory = Figure(_TWICE * machine.memory.value, "typed")
    yield "twice as much free memory", machine._replace(memory=memory)
    if machine.memory_bandwidth is not None:
        bandwidth = _times(machine.memory_bandwidth)
        compute = machine.compute and _times(machine.compute)
        faster = machine._replace(memory_bandwidth=bandwidth, compute=compute)
        yield "processors and memory twice as fast", faster
    if is_slow_build and machine.compute is not None:
        faster = machine._replace(compute=_times(machine.compute))
        yield "a build of llama.cpp for this processor", faster


def _times(figure: Figure) -> Figure:
    return Figure(_TWICE * figure.value, figure.basis)
