"""Limits on the memory of programs, page cache included, and on their reads."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from moepack.common.errors import MachineError

_ROOT = Path("/sys/fs/cgroup")
_MEMORY_FILES = (
    (_ROOT, "memory.max", "memory.swap.max"),
    (_ROOT / "memory", "memory.limit_in_bytes", None),
)
"""The folder and the limits of both versions of control groups (cgroups(7))."""
_READ_FILES = (
    (_ROOT, "io.max", "{} rbps={}"),
    (_ROOT / "blkio", "blkio.throttle.read_bps_device", "{} {}"),
)
"""Their folder, the limit of reads, and its format."""


class ControlGroup:
    """Programs with common limits on memory, page cache included, and on reads.

    `folders` are those of the system's groups.
    """

    def __init__(self, folders: Iterable[Path]) -> None:
        self.folders = tuple(folders)

    def command(self, arguments: Sequence[str]) -> list[str]:
        """Return a command that runs `arguments` within the limits."""
        lists = [str(folder / "cgroup.procs") for folder in self.folders]
        script = "".join('echo $$ > "$1" && shift && ' for _ in lists) + 'exec "$@"'
        return ["sh", "-c", script, "sh", *lists, *arguments]


@contextlib.contextmanager
def control_group(
    memory: int | None = None, reads: Mapping[Path, int] | None = None
) -> Iterator[ControlGroup | None]:
    """Make a group of up to `memory` bytes, removed at the end of the block.

    `reads` are bytes a second for all its programs together, from the drive that a path lies on.
    Yields None if this process may not make one, or the system has none. Raises MachineError if
    `reads` cannot be limited, or not together with memory.
    """
    folders: set[Path] = set()
    try:
        is_limited = memory is None or _limit_memory(memory, folders)
        if reads is not None and not (_limit_reads(reads, folders) and is_limited):
            raise MachineError(
                "reads cannot be limited here",
                hint="this needs control groups for drives (io or blkio), and root's permission",
            )
        yield ControlGroup(folders) if is_limited else None
    finally:
        for folder in folders:
            with contextlib.suppress(OSError):  # what was killed just now may still be in it
                folder.rmdir()


def _limit_memory(length: int, folders: set[Path]) -> bool:
    for root, limit, swap in _MEMORY_FILES:
        if _limit(root, limit, [str(length)], folders):
            if swap is not None:
                with contextlib.suppress(OSError):  # there is no swap to limit
                    _put(_folder(root) / swap, "0")
            return True
    return False


def _limit_reads(reads: Mapping[Path, int], folders: set[Path]) -> bool:
    rates = {}
    for path, rate in reads.items():
        drive = _drive_of(path)
        if drive is None:
            raise MachineError("the system does not report which drive this is on", path=path)
        rates[(drive / "dev").read_text().strip()] = rate  # by the drive's number: `259:0`
    return any(
        _limit(root, limit, [form.format(*pair) for pair in rates.items()], folders)
        for root, limit, form in _READ_FILES
    )


def _limit(root: Path, name: str, lines: Sequence[str], folders: set[Path]) -> bool:
    """Make a group, unless it is among `folders`, and set a limit; return whether that worked."""
    folder = _folder(root)
    is_new = folder not in folders
    try:
        if is_new:
            folder.mkdir()
    except OSError:
        return False
    try:
        for line in lines:
            _put(folder / name, line)
    except OSError:
        if is_new:
            folder.rmdir()
        return False
    folders.add(folder)
    return True


def _folder(root: Path) -> Path:
    return root / f"moepack-bench-{os.getpid()}"


def _put(file: Path, text: str) -> None:
    # No file is made here: where there is no control group, there is a plain folder.
    with open(file, "r+") as opened:
        opened.write(text)


def _drive_of(path: Path) -> Path | None:
    """Return the folder in sysfs of the drive that a file lies on, or None."""
    number = path.stat().st_dev
    drive = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    try:
        drive = drive.resolve(strict=True)
    except OSError:
        return None
    return drive.parent if (drive / "partition").exists() else drive
