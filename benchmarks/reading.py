"""The raw backends against fio, packs against shards, and the first expert."""

import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import moepack
from benchmarks import fio
from benchmarks.measure import fresh, speed_row
from benchmarks.table import Row
from moepack.bench import drive
from moepack.bench.drive import Usage, in_flight
from moepack.bench.measuring import in_turns
from moepack.storage import probe

LENGTHS = (256 << 10, 1 << 20, 16 << 20)
DEPTHS = (4, 32)
SECONDS = 1.0
BENCH_SECONDS = 20.0

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
        yield Row("`direct`", "fio", note="fio is not installed")
        return
    os.sync()
    for length in LENGTHS:
        for depth in DEPTHS:
            sides: dict[str, Callable[[], Usage]] = {
                "direct": partial(_ours, path, length, depth),
                "fio": partial(_fio, path, length, depth),
            }
            usages = in_turns(sides, rounds)
            yield from _compare(f"{length >> 10} KiB, depth {depth}", usages)


def packs_against_shards(pack_path: Path, shards: list[Path], rounds: int) -> Iterator[Row]:
    """Let `moepack bench` compare the same routed experts as blobs, and as slices of the shards.

    Each of the rounds is a whole run of it. There is no limit: what a drive gains is the drive's.
    """
    ours: dict[int, list[float]] = defaultdict(list)
    theirs: dict[int, list[float]] = defaultdict(list)
    verdicts = []
    for _ in range(rounds):
        report = moepack.bench_pack(
            pack_path, source=shards[0], seconds=BENCH_SECONDS, point_seconds=0
        )
        speeds = {(one.layout, one.depth): one.bytes_per_second for one in report.readings}
        verdicts.append(f"{report.outcome} in {report.round_count} rounds")
        for depth in sorted({one.depth for one in report.readings}):
            ours[depth].append(speeds["blobs", depth])
            theirs[depth].append(speeds["slices", depth])
    yield Row("`moepack bench`", "verdict", note="; ".join(verdicts))
    for depth, blobs in ours.items():
        yield speed_row(f"depth {depth}", "slices", blobs, theirs[depth])


def first_expert(pack_path: Path, rounds: int) -> Iterator[Row]:
    """Make a reader and read one expert, in a process that has done so before."""
    times = [fresh(_FIRST_EXPERT, pack_path)[0] for _ in range(rounds)]
    yield Row("read the first expert after opening", "time", "ms", times, limit=2)


def _ours(path: Path, length: int, depth: int) -> Usage:
    backend, _ = probe.choose("direct", [path])
    ranges = drive.read_ranges([(path, path.stat().st_size)], length, "random")
    usage = in_flight(backend, ranges, depth, length, SECONDS)
    backend.close()
    return usage


def _fio(path: Path, length: int, depth: int) -> Usage:
    return fio.random_reads(path, length, depth, "--time_based", f"--runtime={SECONDS:.0f}")


def _compare(case: str, usages: dict[str, list[Usage]]) -> Iterator[Row]:
    sides = usages["direct"], usages["fio"]
    ours, theirs = ([usage.bytes_per_second for usage in side] for side in sides)
    yield speed_row(case, "fio", ours, theirs, 0.97)
    ours, theirs = (fio.cpu_per_gib(side) for side in sides)
    yield Row(case, "CPU of fio", "s/GiB", ours, theirs, limit=3)
