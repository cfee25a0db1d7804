"""A pack and its mirror on two drives against the faster of the drives alone."""

import os
import shutil
import statistics
from collections.abc import Iterator
from pathlib import Path

import moepack
from benchmarks import models
from benchmarks.measure import fresh
from benchmarks.slow_drives import SlowDrives, slow_drives
from benchmarks.table import Row
from moepack.bench.spread import spread

SPEED = 120 << 20
"""Bytes a second of the faster drive: far below what the machine's own drive gives."""
_LENGTH = 192 << 20
_SECONDS = 1.5
_AT_LEAST = {1: 1.8, 4: 1.0, 20: 0.98}
"""How many times as fast both are as the faster, by how many times as slow the other is.

A drive that is of no use is tried again now and then, which takes up to 1 % of the time.
"""

_READ = """
import json, os, random, sys, time
open(sys.argv[4], "w").write(str(os.getpid()))
import moepack
random.seed(1)
with moepack.open(sys.argv[1]) as pack, pack.reader(mirror=sys.argv[2] == "True") as reader:
    experts, length, group = range(pack.expert_count(0)), pack.locate(0, 0).length, int(sys.argv[5])
    def read(seconds):
        start, done = time.perf_counter(), 0
        while time.perf_counter() - start < seconds:
            keys = [(0, expert) for expert in random.sample(experts, group)]
            for expert in reader.read_many(keys, in_order=False):
                done += length
        return done / (time.perf_counter() - start)
    read(0.5)
    speed = read(float(sys.argv[3]))
    print(json.dumps([speed]))
"""


def mirrored(folder: Path, rounds: int) -> Iterator[Row]:
    """Read experts by eights, as single tokens do, and by a hundred, as prompts do."""
    with slow_drives(folder, 2, 2 * _LENGTH) as drives:
        if isinstance(drives, str):
            yield Row("two drives: the faster alone", drives)
            return
        made = models.write_blobs(folder, models.MIDDLE, _LENGTH)
        pack = drives.folders[0] / made.name
        shutil.copytree(made, pack)
        os.sync()
        moepack.mirror_pack(pack, drives.folders[1])
        for group, what in ((8, "8 experts"), (100, "100 experts")):
            for slower in _AT_LEAST:
                yield _row(drives, pack, group, what, slower, rounds)


def _row(drives: SlowDrives, pack: Path, group: int, what: str, slower: int, rounds: int) -> Row:
    """Compare both drives with the faster; which of them has the pack changes with the round."""
    both, alone = [], []
    for number in range(rounds):
        speeds = [SPEED, SPEED // slower]
        drives.limit(speeds)
        alone.append(_speed(drives, pack, group, mirror=False))
        drives.limit(speeds[:: -1 if number % 2 else 1])
        both.append(_speed(drives, pack, group, mirror=True))
    ratios = [ours / theirs for ours, theirs in zip(both, alone, strict=True)]
    second = "equal" if slower == 1 else f"{slower} x slower"
    return Row(
        f"two drives, {second}, {what}: faster alone",
        moepack=f"{statistics.median(both) / 1e6:.0f} MB/s",
        peer=f"{statistics.median(alone) / 1e6:.0f} MB/s",
        value=spread(ratios),
        limit=_AT_LEAST[slower],
        higher_is_better=True,
    )


def _speed(drives: SlowDrives, pack: Path, group: int, *, mirror: bool) -> float:
    (speed,) = fresh(_READ, pack, str(mirror), str(_SECONDS), drives.entry, str(group))
    return speed
