"""The command `doctor`: all checks of a machine, and a prognosis for a model."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from moepack.bench.diagnosis import hardware, system
from moepack.bench.diagnosis.prognosis import Prognosis, prognosis
from moepack.bench.diagnosis.system import CheckResult
from moepack.bench.drive import temporary_path
from moepack.bench.machine import find_reads, measure_machine
from moepack.common.errors import write_failure
from moepack.common.paths import AnyPath, PathOrPaths, path_list
from moepack.host.memory_limits import available_memory
from moepack.host.processors import OtherWork, cpu_quota
from moepack.planning.machine.model import Machine
from moepack.traces.formats.reading import shape_of

SECONDS = 20.0
_TRIAL_LENGTH = 1 << 16
_SECONDS_OF_OTHERS = 0.5


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
    directory: AnyPath | None = None,
    seconds: float = SECONDS,
    prompt: int = 1000,
    progress: Callable[[int, int], None] | None = None,
) -> DoctorFacts:
    """Look for limits of this machine, and of a model on it.

    Drive, memory and processors are measured for `seconds`, as by `measure_machine`; a prompt of
    `prompt` tokens is forecast. `progress` is called with the milliseconds since the last call, and
    those in all. Raises what `measure_machine` and opening the model raise.
    """
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
        files, _ = find_reads(model)
        path, shard_count = files[0][0], len(files)
        expert_count = shape_of(model).without_mtp().routed_count
    findings.append(system.check_file_system(path))
    findings += _check_reading(path)
    findings += [
        system.check_faults(),
        system.check_huge_pages(),
        system.check_mappings(expert_count),
        system.check_open_files(shard_count),
        system.check_locked_memory(),
    ]
    outlook = None
    if model is not None:
        is_slow = build.verdict == "limit"
        outlook = prognosis(model, measured.machine, available, prompt, is_slow_build=is_slow)
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
