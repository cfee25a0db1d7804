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


class MemoryGroup:
    """A control group of up to so many bytes; its programs and their page cache count."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def command(self, arguments: Sequence[str]) -> list[str]:
        """Return a command that runs `arguments` within the limit."""
        script = 'echo $$ > "$0" && exec "$@"'
        return ["sh", "-c", script, str(self._folder / "cgroup.procs"), *arguments]


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
