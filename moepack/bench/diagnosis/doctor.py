"""The command `doctor`: all checks of a machine, and a prognosis for a model."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from moepack.bench.diagnosis import hardware, system
from moepack.bench.diagnosis.system import CheckResult
from moepack.bench.drive import temporary_path
from moepack.bench.machine import find_files, measure_machine
from moepack.common.errors import RequestError, write_failure
from moepack.common.paths import AnyPath, PathOrPaths, path_list
from moepack.common.sizes import size_text, speed_text
from moepack.host.memory_limits import available_memory
from moepack.host.processors import OtherWork, cpu_quota
from moepack.planning.footprint.model import Footprint, footprint_of
from moepack.planning.forecasting.facts import ForecastFacts, SpeedFacts
from moepack.planning.forecasting.forecast import forecast
from moepack.planning.forecasting.modes import MARGIN, MICRO_BATCHES
from moepack.planning.machine.described import AnyMachine, describe_machine, find_machine
from moepack.planning.machine.model import Figure, Machine
from moepack.traces.formats.reading import shape_of

SECONDS = 20.0
_TRIAL_LENGTH = 1 << 16
_SECONDS_OF_OTHERS = 0.5
ANSWER_TOKENS = 200
"""Length of an answer: changes are ranked by the time of a prompt and an answer."""
_LEAST_GAIN = 0.02
_TYPICAL_READ = 4 << 20
"""Bytes of an expert, for the speed of a drive whose reads were measured."""
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


@dataclass(frozen=True, slots=True)
class DoctorFacts:
    """The checks of a machine, the `machine` that was measured, and `notes` on measuring it.

    `model` is its path, `prognosis` its speed here; both None without a model.
    """

    findings: tuple[CheckResult, ...]
    machine: Machine
    notes: tuple[str, ...]
    model: str | None
    prognosis: Prognosis | None


def doctor(
    model: PathOrPaths | None = None,
    *,
    machine: AnyMachine | None = None,
    directory: AnyPath | None = None,
    seconds: float = SECONDS,
    prompt: int = 1000,
    progress: Callable[[int, int], None] | None = None,
) -> DoctorFacts:
    """Look for limits of this machine, and of a model on it.

    Drive, memory and processors are measured for `seconds`, as by `measure_machine`; a prompt of
    `prompt` tokens is forecast. `progress` is called with the milliseconds since the last call, and
    those in all. With a `machine`, its file or `preset:NAME`, nothing is measured: it is of that
    one, with its GPUs. Raises what `measure_machine` and opening the model raise, and RequestError
    for a machine without a model.
    """
    if machine is not None:
        return _elsewhere(model, find_machine(machine), prompt)
    available = available_memory()
    findings = [hardware.check_free_memory(), hardware.check_pressure()]
    # Before measuring keeps processors busy. The load average counts threads that wait for drives.
    work = OtherWork()
    time.sleep(_SECONDS_OF_OTHERS)
    busy = work.processor_count(0.0)
    measured = measure_machine(model, directory=directory, seconds=seconds, progress=progress)
    drive_note = measured.notes[0] if measured.machine.drive is None else None
    gpu_note = None if measured.machine.gpus else measured.notes[-1]
    build = hardware.check_build()
    findings += [
        hardware.check_processors(measured.machine.compute, busy, cpu_quota()),
        hardware.check_bandwidth(measured.machine.memory_bandwidth),
        build,
        hardware.check_variables(os.environ),
        hardware.check_gpus(measured.machine.gpus, gpu_note),
        hardware.check_drive(measured.machine.drive, drive_note),
    ]
    if model is None:
        path, shard_count, expert_count = Path(directory or "."), 0, None
    else:
        files = find_files(model)
        path, shard_count = files[0][0], len(files)
        expert_count = shape_of(model).without_mtp().routed_count
    findings.append(system.check_file_system(path))
    findings += _check_reading(path)
    findings += [
        system.check_huge_pages(),
        system.check_mappings(expert_count),
        system.check_open_files(shard_count),
    ]
    outlook = None
    if model is not None:
        is_slow = build.verdict == "limit"
        here = measured.machine._replace(gpus=(), memory=Figure(available + MARGIN, "read"))
        outlook = prognosis(model, here, prompt, is_slow_build=is_slow)
    return DoctorFacts(
        tuple(findings),
        measured.machine,
        measured.notes,
        None if model is None else os.fspath(path_list(model)[0]),
        outlook,
    )


def _check_reading(path: Path) -> list[CheckResult]:
    """Check the ways to read a file, or one that is written into a folder and removed."""
    if path.is_file():
        return system.check_reading(path)
    try:
        with temporary_path(path) as file:
            file.write_bytes(os.urandom(_TRIAL_LENGTH))
            return system.check_reading(file)
    except OSError as error:
        raise write_failure(error, path) from None


def _elsewhere(model: PathOrPaths | None, machine: Machine, prompt: int) -> DoctorFacts:
    """Return the figures of a machine as checks, and the prognosis for a model on it."""
    if model is None:
        raise RequestError("another machine needs a model", argument="machine")
    drive = machine.drive and machine.drive.step(_TYPICAL_READ).bandwidth
    speeds = {"memory bandwidth": machine.memory_bandwidth, "drive": drive}
    findings = [CheckResult("memory", size_text(int(machine.memory.value)), "fine")]
    findings += [
        CheckResult(name, figure and speed_text(figure.value), "fine" if figure else "unknown")
        for name, figure in speeds.items()
    ]
    if machine.gpus:
        findings.append(replace(hardware.check_gpus(machine.gpus, None), hint=None))
    outlook = prognosis(model, machine, prompt)
    return DoctorFacts(tuple(findings), machine, (), os.fspath(path_list(model)[0]), outlook)


def prognosis(
    paths: PathOrPaths, machine: Machine, prompt: int, *, is_slow_build: bool = False
) -> Prognosis:
    """Forecast a model: with the GPUs of a machine, or as `run` has it on one without.

    `is_slow_build` is whether llama.cpp was not built for this processor. Raises what opening the
    model raises.
    """
    now, footprint = machine, footprint_of(paths)
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
    if machine.gpus:
        return forecast(footprint, machine, prompt=prompt)
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
    more = describe_machine(machine, memory=round(_TWICE * machine.memory.value))
    yield "twice as much free memory", more
    gpus = machine.gpus
    faster_gpus = tuple(
        gpu._replace(
            bandwidth=gpu.bandwidth and _times(gpu.bandwidth),
            compute=gpu.compute and _times(gpu.compute),
        )
        for gpu in gpus
    )
    if machine.memory_bandwidth is not None:
        bandwidth = _times(machine.memory_bandwidth)
        compute = machine.compute and _times(machine.compute)
        faster = machine._replace(memory_bandwidth=bandwidth, compute=compute)
        if machine.is_unified:
            faster = faster._replace(gpus=faster_gpus)
        yield "processors and memory twice as fast", faster
    if gpus and not machine.is_unified:
        larger = tuple(gpu._replace(memory=_times(gpu.memory)) for gpu in gpus)
        yield "twice as much VRAM", machine._replace(gpus=larger)
        yield "GPUs twice as fast", machine._replace(gpus=faster_gpus)
    if is_slow_build and machine.compute is not None:
        faster = machine._replace(compute=_times(machine.compute))
        yield "a build of llama.cpp for this processor", faster


def _times(figure: Figure) -> Figure:
    return Figure(_TWICE * figure.value, figure.basis)
