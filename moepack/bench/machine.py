"""A machine, measured: its memory, its GPUs, and what its drive gives at the reads of a model."""

import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import NamedTuple

from moepack.bench.drive import MAX_IN_FLIGHT, Point, measure_in_rounds
from moepack.bench.meter import Meter
from moepack.bench.model_reads import ModelReads, find_reads
from moepack.bench.scratch_file import scratch_file
from moepack.bench.verdict import NO_DIRECT_READS, SMALL
from moepack.bench.ways import COLD_ENOUGH
from moepack.errors import RequestError
from moepack.machine.bandwidth import measure_bandwidth
from moepack.machine.compute import measure_compute
from moepack.machine.gpus import find_gpus
from moepack.machine.memory_limits import read_memory
from moepack.machine.model import BYTE_UNITS, STEADY, Drive, Figure, Machine, ReadSpeed, measured
from moepack.paths import AnyPath, PathOrPaths
from moepack.sizes import count_text
from moepack.storage import page_cache, probe

LENGTHS = [256 << 10, 1 << 20, 4 << 20, 16 << 20]
"""Bytes of reads, where no model says which it takes."""

DEPTHS = (1, 2, 4, 8)
SEQUENTIAL_DEPTH = 4
SCRATCH_LENGTH = 1 << 30
ROUNDS = 5
MEMORY_SHARE, COMPUTE_SHARE = 0.15, 0.05
"""Of the time: the drive takes the rest."""

_WRITING_SECONDS = 2.0
"""For progress alone: what the scratch file takes on a usual drive."""

Progress = Callable[[int, int], None]
"""Is called after each measurement, with the milliseconds since the last call and those in all."""


class MeasuredMachine(NamedTuple):
    """A machine, the backend that read its drive (None where that was not measured), and notes.

    `notes` say what was not found, and what keeps figures from meaning what they seem to.
    """

    machine: Machine
    backend: str | None
    notes: tuple[str, ...]


class _MeasuredDrive(NamedTuple):
    drive: Drive | None
    backend: str | None
    notes: list[str]


def measure_machine(
    model: PathOrPaths | None = None,
    *,
    directory: AnyPath | None = None,
    seconds: float = 20.0,
    scratch_length: int = SCRATCH_LENGTH,
    progress: Progress | None = None,
) -> MeasuredMachine:
    """Measure memory bandwidth, processors and drive; read memory, limits and GPUs.

    The drive is read as a `model` is, a source or a pack, and from its files; without one from a
    file of `scratch_length` bytes, which is written in `directory` (by default the current one) and
    removed. The `seconds` are without that. What is not known is None. Raises RequestError for what
    cannot be, MachineError where the drive cannot be read or written, and what opening a model
    raises.
    """
    if not 0 <= seconds < math.inf:
        raise RequestError("not a time in seconds", expected=">= 0", found=seconds)
    if model is not None and directory is not None:
        problem = "a model and a directory at once"
        hint = "the drive that the model lies on is measured: leave the directory out"
        raise RequestError(problem, path=directory, hint=hint)
    first = _WRITING_SECONDS if model is None else 0.0
    meter = Meter(first + seconds, time.perf_counter, progress)
    with _reads(model, Path(directory or "."), scratch_length, meter.advance) as reads:
        meter.begin(seconds)
        found = _measure_drive(reads, seconds * (1 - MEMORY_SHARE - COMPUTE_SHARE), meter.advance)
    bandwidth = measure_bandwidth(seconds * MEMORY_SHARE, progress=meter.advance)
    compute = measure_compute(seconds * COMPUTE_SHARE, progress=meter.advance)
    meter.finish()
    gpus = find_gpus()
    notes = [*found.notes, *_memory_notes(bandwidth), *([] if gpus.note is None else [gpus.note])]
    machine = Machine(None, read_memory(), bandwidth, gpus.found, found.drive, compute)
    return MeasuredMachine(machine, found.backend, tuple(notes))


@contextmanager
def _reads(
    model: PathOrPaths | None, directory: Path, length: int, progress: Callable[[], None]
) -> Iterator[ModelReads]:
    if model is not None:
        yield find_reads(model)
        return
    with scratch_file(directory, length, progress) as path:
        length = path.stat().st_size
        lengths = [one for one in LENGTHS if one <= length]
        yield ModelReads(directory, [(path, length)], lengths)


def _measure_drive(
    reads: ModelReads, seconds: float, progress: Callable[[], None]
) -> _MeasuredDrive:
    paths = [path for path, _ in reads.files]
    points = [
        Point(length, depth, "random")
        for length in reads.lengths
        for depth in DEPTHS
        if depth == 1 or length * depth <= MAX_IN_FLIGHT
    ]
    sequential = Point(max(reads.lengths), SEQUENTIAL_DEPTH, "sequential")
    backend, why = probe.choose("auto", paths, max(DEPTHS))
    notes = []
    with closing(backend):
        if backend.name == "buffered":
            if not _can_be_cold(paths[0]):
                note = f"the drive was not measured: what is read of it comes from memory ({why})"
                return _MeasuredDrive(None, None, [note])
            notes.append(f"{NO_DIRECT_READS} ({why})")
        points.append(sequential)
        usages = measure_in_rounds(backend, reads.files, points, seconds, ROUNDS, progress)
    figures = {
        point: measured([one.length / one.seconds for one in several], BYTE_UNITS)
        for point, several in usages.items()
    }
    in_order = figures.pop(sequential)
    speeds = tuple(
        ReadSpeed(point.length, point.depth, figure) for point, figure in figures.items()
    )
    if sum(length for _, length in reads.files) < SMALL:
        notes.append("less than 1 GiB to read from: a drive's own memory may hold much of it")
    folder = os.path.abspath(reads.folder)
    drive = Drive(folder if folder.isprintable() else None, None, speeds, in_order)
    return _MeasuredDrive(drive, backend.name, notes + _drive_notes(drive))


def _can_be_cold(path: Path) -> bool:
    """Say whether the page cache gives a file up: one in memory stays there."""
    page_cache.drop([path])
    share = page_cache.cached_share([path])
    return share is not None and share <= COLD_ENOUGH


def _drive_notes(drive: Drive) -> list[str]:
    unsteady = drive.unsteady
    if not unsteady:
        return []
    which = f"{len(unsteady)} of {count_text(len(drive.reads), 'kind')} of reads"
    return [
        f"the drive is shared or throttled: the same reads took up to {max(unsteady):.1f} times "
        f"as long as before (more than {STEADY} times for {which})"
    ]


def _memory_notes(bandwidth: Figure | None) -> list[str]:
    if bandwidth is None:
        return ["the bandwidth of memory was not measured: too little memory is free"]
    if (bandwidth.spread or 1.0) <= STEADY:
        return []
    return [
        f"the memory is busy: reading it took up to {bandwidth.spread:.1f} times as long as before"
    ]
