"""What it costs to start: opening sources and packs, locating, importing; in fresh processes."""

from collections.abc import Iterator
from pathlib import Path

from benchmarks import models
from benchmarks.measure import MOEPACK, fresh, limit_row, run
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
    yield limit_row("open a source, 250,000 tokens", milliseconds, "ms", 100)
    if min(megabytes) >= 0:
        yield limit_row("open a source: more memory", megabytes, "MB", 30)


def packs(folder: Path, rounds: int) -> Iterator[Row]:
    """Open a pack of 30,720 blobs, locate experts in it at random, write a manifest of it."""
    source, layout = models.write_many(folder)
    pack = folder / "many"
    run((*MOEPACK, "pack", source, "-o", pack, "--layout", layout))
    numbers = zip(*(fresh(_OPEN_PACK, pack) for _ in range(rounds)), strict=True)
    opened, blob, part = numbers
    yield limit_row("open a pack, 30,720 blobs", opened, "ms", 5)
    yield limit_row("locate a blob", blob, "us", 2)
    yield limit_row("locate a part", part, "us", 2)
    command = (*MOEPACK, "export", "anemll", pack, "-o", folder / "anemll.json", "--force")
    exports = [run(command).seconds * 1e3 for _ in range(rounds)]
    yield limit_row("export anemll, 30,720 blobs", exports, "ms", 1000)


def starting(rounds: int) -> Iterator[Row]:
    """Import the library; run the command line for its help."""
    imports = [fresh(_IMPORT)[0] for _ in range(rounds)]
    yield limit_row("import Pack and Reader", imports, "ms", 60)
    helps = [run((*MOEPACK, "--help")).seconds * 1e3 for _ in range(rounds)]
    yield limit_row("moepack --help", helps, "ms", 200)
