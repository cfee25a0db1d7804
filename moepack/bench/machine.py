"""A machine, measured: its memory, its GPUs, and its drive at the reads of a model."""

import math
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np

from moepack.bench.comparison import COLD_ENOUGH, NO_DIRECT_READS, SMALL_LENGTH
from moepack.bench.drive import in_flight, read_ranges, scratch_file
from moepack.bench.measuring import Meter, in_turns
from moepack.bench.steps import StepKind, StepMeasurement, scratch_header
from moepack.common.errors import MachineError, RequestError
from moepack.common.paths import AnyPath, PathOrPaths, path_list
from moepack.common.phases import Progress
from moepack.common.shape import ROUTED_FAMILY
from moepack.common.sizes import count_text
from moepack.host.gpus import find_gpus
from moepack.host.memory_limits import available_memory, read_memory
from moepack.host.processors import cpu_count
from moepack.pack.opening.open_model import open_model
from moepack.pack.reading.directory import named_pack
from moepack.pack.reading.expert_read import PAGE, plan_read
from moepack.packing.shard_index import index_model
from moepack.planning.machine.model import (
    STEADY,
    Drive,
    Figure,
    Gpu,
    Machine,
    ReadSpeed,
    measured,
)
from moepack.storage import page_cache, probe
from moepack.storage.backend import Backend

LENGTHS = (256 << 10, 1 << 20, 4 << 20, 16 << 20)
"""Bytes of experts if there is no model to take them from."""

SEQUENTIAL_DEPTH, SEQUENTIAL_LENGTH = 4, 4 << 20
SCRATCH_LENGTH = 1 << 30
ROUNDS = 5
MEMORY_SHARE, COMPUTE_SHARE = 0.15, 0.05
"""Of the time: the drive takes the rest."""

_WRITING_SECONDS = 2.0
"""For progress alone: the time to write a scratch file on a usual drive."""

_CPUS = Path("/sys/devices/system/cpu")
_LEAST_LENGTH = 256 << 20
_CACHES = 8
"""The buffer's length in lengths of all last-level caches: a walk over it hardly hits them."""
_LEAST_ROUNDS = 5
_PIECES = 4
"""Pieces of the buffer for each thread, so that faster CPUs take more."""
_SPARE_LENGTH = 32 << 20
"""Memory for a thread: its stack and its first objects."""
_MATRIX_SIZE = 1024
"""Rows of a square matrix: 4 MiB, and some 10 ms on two processors."""


class MeasuredMachine(NamedTuple):
    """A machine, the backend that read its drive (None if it was not measured), and notes.

    `notes` name missing figures, and reasons why figures may mislead. The first says why the drive
    was not measured, the last why no GPU was found.
    """

    machine: Machine
    backend: str | None
    notes: tuple[str, ...]


ExpertFiles = tuple[Path, list[tuple[Path, int]]]
"""The folder of a pack or an index, and the files that have its experts, with their lengths."""


def measure_machine(
    model: PathOrPaths | None = None,
    *,
    directory: AnyPath | None = None,
    seconds: float = 20.0,
    scratch_length: int = SCRATCH_LENGTH,
    progress: Progress | None = None,
) -> MeasuredMachine:
    """Measure memory bandwidth, processors and drive; read memory, limits and GPUs.

    Experts of a `model`, a source or a pack, are read of its drive as `run` reads them; without one
    those of a file of `scratch_length` bytes, which is written in `directory` (by default the
    current one) and removed. `seconds` are without writing it. `progress` counts milliseconds.
    Unknown figures are None. Raises RequestError for bad arguments, MachineError if the drive
    cannot be read or written, and what opening a model raises.
    """
    if not 0 <= seconds < math.inf:
        raise RequestError("not a time in seconds", expected=">= 0", found=seconds)
    if model is not None and directory is not None:
        problem = "a model and a directory at once"
        hint = "the model's drive is measured: leave the directory out"
        raise RequestError(problem, path=directory, hint=hint)
    first = _WRITING_SECONDS if model is None else 0.0
    meter = Meter(first + seconds, progress)
    with _experts(model, Path(directory or "."), scratch_length, meter.advance) as experts:
        meter.begin(seconds)
        drive_seconds = seconds * (1 - MEMORY_SHARE - COMPUTE_SHARE)
        drive, backend, notes = _measure_drive(experts, drive_seconds, meter.advance)
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
    notes += [*_notes(drive, memory_bandwidth), *([] if note is None else [note])]
    machine = Machine(None, Figure(read_memory(), "read"), memory_bandwidth, gpus, drive, compute)
    return MeasuredMachine(machine, backend, tuple(notes))


def _as_read(value: float | None) -> Figure | None:
    return None if value is None else Figure(value, "read")


@contextmanager
def _experts(
    model: PathOrPaths | None, directory: Path, length: int, progress: Callable[[], None]
) -> Iterator[ExpertFiles]:
    """Make a pack, or an index, of which experts can be read."""
    if model is None:
        head = partial(scratch_header, LENGTHS)
        with scratch_file(directory, length, progress, head) as path, _index_of(path) as folder:
            yield folder, [(path, path.stat().st_size)]
        return
    files, pack = find_files(model), named_pack(model)
    if pack is not None:
        yield pack, files
        return
    with _index_of(model) as folder:
        yield folder, files


@contextmanager
def _index_of(source: PathOrPaths) -> Iterator[Path]:
    with TemporaryDirectory(prefix="moepack-") as folder:
        index_model(source, Path(folder) / "index")
        yield Path(folder) / "index"


def _measure_drive(
    experts: ExpertFiles, seconds: float, progress: Callable[[], None]
) -> tuple[Drive | None, str | None, list[str]]:
    """Return the drive, the backend that read it (None if it was not measured), and notes."""
    folder, files = experts
    paths = [path for path, _ in files]
    backend, why = probe.choose("auto", paths)
    notes = []
    with closing(backend):
        if backend.name == "buffered":
            page_cache.drop(paths[:1])
            share = page_cache.cached_share(paths[:1])
            if share is None or share > COLD_ENOUGH:  # a file in memory stays there
                note = f"the drive was not measured: its reads come from memory ({why})"
                return None, None, [note]
            notes.append(f"{NO_DIRECT_READS} ({why})")
        try:
            steps = StepMeasurement(folder, is_buffered=backend.name == "buffered")
        except (RequestError, MachineError) as error:
            hint = f"; {error.hint}" if error.hint else ""
            return None, None, [f"the drive was not measured: {error}{hint}"]
        with steps:
            figures = _measure_reads(steps, backend, files, seconds, progress)
    in_order = figures.pop(None)
    speeds = tuple(ReadSpeed(*kind, figure) for kind, figure in figures.items() if kind)
    if sum(length for _, length in files) < SMALL_LENGTH:
        notes.append("less than 1 GiB to read from: a drive's own memory may hold much of it")
    parent = os.path.abspath(paths[0].parent)
    drive = Drive(parent if parent.isprintable() else None, None, speeds, in_order)
    return drive, backend.name, notes


def _measure_reads(
    steps: StepMeasurement,
    backend: Backend,
    files: list[tuple[Path, int]],
    seconds: float,
    progress: Callable[[], None],
) -> dict[StepKind | None, Figure]:
    """Return the bytes a second of each kind of steps, and of sequential reads (None)."""
    share = seconds / (ROUNDS * (len(steps.kinds) + 1))
    length = min(SEQUENTIAL_LENGTH, max(size for _, size in files) // PAGE * PAGE)
    in_order = read_ranges(files, length, "sequential")

    def measure(kind: StepKind | None) -> float:
        if backend.name == "buffered":
            page_cache.drop(path for path, _ in files)
        if kind is None:
            usage = in_flight(backend, in_order, SEQUENTIAL_DEPTH, length, share)
            speed = usage.bytes_per_second
        else:
            speed = steps.measure(kind, share)
        progress()
        return speed

    sides = {kind: partial(measure, kind) for kind in (None, *steps.kinds)}
    results = in_turns(sides, ROUNDS)
    return {kind: measured(speeds) for kind, speeds in results.items()}


def _notes(drive: Drive | None, bandwidth: Figure | None) -> Iterator[str]:
    """Yield what is to be said of a drive and a memory that others use, or that is unknown."""
    unsteady = drive.unsteady if drive is not None else []
    if drive is not None and unsteady:
        which = f"{len(unsteady)} of {count_text(len(drive.reads), 'kind')} of reads"
        yield (
            "the drive is shared or throttled: the same reads took up to "
            f"{max(unsteady):.1f} times as long as before (more than {STEADY} times for {which})"
        )
    if bandwidth is None:
        yield "the bandwidth of memory was not measured: too little memory is free"
    elif (bandwidth.spread or 1.0) > STEADY:
        times = f"{bandwidth.spread:.1f} times as long as before"
        yield f"the memory is busy: reading it took up to {times}"


def find_files(model: PathOrPaths) -> list[tuple[Path, int]]:
    """Return the files of a pack or a source that hold experts, with their lengths.

    Raises what opening it raises, and RequestError if there are no routed experts.
    """
    with open_model(model) as pack:
        pack.require_files()
        pack.require_complete()
        reads = (
            plan_read(pack, layer, 0, None, ROUTED_FAMILY).file_reads for layer in pack.shape.routed
        )
        paths = dict.fromkeys(read.path for several in reads for read in several)
    if not paths:
        raise RequestError("the model has no routed experts", path=path_list(model)[0])
    return [(path, path.stat().st_size) for path in paths]


def measure_bandwidth(
    seconds: float, *, progress: Callable[[], None] = lambda: None
) -> Figure | None:
    """Return the bytes a second that all CPUs together read of memory; None if it is too little.

    The buffer takes up to a quarter of the memory that is available. Each CPU has a thread, and
    rounds over it are done until the `seconds` end. The figure is their median: it lasts, while the
    best round is luck. `progress` is called after each round.
    """
    length = buffer_length(_last_cache_length(), available_memory())
    if length is None:
        return None
    end = time.perf_counter() + seconds
    # Python waits forever for a thread that has no memory to begin with: this is left to them.
    spare = np.empty(_SPARE_LENGTH * cpu_count(), np.uint8)
    buffer = np.empty(length, np.uint8)
    del spare
    pieces = np.array_split(buffer, _PIECES * cpu_count())
    with ThreadPoolExecutor(cpu_count()) as pool:
        # All CPUs touch it, so that it lies beside all of them if each has memory of its own.
        list(pool.map(lambda piece: piece.fill(1), pieces))
        # Of all reductions that numpy does without the interpreter's lock, the fastest.
        read = partial(pool.map, np.max, pieces)
        return measured(_speeds(lambda: list(read()), length, end, progress))


def _speeds(
    work: Callable[[], object], amount: int, end: float, progress: Callable[[], None]
) -> list[float]:
    """Do some work a few times, and until the clock says `end`; return its amounts a second."""
    speeds: list[float] = []
    while len(speeds) < _LEAST_ROUNDS or time.perf_counter() < end:
        start = time.perf_counter()
        work()
        speeds.append(amount / (time.perf_counter() - start))
        progress()
    return speeds


def buffer_length(cache_length: int, available: int) -> int | None:
    """Return the buffer's length in bytes; None if memory is hardly larger than the caches."""
    length = min(max(_CACHES * cache_length, _LEAST_LENGTH), available // 4)
    return length if length >= max(2 * cache_length, _LEAST_LENGTH // 4) else None


def _last_cache_length() -> int:
    """Return the bytes of all caches of the last level; 0 if the system does not say.

    By sysfs-devices-system-cpu of the kernel's ABI documents.
    """
    levels: dict[int, dict[str, int]] = {}
    for cache in _CPUS.glob("cpu[0-9]*/cache/index[0-9]*"):
        try:
            level, size, cpus = (
                (cache / name).read_text().strip() for name in ("level", "size", "shared_cpu_list")
            )
            levels.setdefault(int(level), {})[cpus] = int(size.removesuffix("K")) << 10
        except (OSError, ValueError):
            continue
    return sum(levels[max(levels)].values()) if levels else 0


def measure_compute(seconds: float, progress: Callable[[], None]) -> Figure:
    """Return the floating-point operations a second of matrix products in single precision.

    It is the median of rounds of up to `seconds` in all; `progress` is called after each.
    """
    matrix = np.ones((_MATRIX_SIZE, _MATRIX_SIZE), np.float32)
    product = matrix @ matrix  # which starts the threads
    multiply = partial(np.matmul, matrix, matrix, out=product)
    end = time.perf_counter() + seconds
    return measured(_speeds(multiply, 2 * _MATRIX_SIZE**3, end, progress))
