"""Packs against shards, and the first expert."""

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import moepack
from benchmarks.measure import fresh, speed_row
from benchmarks.table import Row

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
