"""Models and packs behind nginx, against downloading with the same client."""

import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import moepack
from benchmarks.measure import MOEPACK, Side, against, fresh, speed_row, time_row
from benchmarks.table import Row
from moepack.bench.measuring import in_turns
from tests.support.nginx import nginx_of

# As moepack downloads: ranges of 8 MiB, four in flight, written where they belong.
_DOWNLOAD = """
import os, sys
from concurrent.futures import ThreadPoolExecutor
import obstore
from obstore.store import HTTPStore
url, folder, *names = sys.argv[1:]
store = HTTPStore.from_url(url, client_options={"allow_http": True})
os.mkdir(folder)
def get(descriptor, name, start, end):
    for piece in obstore.get(store, name, options={"range": (start, end)}).stream(1 << 20):
        os.pwrite(descriptor, piece, start)
        start += len(piece)
with ThreadPoolExecutor(4) as threads:
    for name in names:
        length = obstore.head(store, name)["size"]
        descriptor = os.open(f"{folder}/{name}", os.O_CREAT | os.O_WRONLY)
        starts = range(0, length, 8 << 20)
        list(threads.map(lambda s: get(descriptor, name, s, min(length, s + (8 << 20))), starts))
        os.fsync(descriptor)
"""
_OPEN = """
import json, sys, time, moepack
with moepack.open(sys.argv[1]) as pack, pack.reader(check="never") as reader:
    keys = [(layer, expert) for layer in pack.layers for expert in range(pack.expert_count(layer))]
    ranges = [pack.locate(*key) for key in keys]
    length = sum(one.length for one in ranges)
"""
_READ = """
    for _ in range(2):  # the first time connects, and takes memory from the system
        start = time.perf_counter()
        for expert in reader.read_many(keys):
            pass
        seconds = time.perf_counter() - start
    print(json.dumps([length / seconds]))
"""
# With as many requests in flight, and bytes that end up in memory of the caller's as well.
_STREAM = """
    from concurrent.futures import ThreadPoolExecutor
    from threading import local
    import obstore
    from obstore.store import HTTPStore
    store = HTTPStore.from_url(sys.argv[1], client_options={"allow_http": True})
    memory = local()
    def get(one):
        if not hasattr(memory, "buffer"):
            memory.buffer = memoryview(bytearray(max(one.length for one in ranges)))
        asked = {"range": (one.offset, one.offset + one.length)}
        done = 0
        for piece in obstore.get(store, one.path.name, options=asked).stream(1 << 20):
            view = memoryview(piece)
            memory.buffer[done : done + len(view)] = view
            done += len(view)
        return done
    with ThreadPoolExecutor(32) as threads:
        for _ in range(2):
            start = time.perf_counter()
            assert sum(threads.map(get, ranges)) == length
            seconds = time.perf_counter() - start
    print(json.dumps([length / seconds]))
"""


def rows(folder: Path, shards: list[Path], rounds: int) -> Iterator[Row]:
    """Measure what is read from a web server on this machine: `shards`, and a pack of them."""
    if shutil.which("nginx") is None:
        yield Row("`pack http://…`", "a download", note="nginx is not installed")
        return
    with nginx_of(folder, folder / "nginx") as address:
        yield from _packing(address, folder, shards, rounds)
        yield from _reading(f"{address}/served", rounds)
    shutil.rmtree(folder / "served")


def _packing(address: str, folder: Path, shards: list[Path], rounds: int) -> Iterator[Row]:
    pack, copy = folder / "served", folder / "downloaded"

    def prepare() -> None:
        for target in (pack, copy):
            shutil.rmtree(target, ignore_errors=True)

    names = [shard.name for shard in shards]
    program: list[str | Path] = [MOEPACK[0], "-c", _DOWNLOAD, address, copy, *names]
    ours = Side((*MOEPACK, "pack", f"{address}/{shards[0].name}", "-o", pack), prepare)
    measured, downloaded = against(ours, Side(program, prepare), rounds)
    yield time_row("`pack http://…`: a download by obstore, and `sync`", measured, downloaded, 1.25)
    prepare()
    moepack.pack_model(shards, pack)


def _reading(address: str, rounds: int) -> Iterator[Row]:
    sides = {
        "obstore": partial(fresh, _OPEN + _STREAM, address),
        "moepack": partial(fresh, _OPEN + _READ, address),
    }
    speeds = in_turns(sides, rounds)
    ours, theirs = ([one for (one,) in speeds[side]] for side in ("moepack", "obstore"))
    yield speed_row("read all experts of a pack: obstore", "speed", ours, theirs, 0.8)
