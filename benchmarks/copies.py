"""Packing against `cp`, verifying against `cmp` and against plain reading."""

import os
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from benchmarks.measure import MOEPACK, Run, Side, against, limit_row, ratio_row
from benchmarks.table import Row

LAYOUTS = ("layers", "hot-first")
PEAK_LIMIT = 200
_COPY = 'to=$1; shift; mkdir "$to" && cp "$@" "$to" && sync "$to"/*'
_COMPARE = 'with=$1; shift; for file; do cmp "$file" "$with/${file##*/}" || exit; done'
_READ = 'for file; do dd bs=1M of=/dev/null status=none if="$file" || exit; done'


def packing(
    place: str, shards: list[Path], hotness: Path, folder: Path, rounds: int
) -> Iterator[Row]:
    """Compare `moepack pack` with `cp` of the same shards and a sync of the copies.

    Leaves the last copy in `folder`/copy and the last packs in `folder`/<layout>.
    """
    copy = folder / "copy"
    for layout in LAYOUTS:
        pack = folder / layout
        theirs = Side(
            ("sh", "-c", _COPY, "sh", copy, *shards), partial(_prepare, copy, pack, shards)
        )
        options = ("--layout", layout, "--hotness", hotness)
        ours = Side(
            (*MOEPACK, "pack", shards[0], "-o", pack, *options),
            partial(_prepare, pack, copy, shards),
        )
        packed, copied = against(ours, theirs, rounds)
        name = f"pack {layout}, {place}"
        yield ratio_row(f"{name}: cp + sync", packed, copied, _length(shards), 1.0)
        yield _peak_row(f"{name}: memory", packed)


def verifying(shards: list[Path], folder: Path, rounds: int) -> Iterator[Row]:
    """Compare `moepack verify` with `cmp` and with reading; all bytes are in the page cache.

    `cmp` compares the shards with their copies: as many bytes on each side as `verify` compares of
    a whole pack and its shards.
    """
    pack = folder / LAYOUTS[0]
    verify = (*MOEPACK, "verify", pack)
    length = _length(shards)
    ours = Side((*verify, "--source", shards[0]))
    theirs = Side(("sh", "-c", _COMPARE, "sh", folder / "copy", *shards))
    yield ratio_row("verify --source: cmp, cached", *against(ours, theirs, rounds), length, 0.5)
    files = sorted(pack.glob("*.bin"))
    reading = Side(("sh", "-c", _READ, "sh", *files))
    yield ratio_row(
        "verify: dd bs=1M of its files, cached",
        *against(Side(verify), reading, rounds),
        _length(files),
        1.5,
    )


def _peak_row(name: str, runs: list[Run]) -> Row:
    """Judge the largest peak of all runs."""
    return limit_row(name, [max(run.peak for run in runs) / (1 << 20)], "MiB", PEAK_LIMIT)


def _prepare(target: Path, other: Path, shards: list[Path]) -> None:
    """Let a side find what the other found: no target, a quiet disk, and the shards cached.

    A virtual machine gives free memory back to its host and gets it again slowly. So as many bytes
    as the target will need are freed just now, from what is cached of the other side's.
    """
    shutil.rmtree(target, ignore_errors=True)
    os.sync()
    for shard in shards:
        _read(shard)
    for path in other.glob("*"):
        _forget(path)


def _read(path: Path) -> None:
    buffer = bytearray(1 << 20)
    with open(path, "rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def _forget(path: Path) -> None:
    """Drop a synced file from the page cache, where the system can."""
    if hasattr(os, "posix_fadvise"):
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _length(paths: list[Path]) -> int:
    return sum(path.stat().st_size for path in paths)
