"""Limits on programs that are measured: memory, with all that the system caches for them; reads."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from moepack.bench.disturbance import drive_of
from moepack.errors import MachineError

_ROOT = Path("/sys/fs/cgroup")
_MEMORY_FILES = (
    (_ROOT, "memory.max", "memory.swap.max"),
    (_ROOT / "memory", "memory.limit_in_bytes", None),
)
"""Of both versions of control groups (cgroups(7)): where they are, and their limits."""
_READ_FILES = (
    (_ROOT, "io.max", "{} rbps={}"),
    (_ROOT / "blkio", "blkio.throttle.read_bps_device", "{} {}"),
)
"""Of both versions: where they are, the limit of reads, and how it is written."""
_EVENTS = ("memory.events", "memory.oom_control")
"""Of both versions, the files that count processes which were killed."""
_SYSTEM_EVENTS = Path("/proc/vmstat")
_KILLS = "oom_kill"


class ReadLimit(NamedTuple):
    """The bytes a second that programs get together from each drive that `paths` lie on."""

    rate: int
    paths: Sequence[Path]


class ControlGroup:
    """Programs with limits in common; what the system caches for them counts as their memory.

    Reads count past the page cache and through it, also those of mapped files.
    """

    def __init__(self, folders: Iterable[Path]) -> None:
        self._folders = tuple(folders)

    def command(self, arguments: Sequence[str]) -> list[str]:
        """Return a command that runs `arguments` within the limits."""
        lists = [str(folder / "cgroup.procs") for folder in self._folders]
        script = "".join('echo $$ > "$1" && shift && ' for _ in lists) + 'exec "$@"'
        return ["sh", "-c", script, "sh", *lists, *arguments]

    @property
    def kill_count(self) -> int:
        """How many of its processes were killed for want of memory."""
        return sum(_kill_count(folder / name) for folder in self._folders for name in _EVENTS)


def kill_count(group: ControlGroup | None) -> int:
    """Return how many processes were killed for want of memory: in a group, or in the system.

    0 where the system does not say.
    """
    return _kill_count(_SYSTEM_EVENTS) if group is None else group.kill_count


def _kill_count(file: Path) -> int:
    try:
        words = file.read_text().split()
        return int(words[words.index(_KILLS) + 1])
    except (OSError, ValueError):
        return 0


@contextlib.contextmanager
def control_group(
    memory: int | None = None, reads: ReadLimit | None = None
) -> Iterator[ControlGroup | None]:
    """Make a group for a while, of up to `memory` bytes.

    None where there is none: this process may not make one, or the system has none. Raises
    MachineError where `reads` cannot be limited, or not together with memory.
    """
    folders: set[Path] = set()
    try:
        is_limited = memory is None or _limit_memory(memory, folders)
        if reads is not None and not (_limit_reads(reads, folders) and is_limited):
            raise MachineError(
                "reads cannot be limited here",
                hint="it takes control groups for drives (io or blkio), and a right such as root's",
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


def _limit_reads(reads: ReadLimit, folders: set[Path]) -> bool:
    numbers = sorted({_number(path) for path in reads.paths})
    return any(
        _limit(root, limit, [form.format(number, reads.rate) for number in numbers], folders)
        for root, limit, form in _READ_FILES
    )


def _number(path: Path) -> str:
    """Return the number of the drive that a file lies on: `259:0`."""
    drive = drive_of(path)
    if drive is None:
        raise MachineError("the system does not tell which drive this is on", path=path)
    return (drive / "dev").read_text().strip()


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
