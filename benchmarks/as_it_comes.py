"""Reading experts as users get it, `for expert in pack.reader().read_many(keys)`, against peers.

Digests are checked and each expert is an object with memory of its own. The peers have nothing but
buffers that they use again: fio, and ten lines of Python with a thread pool. All have huge pages,
read the same blobs, and take turns in a random order.
"""

import mmap
import os
import queue
import random
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np

import moepack
from benchmarks import fio, models
from benchmarks.fio import cpu_per_gib
from benchmarks.measure import speed_row
from benchmarks.table import Row
from moepack.bench.drive import Usage
from moepack.pack.reading.locations import BlobLocation
from moepack.pack.reading.pack import Pack
from moepack.storage import page_cache

DEPTHS = (1, 4, 16)
LENGTH, PASSES = 1 << 30, 2
"""Bytes of the blobs, and how often each side reads all of them in a round, each time shuffled.

Of maps there is one pass: in a second one they would be read from the page cache.
"""
_KIB = 1 << 10

_FIO_LIMITS = {
    **{(models.SMALL, 1): 0.9, (models.MIDDLE, 1): 0.9, (models.LARGE, 1): 0.9},
    **{(models.SMALL, 16): 0.9, (models.MIDDLE, 4): 0.95, (models.MIDDLE, 16): 0.95},
    **{(models.LARGE, 4): 0.95, (models.LARGE, 16): 0.95},
}
_MORE_CPU = 0.10
"""Seconds a GiB beyond fio's, at 1 MiB and more."""


def from_the_drive(folder: Path, rounds: int) -> Iterator[Row]:
    """Compare blobs of three lengths at three depths with fio and ten lines of Python."""
    for size in models.BLOBS:
        with moepack.open(models.write_blobs(folder, size, LENGTH)) as pack:
            os.sync()
            for depth in DEPTHS:
                yield from _one_depth(pack, size, depth, rounds)
            yield from _against_maps(pack, size, rounds)


def _one_depth(pack: Pack, size: models.BlobSize, depth: int, rounds: int) -> Iterator[Row]:
    keys = [(0, expert) for expert in range(pack.expert_count(0))]
    where = pack.locate(0, 0)
    sides: dict[str, Callable[[int], Usage]] = {
        "moepack": partial(_read_many, pack, keys, depth),
        "direct": partial(_read_many, pack, keys, depth, backend="direct", check="never"),
        "ten lines": partial(_ten_lines, pack, keys, depth),
    }
    if fio.is_installed():
        sides["fio"] = partial(_fio, where.path, where.length, depth, len(keys))
    usages = _in_random_turns(sides, rounds)
    case = f"{where.length // _KIB} KiB, depth {depth}"
    if "fio" in sides:
        yield _speed_row(case, usages, "fio", _FIO_LIMITS.get((size, depth)))
        direct, peer = (
            [one.bytes_per_second for one in usages[side]] for side in ("direct", "fio")
        )
        yield speed_row(case, "fio, without digests", direct, peer)
        more = None if size is models.SMALL else _MORE_CPU
        cpu = cpu_per_gib(usages["moepack"]), cpu_per_gib(usages["fio"])
        yield Row(case, "CPU beyond fio", "s/GiB", *cpu, relation="difference", limit=more)
    else:
        yield Row(case, "fio", note="fio is not installed")
    yield _speed_row(case, usages, "ten lines", 1.0)
    cpu = cpu_per_gib(usages["direct"]), cpu_per_gib(usages["ten lines"])
    yield Row(case, "CPU of ten lines, without digests", "s/GiB", *cpu, limit=2)


def _against_maps(pack: Pack, size: models.BlobSize, rounds: int) -> Iterator[Row]:
    """Compare with memory maps of a file that is not cached: one blob is copied after another."""
    keys = [(0, expert) for expert in range(pack.expert_count(0))]
    sides: dict[str, Callable[[int], Usage]] = {
        "moepack": partial(_read_many, pack, keys, 1, passes=1),
        "mmap": partial(_mapped, pack, keys, _map_plainly),
        "np.memmap": partial(_mapped, pack, keys, _map_with_numpy),
    }
    usages = _in_random_turns(sides, rounds)
    for peer in ("mmap", "np.memmap"):
        yield _speed_row(f"{pack.locate(0, 0).length // _KIB} KiB", usages, peer, 1.0)


def _in_random_turns(
    sides: dict[str, Callable[[int], Usage]], rounds: int
) -> dict[str, list[Usage]]:
    """Let each side read once in a round, in an order that is drawn anew each time."""
    draw = random.Random(0)
    usages: dict[str, list[Usage]] = {name: [] for name in sides}
    for number in range(rounds):
        for name in draw.sample(list(sides), len(sides)):
            usages[name].append(sides[name](number))
    return usages


def _shuffled(
    keys: Sequence[tuple[int, int]], number: int, passes: int = PASSES
) -> list[tuple[int, int]]:
    draw = random.Random(number)
    return [key for _ in range(passes) for key in draw.sample(list(keys), len(keys))]


def _timed(work: Callable[[], None], places: Sequence[BlobLocation]) -> Usage:
    cpu, start = time.process_time(), time.perf_counter()
    work()
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    return Usage(seconds, cpu, len(places), sum(place.length for place in places))


def _read_many(
    pack: Pack,
    keys: Sequence[tuple[int, int]],
    depth: int,
    number: int,
    backend: str = "auto",
    check: str = "always",
    passes: int = PASSES,
) -> Usage:
    asked = _shuffled(keys, number, passes)
    page_cache.drop(pack.file_paths)  # what maps have left there

    def work() -> None:
        with pack.reader(depth=depth, backend=backend, check=check) as reader:
            for _ in reader.read_many(asked):
                pass

    return _timed(work, [pack.locate(*key) for key in asked])


def _ten_lines(pack: Pack, keys: Sequence[tuple[int, int]], depth: int, number: int) -> Usage:
    places = [pack.locate(*key) for key in _shuffled(keys, number)]
    length = places[0].length

    def work() -> None:
        descriptor = os.open(places[0].path, os.O_RDONLY | os.O_DIRECT)
        buffers: queue.SimpleQueue[mmap.mmap] = queue.SimpleQueue()
        for _ in range(depth):
            buffers.put(_huge_buffer(length))

        def read(offset: int) -> None:
            buffer = buffers.get()
            os.preadv(descriptor, [buffer], offset)
            buffers.put(buffer)

        with ThreadPoolExecutor(depth) as pool:
            for _ in pool.map(read, [place.offset for place in places]):
                pass
        os.close(descriptor)

    return _timed(work, places)


def _huge_buffer(length: int) -> mmap.mmap:
    buffer = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    buffer.madvise(mmap.MADV_HUGEPAGE)
    return buffer


def _mapped(
    pack: Pack,
    keys: Sequence[tuple[int, int]],
    open_map: Callable[[Path], mmap.mmap | memoryview],
    number: int,
) -> Usage:
    places = [pack.locate(*key) for key in _shuffled(keys, number, passes=1)]
    page_cache.drop([places[0].path])
    buffer = memoryview(_huge_buffer(places[0].length))

    def work() -> None:
        area = memoryview(open_map(places[0].path))
        for place in places:
            buffer[:] = area[place.offset : place.offset + place.length]

    return _timed(work, places)


def _map_plainly(path: Path) -> mmap.mmap:
    with open(path, "rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _map_with_numpy(path: Path) -> memoryview:
    return np.memmap(path, np.uint8, "r").data


def _fio(path: Path, length: int, depth: int, count: int, number: int) -> Usage:
    """Read `count` blocks of `length` bytes, each as often as the others do."""
    size = f"--size={count * length}"
    return fio.random_reads(
        path, length, depth, size, f"--loops={PASSES}", f"--randseed={number + 1}"
    )


def _speed_row(case: str, usages: dict[str, list[Usage]], peer: str, limit: float | None) -> Row:
    ours, theirs = ([one.bytes_per_second for one in usages[side]] for side in ("moepack", peer))
    return speed_row(case, peer, ours, theirs, limit)
