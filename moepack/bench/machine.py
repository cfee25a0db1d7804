"""A machine, measured: its memory, its GPUs, and its drive at the reads of a model."""

import math
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import NamedTuple

from moepack.bench.bandwidth import measure_bandwidth, measure_compute
from moepack.bench.comparison import COLD_ENOUGH, NO_DIRECT_READS, SMALL_LENGTH
from moepack.bench.drive import MAX_IN_FLIGHT, Point, measure_in_rounds, scratch_file
from moepack.bench.measuring import Meter
from moepack.common.errors import RequestError
from moepack.common.paths import AnyPath, PathOrPaths, path_list
from moepack.common.phases import Progress
from moepack.common.shape import ROUTED_FAMILY
from moepack.common.sizes import align, count_text
from moepack.host.gpus import find_gpus
from moepack.host.memory_limits import read_memory
from moepack.pack.opening.open_model import open_model
from moepack.pack.reading.expert_read import PAGE, plan_read
from moepack.planning.machine.model import (
    BYTE_UNITS,
    STEADY,
    Drive,
    Figure,
    Gpu,
    Machine,
    ReadSpeed,
    measured,
)
from moepack.storage import page_cache, probe

LENGTHS = [256 << 10, 1 << 20, 4 << 20, 16 << 20]
"""Bytes of reads if there is no model to take them from."""

DEPTHS = (1, 2, 4, 8)
SEQUENTIAL_DEPTH = 4
SCRATCH_LENGTH = 1 << 30
ROUNDS = 5
MEMORY_SHARE, COMPUTE_SHARE = 0.15, 0.05
"""Of the time: the drive takes the rest."""

_WRITING_SECONDS = 2.0
"""For progress alone: the time to write a scratch file on a usual drive."""

_MAX_LENGTHS = 4
_MIN_SHARE = 0.01
"""The share of the bytes of all experts below which the reads of a length do not count."""


class MeasuredMachine(NamedTuple):
    """A machine, the backend that read its drive (None if it was not measured), and notes.

    `notes` name missing figures, and reasons why figures may mislead. The first says why the drive
    was not measured, the last why no GPU was found.
    """

    machine: Machine
    backend: str | None
    notes: tuple[str, ...]


ModelReads = tuple[list[tuple[Path, int]], list[int]]
"""The files that hold experts, with their lengths, and the lengths of reads, ascending."""


def measure_machine(
    model: PathOrPaths | None = None,
    *,
    directory: AnyPath | None = None,
    seconds: float = 20.0,
    scratch_length: int = SCRATCH_LENGTH,
    progress: Progress | None = None,
) -> MeasuredMachine:
    """Measure memory bandwidth, processors and drive; read memory, limits and GPUs.

    The drive is read with the reads of a `model`, a source or a pack, from its files; without one
    from a file of `scratch_length` bytes, which is written in `directory` (by default the current
    one) and removed. `seconds` are without writing it. `progress` counts milliseconds. Unknown
    figures are None. Raises RequestError for bad arguments, MachineError if the drive cannot be
    read or written, and what opening a model raises.
    """
    if not 0 <= seconds < math.inf:
        raise RequestError("not a time in seconds", expected=">= 0", found=seconds)
    if model is not None and directory is not None:
        problem = "a model and a directory at once"
        hint = "the model's drive is measured: leave the directory out"
        raise RequestError(problem, path=directory, hint=hint)
    first = _WRITING_SECONDS if model is None else 0.0
    meter = Meter(first + seconds, progress)
    with _reads(model, Path(directory or "."), scratch_length, meter.advance) as reads:
        meter.begin(seconds)
        drive_seconds = seconds * (1 - MEMORY_SHARE - COMPUTE_SHARE)
        drive, backend, notes = _measure_drive(reads, drive_seconds, meter.advance)
    memory_bandwidth = measure_bandwidth(seconds * MEMORY_SHARE, progress=meter.advance)
    compute = measure_compute(seconds * COMPUTE_SHARE, meter.advance)
    meter.finish()
    nvidia_gpus, note = find_gpus()
    gpus = tuple(
        Gpu(
            gpu.name, Figure(gpu.memory_length, "read"), _as_read(gpu.bandwidth), _as_read(gpu.link)
        )
        for gpu in nvidia_gpus
    )
    notes += [*_memory_notes(memory_bandwidth), *([] if note is None else [note])]
    machine = Machine(None, Figure(read_memory(), "read"), memory_bandwidth, gpus, drive, compute)
    return MeasuredMachine(machine, backend, tuple(notes))


def _as_read(value: float | None) -> Figure | None:
    return None if value is None else Figure(value, "read")


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
        yield [(path, length)], lengths


def _measure_drive(
    reads: ModelReads, seconds: float, progress: Callable[[], None]
) -> tuple[Drive | None, str | None, list[str]]:
    """Return the drive, the backend that read it (None if it was not measured), and notes."""
    files, lengths = reads
    paths = [path for path, _ in files]
    points = [
        Point(length, depth, "random")
        for length in lengths
        for depth in DEPTHS
        if depth == 1 or length * depth <= MAX_IN_FLIGHT
    ]
    sequential = Point(max(lengths), SEQUENTIAL_DEPTH, "sequential")
    backend, why = probe.choose("auto", paths, max(DEPTHS))
    notes = []
    with closing(backend):
        if backend.name == "buffered":
            page_cache.drop(paths[:1])
            share = page_cache.cached_share(paths[:1])
            if share is None or share > COLD_ENOUGH:  # a file in memory stays there
                note = f"the drive was not measured: its reads come from memory ({why})"
                return None, None, [note]
            notes.append(f"{NO_DIRECT_READS} ({why})")
        points.append(sequential)
        usages = measure_in_rounds(backend, files, points, seconds, ROUNDS, progress)
    figures = {
        point: measured([one.bytes_per_second for one in several], BYTE_UNITS)
        for point, several in usages.items()
    }
    in_order = figures.pop(sequential)
    speeds = tuple(
        ReadSpeed(point.length, point.depth, figure) for point, figure in figures.items()
    )
    if sum(length for _, length in files) < SMALL_LENGTH:
        notes.append("less than 1 GiB to read from: a drive's own memory may hold much of it")
    folder = os.path.abspath(paths[0].parent)
    drive = Drive(folder if folder.isprintable() else None, None, speeds, in_order)
    return drive, backend.name, notes + _drive_notes(drive)


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


def find_reads(model: PathOrPaths) -> ModelReads:
    """Return the reads of experts from a pack (blobs) or a source (slices), rounded up to pages.

    Raises what opening it raises, and RequestError if there are no routed experts.
    """
    with open_model(model) as pack:
        pack.require_files()
        pack.require_complete()
        reads = [
            (read.path, align(read.length, PAGE), family.expert_count)
            for layer, family in pack.shape.routed.items()
            for read in plan_read(pack, layer, 0, None, ROUTED_FAMILY).file_reads
        ]
    if not reads:
        raise RequestError("the model has no routed experts", path=path_list(model)[0])
    totals = Counter[int]()
    for _, length, expert_count in reads:
        totals[length] += length * expert_count
    files = [(path, path.stat().st_size) for path in dict.fromkeys(path for path, _, _ in reads)]
    return files, most_read_lengths(totals)


def most_read_lengths(totals: Counter[int]) -> list[int]:
    """Return the lengths of reads that bring the most bytes, ascending, without small parts.

    `totals` are the bytes that the reads of each length bring.
    """
    least = _MIN_SHARE * totals.total()
    return sorted(length for length, total in totals.most_common(_MAX_LENGTHS) if total >= least)
