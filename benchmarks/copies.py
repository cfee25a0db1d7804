"""Packing, restoring and exporting against `cp`, verifying against `cmp` and plain reading."""

import os
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from benchmarks.measure import MOEPACK, Run, Side, against, time_row
from benchmarks.table import Row
from moepack.storage import page_cache

LAYOUTS = ("layers", "hot-first")
PEAK_LIMIT = 100
Command = tuple[str | Path, ...]
_COPY = 'to=$1; shift; mkdir "$to" && cp "$@" "$to" && sync "$to"/*'
_COMPARE = 'with=$1; shift; for file; do cmp "$file" "$with/${file##*/}" || exit; done'
_READ = 'for file; do dd bs=1M of=/dev/null status=none if="$file" || exit; done'


def packing(shards: list[Path], hotness: Path, folder: Path, rounds: int) -> Iterator[Row]:
    """Compare `moepack pack` with `cp` of the same shards and a sync of the copies.

    Leaves the last copy in `folder`/copy and the last packs in `folder`/<layout>.
    """
    for layout in LAYOUTS:
        command = ("pack", shards[0], "--layout", layout, "--hotness", hotness)
        yield from _writing(f"`pack`, `{layout}`", command, shards, folder, layout, rounds)


def giving_back(folder: Path, rounds: int) -> Iterator[Row]:
    """Compare `moepack restore` and the export of one GGUF with the same copying.

    Both read the pack in `folder`/layers, which `packing` left: as much as the shards, cached.
    """
    pack = folder / LAYOUTS[0]
    files = sorted(pack.glob("*.bin"))
    for target, command in (("restored", ("restore",)), ("exported.gguf", ("export", "gguf"))):
        name = f"`{' '.join(command)}`"
        yield from _writing(name, (*command, pack), files, folder, target, rounds)
        _remove(folder / target)


def _writing(
    name: str, command: Command, files: list[Path], folder: Path, target: str, rounds: int
) -> Iterator[Row]:
    """Compare a command that reads `files` and writes `target` with copying and syncing them."""
    copy, written = folder / "copy", folder / target
    theirs = Side(("sh", "-c", _COPY, "sh", copy, *files), partial(_prepare, copy, written, files))
    ours = Side((*MOEPACK, *command, "-o", written), partial(_prepare, written, copy, files))
    measured, copied = against(ours, theirs, rounds)
    case = f"{name}: `cp` and `sync`"
    yield time_row(case, measured, copied, 1.0)
    yield Row(case, "memory", "MiB", _peaks(measured), limit=PEAK_LIMIT)


def verifying(shards: list[Path], folder: Path, rounds: int) -> Iterator[Row]:
    """Compare `moepack verify` with `cmp` and with reading; all bytes are in the page cache.

    `cmp` compares the shards with their copies: as many bytes on each side as `verify` compares of
    a whole pack and its shards.
    """
    pack = folder / LAYOUTS[0]
    verify = (*MOEPACK, "verify", pack)
    ours = Side((*verify, "--source", shards[0]))
    theirs = Side(("sh", "-c", _COMPARE, "sh", folder / "copy", *shards))
    yield time_row("`verify --source`: `cmp`, cached", *against(ours, theirs, rounds), 0.5)
    files = sorted(pack.glob("*.bin"))
    reading = Side(("sh", "-c", _READ, "sh", *files))
    yield time_row(
        "`verify`: `dd` of its files, cached", *against(Side(verify), reading, rounds), 1.5
    )


def _peaks(runs: list[Run]) -> list[float]:
    """Return the peak of each run, in MiB."""
    return [run.peak / (1 << 20) for run in runs]


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
