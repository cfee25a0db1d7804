"""Packing, restoring and exporting against `cp`, verifying against `cmp` and plain reading."""

import os
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from benchmarks.measure import MOEPACK, Run, Side, against, limit_row, ratio_row
from benchmarks.table import Row
from moepack.storage import page_cache

LAYOUTS = ("layers", "hot-first")
PEAK_LIMIT = 100
Command = tuple[str | Path, ...]
_COPY = 'to=$1; shift; mkdir "$to" && cp "$@" "$to" && sync "$to"/*'
_COMPARE = 'with=$1; shift; for file; do cmp "$file" "$with/${file##*/}" || exit; done'
_READ = 'for file; do dd bs=1M of=/dev/null status=none if="$file" || exit; done'


def packing(
    place: str, shards: list[Path], hotness: Path, folder: Path, rounds: int
) -> Iterator[Row]:
    """Compare `moepack pack` with `cp` of the same shards and a sync of the copies.

    Leaves the last copy in `folder`/copy and the last packs in `folder`/<layout>.
    """
    for layout in LAYOUTS:
        command = ("pack", shards[0], "--layout", layout, "--hotness", hotness)
        yield from _writing(f"pack {layout}, {place}", command, shards, folder, layout, rounds)


def giving_back(place: str, shards: list[Path], folder: Path, rounds: int) -> Iterator[Row]:
    """Compare `moepack restore` and some exports with the same copying.

    All read the pack in `folder`/layers, which `packing` left: as much as the shards, cached. One
    writes a file for each expert, of which `cp` has a hundred times fewer.
    """
    pack = folder / LAYOUTS[0]
    files = sorted(pack.glob("*.bin"))
    for target, command, limit in (
        ("restored", ("restore",), 1.0),
        ("exported.gguf", ("export", "gguf"), 1.0),
        ("exported.pack", ("export", "ggmlmoepack"), 1.0),
        ("stream", ("export", "moe-stream-dir"), 1.0),
        ("flash", ("export", "moe-flash", "--alignment", "4KiB"), 2.0),
    ):
        name = f"{' '.join(command[:2])}, {place}"
        yield from _writing(name, (*command, pack), files, folder, target, rounds, limit)
        _remove(folder / target)


def _writing(
    name: str,
    command: Command,
    files: list[Path],
    folder: Path,
    target: str,
    rounds: int,
    limit: float = 1.0,
) -> Iterator[Row]:
    """Compare a command that reads `files` and writes `target` with copying and syncing them."""
    copy, written = folder / "copy", folder / target
    theirs = Side(("sh", "-c", _COPY, "sh", copy, *files), partial(_prepare, copy, written, files))
    ours = Side((*MOEPACK, *command, "-o", written), partial(_prepare, written, copy, files))
    measured, copied = against(ours, theirs, rounds)
    yield ratio_row(f"{name}: cp + sync", measured, copied, _length(files), limit)
    yield limit_row(f"{name}: memory", [_peak(measured)], "MiB", PEAK_LIMIT)


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


def _peak(runs: list[Run]) -> float:
    """Return the largest peak of all runs, in MiB."""
    return max(run.peak for run in runs) / (1 << 20)


def _prepare(target: Path, other: Path, files: list[Path]) -> None:
    """Let a side find what the other found: no target, a quiet disk, and what it reads cached.

    A virtual machine gives free memory back to its host and gets it again slowly. So as many bytes
    as the target will need are freed just now, from what is cached of the other side's.
    """
    _remove(target)
    os.sync()
    for file in files:
        _read(file)
    page_cache.drop(path for path in (other, *other.glob("*")) if path.is_file())


def _remove(target: Path) -> None:
    if target.is_dir():
        shutil.rmtree(target)
    else:
        target.unlink(missing_ok=True)


def _read(path: Path) -> None:
    buffer = bytearray(1 << 20)
    with open(path, "rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def _length(paths: list[Path]) -> int:
    return sum(path.stat().st_size for path in paths)
