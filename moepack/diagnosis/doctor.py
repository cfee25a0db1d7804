"""All checks of a machine at once, and what they mean for a model."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from moepack.bench.machine import measure_machine
from moepack.bench.model_reads import find_reads
from moepack.diagnosis import drive, memory, options, processor, system
from moepack.diagnosis.finding import Finding
from moepack.diagnosis.prognosis import Prognosis, prognosis
from moepack.errors import write_failure
from moepack.footprint.weights import weights_of
from moepack.machine.memory_limits import available_memory
from moepack.machine.model import Machine
from moepack.machine.processors import cpu_quota
from moepack.paths import AnyPath, PathOrPaths, listed

SECONDS = 20.0
_TRIAL_LENGTH = 1 << 16


@dataclass(frozen=True, slots=True)
class DoctorFacts:
    """What limits this machine: `findings`, the `machine` that was measured, and `notes` of that.

    `model` is the path of one that was named, `prognosis` what it would do; both None without.
    """

    findings: tuple[Finding, ...]
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
    """Look for what limits this machine, and a model on it.

    Drive, memory and processors are measured for so many `seconds`, as `measure_machine` does; a
    prompt of `prompt` tokens is forecast. `progress` is called with the milliseconds since the last
    call, and those in all. Raises what `measure_machine` and opening the model raise.
    """
    available = available_memory()
    findings = [memory.check_free_memory(), memory.check_pressure()]
    load = os.getloadavg()[0]  # before measuring keeps processors busy
    measured = measure_machine(model, directory=directory, seconds=seconds, progress=progress)
    build = processor.check_build()
    findings += [
        processor.check_processors(measured.machine.compute, load, cpu_quota()),
        memory.check_bandwidth(measured.machine.memory_bandwidth),
        build,
        options.check_variables(os.environ),
        processor.check_gpus(measured.machine.gpus, measured.notes),
        drive.check_drive(measured.machine.drive, measured.notes),
    ]
    if model is None:
        path, shard_count, expert_count = Path(directory or "."), 0, None
    else:
        files = find_reads(model).files
        path, shard_count = files[0][0], len(files)
        expert_count = weights_of(model).shape.without_mtp().routed_count
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
        None if model is None else os.fspath(listed(model)[0]),
        outlook,
    )


def _check_reading(path: Path) -> list[Finding]:
    """Check how a file is read, or one in a folder, which is written for that and removed."""
    if path.is_file():
        return system.check_reading(path)
    try:
        with tempfile.NamedTemporaryFile(dir=path, prefix="moepack-scratch-") as file:
            file.write(os.urandom(_TRIAL_LENGTH))
            file.flush()
            return system.check_reading(Path(file.name))
    except OSError as error:
        raise write_failure(error, path) from None
