"""The raw backends against fio, packs against shards, and the first expert."""

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import moepack
from benchmarks import fio
from benchmarks.fio import cpu_row
from benchmarks.measure import fresh, limit_row, speed_row
from benchmarks.table import Row
from moepack.bench import drive
from moepack.bench.drive import Usage, in_flight
from moepack.bench.measuring import Spread, in_turns
from moepack.storage import probe

LENGTHS = (256 << 10, 1 << 20, 16 << 20)
DEPTHS = (4, 32)
SECONDS = 1.0

_FIRST_EXPERT = """
import sys, time
import moepack
def first():
    pack = moepack.open(sys.argv[1])
    start = time.perf_counter()
    with pack.reader() as reader:
        reader.read(pack.layers[0], 0)
        return (time.perf_counter() - start) * 1e3
first()
print([first()])
"""


def against_fio(path: Path, rounds: int) -> Iterator[Row]:
    """Compare random direct reads of one file with fio's (io_uring), in turns."""
    if not fio.is_installed():
        yield Row("random direct reads: fio", "fio is not installed")
        return
    os.sync()
    for length in LENGTHS:
        for depth in DEPTHS:
            sides: dict[str, Callable[[], Usage]] = {
                "direct": partial(_ours, path, length, depth),
                "fio": partial(_fio, path, length, depth),
            }
            usages = in_turns(sides, rounds)
            yield from _compare(f"raw direct, {length >> 10} KiB, depth {depth}", usages, "direct")


def packs_against_shards(pack_path: Path, shards: list[Path], rounds: int) -> Iterator[Row]:
    """Let `moepack bench` compare the same routed experts as blobs, and as slices of the shards.

    There is no limit: what a drive gains is the drive's.
    """
    seconds = 10.0 * rounds
    report = moepack.bench_pack(pack_path, source=shards[0], seconds=seconds, point_seconds=0)
    speeds = {(one.layout, one.depth): one.bytes_per_second for one in report.readings}
    for depth, ratio, low, high, *_ in report.gains:
        if ratio is None or low is None or high is None:
            continue
        ours, theirs = (f"{speeds[layout, depth] / 1e9:.2f} GB/s" for layout in ("blobs", "slices"))
        name = f"blobs, depth {depth}: slices"
        yield Row(name, ours, theirs, value=Spread(ratio, low, high), higher_is_better=True)


def first_expert(pack_path: Path, rounds: int) -> Iterator[Row]:
    """Make a reader and read one expert, in a process that has done so before."""
    times = [fresh(_FIRST_EXPERT, pack_path)[0] for _ in range(rounds)]
    yield limit_row("first expert after opening, warm", times, "ms", 2)


def _ours(path: Path, length: int, depth: int) -> Usage:
    backend, _ = probe.choose("direct", [path])
    ranges = drive.read_ranges([(path, path.stat().st_size)], length, "random")
    usage = in_flight(backend, ranges, depth, length, SECONDS)
    backend.close()
    return usage


def _fio(path: Path, length: int, depth: int) -> Usage:
    return fio.random_reads(path, length, depth, "--time_based", f"--runtime={SECONDS:.0f}")


def _compare(name: str, usages: dict[str, list[Usage]], ours: str) -> Iterator[Row]:
    speeds, peers = ([usage.bytes_per_second for usage in usages[side]] for side in (ours, "fio"))
    yield speed_row(f"{name}: fio", speeds, peers, 0.97)
    yield cpu_row(f"{name}, CPU: fio", usages[ours], usages["fio"], 3)
