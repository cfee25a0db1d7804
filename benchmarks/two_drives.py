"""A pack and its mirror on two drives against the faster of the drives alone.

The drives are file systems on loop devices, whose reads a control group limits (Linux).
"""

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import moepack
from benchmarks import models
from benchmarks.measure import fresh, speed_row
from benchmarks.table import Row
from moepack.bench.control_group import control_group
from moepack.common.errors import MachineError

SPEED = 120 << 20
"""Bytes a second of the faster drive: far below what the machine's own drive gives."""
_LENGTH = 192 << 20
_SECONDS = 1.5
_AT_LEAST = {1: 1.8, 4: 1.0, 20: 0.98}
"""How many times as fast both are as the faster, by how many times as slow the other is.

A drive that is of no use is tried again now and then, which takes up to 1 % of the time.
"""

_SET_UP = "120 MiB/s of the faster, blobs of 1020 KiB, 1.5 s a round after 0.5 s to warm up"

_READ = """
import json, random, sys, time
import moepack
random.seed(1)
with moepack.open(sys.argv[1]) as pack, pack.reader(mirror=sys.argv[2] == "True") as reader:
    experts, length, group = range(pack.expert_count(0)), pack.locate(0, 0).length, int(sys.argv[4])
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
    with ExitStack() as stack:
        try:
            drives = [_mount(folder / f"drive-{number}", stack) for number in range(2)]
            with control_group(reads=dict.fromkeys(drives, SPEED)):
                pass
        except (OSError, subprocess.CalledProcessError, MachineError) as error:
            yield Row("two drives", "the faster alone", note=f"cannot be tried here: {error}")
            return
        made = models.write_blobs(folder, models.MIDDLE, _LENGTH)
        pack = drives[0] / made.name
        shutil.copytree(made, pack)
        os.sync()
        moepack.mirror_pack(pack, drives[1])
        yield Row("two drives", "", note=_SET_UP)
        for slower in _AT_LEAST:
            for count in (8, 100):
                yield _row(drives, pack, count, slower, rounds)


def _mount(folder: Path, stack: ExitStack) -> Path:
    """Make a drive, whose reads go past the page cache of its image."""
    image = folder.with_suffix(".image")
    with open(image, "wb") as file:
        os.posix_fallocate(file.fileno(), 0, 2 * _LENGTH)
    stack.callback(image.unlink)
    _run("mkfs.ext4", "-q", "-F", image)
    device = _run("losetup", "--find", "--show", "--direct-io=on", image).strip()
    stack.callback(_run, "losetup", "--detach", device)
    folder.mkdir()
    _run("mount", device, folder)
    stack.callback(_run, "umount", folder)
    return folder


def _run(*command: str | Path) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _row(drives: Sequence[Path], pack: Path, count: int, slower: int, rounds: int) -> Row:
    """Compare both drives with the faster; which of them has the pack changes with the round."""
    both, alone = [], []
    for number in range(rounds):
        speeds = [SPEED, SPEED // slower]
        limits = dict(zip(drives, speeds, strict=True))
        alone.append(_speed(limits, pack, count, mirror=False))
        limits = dict(zip(drives, speeds[:: -1 if number % 2 else 1], strict=True))
        both.append(_speed(limits, pack, count, mirror=True))
    case = "as fast" if slower == 1 else f"{slower} times as slow"
    return speed_row(case, f"batches of {count}", both, alone, _AT_LEAST[slower])


def _speed(limits: Mapping[Path, int], pack: Path, count: int, *, mirror: bool) -> float:
    with control_group(reads=limits) as group:
        (speed,) = fresh(_READ, pack, str(mirror), str(_SECONDS), str(count), group=group)
    return speed
