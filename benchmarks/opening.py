"""What it costs to start: opening sources and packs, locating, importing; in fresh processes."""

from collections.abc import Iterator
from pathlib import Path

from benchmarks import models
from benchmarks.measure import MOEPACK, fresh, run
from benchmarks.table import Row

_OPEN_SOURCE = """
import sys, time
from moepack.source.shards import open_source
def memory(key):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(key))
try:
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak starts anew from here
    before = memory("VmRSS:")
except OSError:
    before = None
start = time.perf_counter()
open_source([sys.argv[1]])
seconds = time.perf_counter() - start
print([seconds * 1e3, -1 if before is None else (memory("VmHWM:") - before) / 1e3])
"""
_OPEN_PACK = """
import random, sys, time
import moepack
moepack.Pack, moepack.Reader
start = time.perf_counter()
pack = moepack.open(sys.argv[1])
opened = time.perf_counter() - start
draw = random.Random(1).randrange
places = [(draw(len(pack.layers)), draw(pack.expert_count(0))) for _ in range(50_000)]
locate = pack.locate
start = time.perf_counter()
for layer, expert in places:
    locate(layer, expert)
blob = time.perf_counter() - start
start = time.perf_counter()
for layer, expert in places:
    locate(layer, expert, "up")
part = time.perf_counter() - start
print([opened * 1e3, blob / len(places) * 1e6, part / len(places) * 1e6])
"""
_IMPORT = """
import time
start = time.perf_counter()
from moepack import Pack, Reader
print([(time.perf_counter() - start) * 1e3])
"""


def sources(folder: Path, rounds: int) -> Iterator[Row]:
    """Open a source with a vocabulary of 250,000 tokens and as many merges."""
    path = models.write_vocabulary(folder / "vocabulary.gguf")
    milliseconds, megabytes = zip(*(fresh(_OPEN_SOURCE, path) for _ in range(rounds)), strict=True)
    yield Row("open a source, 250,000 tokens", "time", "ms", milliseconds, limit=100)
    if min(megabytes) >= 0:
        yield Row("open a source, 250,000 tokens", "memory", "MB", megabytes, limit=30)


def packs(folder: Path, rounds: int) -> Iterator[Row]:
    """Open a pack of 30,720 blobs, locate experts in it at random, read the first one."""
    source, layout = models.write_many(folder)
    pack = folder / "many"
    run((*MOEPACK, "pack", source, "-o", pack, "--layout", layout))
    numbers = zip(*(fresh(_OPEN_PACK, pack) for _ in range(rounds)), strict=True)
    opened, blob, part = numbers
    yield Row("open a pack, 30,720 blobs", "time", "ms", opened, limit=5)
    yield Row("locate a blob", "locating", "us", blob, limit=2)
    yield Row("locate a part", "locating", "us", part, limit=2)


def starting(rounds: int) -> Iterator[Row]:
    """Import the library; run the command line for its help."""
    imports = [fresh(_IMPORT)[0] for _ in range(rounds)]
    yield Row("`from moepack import Pack, Reader`", "time", "ms", imports, limit=60)
    helps = [run((*MOEPACK, "--help")).seconds * 1e3 for _ in range(rounds)]
    yield Row("`moepack --help`", "time", "ms", helps, limit=200)
