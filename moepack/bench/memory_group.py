"""A limit on the memory of programs that are measured, with all that the system caches for them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

_ROOTS = (
    (Path("/sys/fs/cgroup"), "memory.max", "memory.swap.max"),
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", None),
)
"""Of both versions of control groups (cgroups(7)): where they are, and their limits."""
_EVENTS = ("memory.events", "memory.oom_control")
"""Of both versions, the files that count processes which were killed."""
_SYSTEM_EVENTS = Path("/proc/vmstat")
_KILLS = "oom_kill"


class MemoryGroup:
    """A control group of up to so many bytes; its programs and their page cache count."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def command(self, arguments: Sequence[str]) -> list[str]:
        """Return a command that runs `arguments` within the limit."""
        script = 'echo $$ > "$0" && exec "$@"'
        return ["sh", "-c", script, str(self._folder / "cgroup.procs"), *arguments]

    @property
    def kill_count(self) -> int:
        """How many of its processes were killed for want of memory."""
        return sum(_kill_count(self._folder / name) for name in _EVENTS)


def kill_count(group: MemoryGroup | None) -> int:
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
def memory_group(length: int) -> Iterator[MemoryGroup | None]:
    """Make a group for a while; None where this process may not, or the system has none."""
    folder = _make(length)
    if folder is None:
        yield None
        return
    try:
        yield MemoryGroup(folder)
    finally:
        with contextlib.suppress(OSError):  # what was killed just now may still be in it
            folder.rmdir()


def _put(file: Path, text: str) -> None:
    with open(file, "r+") as opened:
        opened.write(text)


def _make(length: int) -> Path | None:
    for root, limit, swap in _ROOTS:
        folder = root / f"moepack-bench-{os.getpid()}"
        try:
            folder.mkdir()
        except OSError:
            continue
        try:
            # No file is made here: where there is no control group, there is a plain folder.
            _put(folder / limit, str(length))
            if swap is not None:
                with contextlib.suppress(OSError):  # there is no swap to limit
                    _put(folder / swap, "0")
            return folder
        except OSError:
            folder.rmdir()
    return None
