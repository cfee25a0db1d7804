"""The digest of moepack.h against Python's xxhash: the same bytes, of one thread's time."""

import ctypes
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from random import Random

import xxhash

from benchmarks.table import Row
from moepack.bench.measuring import in_turns

LIMIT = 0.06
_INCLUDE = Path(__file__).parents[1] / "include"
_GIB = 1 << 30
_FLAGS = ("-O2", "-shared", "-fPIC", "-std=gnu99", f"-I{_INCLUDE}")

Digest = Callable[[bytes], int]


def digests(folder: Path, rounds: int) -> Iterator[Row]:
    """Digest 1 MiB again and again, and 1 GiB at once, which no cache holds.

    What memory gives bounds the second, whatever the code: it has no limit.
    """
    if shutil.which("cc") is None:
        yield Row("digest in C", "Python's xxhash", note="there is no C compiler")
        return
    ours = _compile(folder)
    part = Random(0).randbytes(1 << 20)
    yield from _compare("digest in C, of cached bytes", ours, part, 1024, rounds, LIMIT)
    yield from _compare("digest in C, of others", ours, part * 1024, 1, rounds, None)


def _compile(folder: Path) -> Digest:
    """Compile the header as its users do; return its digest as a function."""
    source, library = folder / "digest.c", folder / "digest.so"
    source.write_text('#define MOEPACK_IMPLEMENTATION\n#include "moepack.h"\n')
    subprocess.run(["cc", *_FLAGS, source, "-o", library], check=True)
    function = ctypes.CDLL(str(library)).moepack_xxh3
    function.argtypes, function.restype = (ctypes.c_char_p, ctypes.c_size_t), ctypes.c_uint64
    return lambda data: int(function(data, len(data)))


def _compare(
    name: str, ours: Digest, data: bytes, times: int, rounds: int, limit: float | None
) -> Iterator[Row]:
    theirs: Digest = xxhash.xxh3_64_intdigest
    if ours(data) != theirs(data):
        raise RuntimeError(f"{name}: the digests differ")
    sides = {
        "ours": partial(_time, ours, data, times),
        "theirs": partial(_time, theirs, data, times),
    }
    taken = in_turns(sides, rounds)
    yield Row(name, "moepack.h", "s/GiB", taken["ours"], limit=limit)
    yield Row(name, "Python's xxhash", "s/GiB", taken["ours"], taken["theirs"])


def _time(digest: Digest, data: bytes, times: int) -> float:
    """Return the CPU time in seconds for each GiB."""
    start = time.process_time()
    for _ in range(times):
        digest(data)
    return (time.process_time() - start) * _GIB / (len(data) * times)
