"""Interruptions of this process at a chosen call, and a record of the calls that write."""

import itertools
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


def before_each(
    patch: pytest.MonkeyPatch, work: Callable[..., object], *calls: tuple[Any, str]
) -> None:
    """Do `work` before each of some calls, with the call's name and arguments.

    A call is a function or a method by who has it and its name. What `work` raises, it raises.
    """

    def preceded(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def step(*arguments: Any, **options: Any) -> Any:
            work(name, *arguments)
            return call(*arguments, **options)

        return step

    for owner, name in calls:
        patch.setattr(owner, name, preceded(name, getattr(owner, name)))


def fail_at(
    patch: pytest.MonkeyPatch, number: int, error: Exception, call: tuple[Any, str]
) -> None:
    """Let a call fail when it is made for the `number`-th time, and at no other time."""
    numbers = itertools.count(1)

    def step(*_: object) -> None:
        if next(numbers) == number:
            raise error

    before_each(patch, step, call)


def crash_after(patch: pytest.MonkeyPatch, count: int) -> Callable[[], bool]:
    """Let the process end after `count` calls that write, a `pwrite` being half done then.

    Returns a function that returns whether it came so far.
    """
    left, pwrite = count, os.pwrite

    def step(name: str, *arguments: Any) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            if name == "pwrite" and left == -1:
                descriptor, data, offset = arguments
                pwrite(descriptor, data[: len(data) // 2], offset)
            raise CrashError

    before_each(patch, step, *((os, name) for name in _WRITING))
    return lambda: left < 0


def record_calls(patch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that syncs, writes, renames and removals are added to from now on."""
    events: list[str] = []

    def name_of(descriptor: int) -> str:
        return os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}"))

    described: dict[str, Callable[..., str]] = {
        "fsync": name_of,
        "pwrite": lambda descriptor, *_: f"write {name_of(descriptor)}",
        "replace": lambda old, new: f"{Path(old).name} -> {Path(new).name}",
        "unlink": lambda path: f"remove {Path(path).name}",
    }

    def step(name: str, *arguments: Any) -> None:
        events.append(described[name](*arguments))

    before_each(patch, step, *((os, name) for name in described))
    return events
