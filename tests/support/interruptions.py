"""Interruptions of this process at a chosen call, and a record of the calls that write."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

_WRITING = ("pwrite", "ftruncate", "fsync", "replace", "unlink", "symlink", "mkdir")


class StopHereError(Exception):
    """Raised by a test's progress callback."""


class CrashError(BaseException):
    """The process ends here."""


def crash_after(patch: pytest.MonkeyPatch, count: int) -> Callable[[], bool]:
    """Let the process end after `count` calls that write, a `pwrite` being half done then.

    Returns a function that returns whether it came so far.
    """
    left = count

    def crashing(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def step(*arguments: Any, **options: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                if name == "pwrite" and left == -1:
                    descriptor, data, offset = arguments
                    call(descriptor, data[: len(data) // 2], offset)
                raise CrashError
            return call(*arguments, **options)

        return step

    for name in _WRITING:
        patch.setattr(os, name, crashing(name, getattr(os, name)))
    return lambda: left < 0


def record_calls(patch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that syncs, writes, renames and removals are added to from now on."""
    events: list[str] = []

    def recording(describe: Callable[..., str], call: Callable[..., Any]) -> Callable[..., Any]:
        def step(*arguments: Any, **options: Any) -> Any:
            events.append(describe(*arguments))
            return call(*arguments, **options)

        return step

    def name_of(descriptor: int) -> str:
        return os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}"))

    described: dict[str, Callable[..., str]] = {
        "fsync": name_of,
        "pwrite": lambda descriptor, *_: f"write {name_of(descriptor)}",
        "replace": lambda old, new: f"{Path(old).name} -> {Path(new).name}",
        "unlink": lambda path, **_: f"remove {Path(path).name}",
    }
    for name, describe in described.items():
        patch.setattr(os, name, recording(describe, getattr(os, name)))
    return events
