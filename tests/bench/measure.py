"""Run commands in turns, and judge what they took against a peer or a limit."""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

MOEPACK = (sys.executable, "-m", "moepack")


class Run(NamedTuple):
    """One finished command: its wall time in seconds and its peak resident memory in bytes."""

    seconds: float
    peak: int


class Side(NamedTuple):
    """A command to be measured, and what to do before each time, unmeasured."""

    command: Sequence[str | Path]
    prepare: Callable[[], None] = lambda: None


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table; `met` is None for what has no limit or could not be measured."""

    name: str
    values: tuple[str, ...]
    limit: str = ""
    met: bool | None = None

    @property
    def verdict(self) -> str:
        """Say in a word how the limit was kept."""
        return {True: "met", False: "NOT met", None: ""}[self.met]


def run(command: Sequence[str | Path]) -> Run:
    """Run a command to its end; raise RuntimeError with its messages where it fails.

    The peak is that of the process or its children; the kernel counts from ours at the start.
    """
    start = time.perf_counter()
    process = subprocess.Popen(
        [str(word) for word in command], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    assert process.stderr is not None
    with process.stderr as stderr:
        messages = stderr.read().decode(errors="replace")
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - start
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{' '.join(process.args)}: exit code {process.returncode}: {messages}")
    return Run(seconds, usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024))


def in_turns(ours: Side, theirs: Side, rounds: int) -> tuple[list[Run], list[Run]]:
    """Run both sides once to warm up, then `rounds` times each: ABBA, ABBA, and so on."""
    runs: dict[bool, list[Run]] = {True: [], False: []}
    for number in range(-1, rounds):
        for is_ours in (True, False) if number % 2 else (False, True):
            side = ours if is_ours else theirs
            side.prepare()
            result = run(side.command)
            if number >= 0:
                runs[is_ours].append(result)
    return runs[True], runs[False]


def ratio_row(
    name: str, ours: Sequence[Run], theirs: Sequence[Run], length: int, limit: float
) -> Row:
    """Compare the times of two sides that both handled `length` bytes."""
    ratios = [a.seconds / b.seconds for a, b in zip(ours, theirs, strict=True)]
    seconds = [statistics.median(side.seconds for side in runs) for runs in (ours, theirs)]
    ratio = statistics.median(ratios)
    values = (
        *(f"{median:.2f} s, {length / median / 1e9:.2f} GB/s" for median in seconds),
        f"{ratio:.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
    )
    return Row(name, values, f"<= {limit:.2f}", ratio <= limit)


def limit_row(name: str, measured: Sequence[float], unit: str, limit: float) -> Row:
    """Compare the median of what was measured with a limit in the same unit."""
    median = statistics.median(measured)
    values = (f"{median:.4g} {unit}", "", f"({min(measured):.4g} to {max(measured):.4g})")
    return Row(name, values, f"<= {limit:g} {unit}", median <= limit)


def fresh(program: str, *arguments: str | Path) -> list[float]:
    """Run a Python program in a process of its own; give the numbers that it prints as JSON."""
    command = [sys.executable, "-c", program, *map(str, arguments)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return [float(number) for number in json.loads(done.stdout)]
