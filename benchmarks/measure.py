"""Run commands in turns, and judge what they took against a peer or a limit."""

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from benchmarks.table import Row
from moepack.bench.control_group import ControlGroup
from moepack.bench.measuring import in_turns

MOEPACK = (sys.executable, "-m", "moepack")

# A peak counts from the memory of the process that starts another: ours is large, this one's not.
_LAUNCH = """
import os, subprocess, sys, time
start = time.perf_counter()
process = subprocess.Popen(sys.argv[1:], stdout=subprocess.DEVNULL)
_, status, usage = os.wait4(process.pid, 0)
seconds = time.perf_counter() - start
print([seconds, usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)])
sys.exit(os.waitstatus_to_exitcode(status))
"""


class Run(NamedTuple):
    """One finished command: wall time in seconds, peak resident memory in bytes."""

    seconds: float
    peak: float


class Side(NamedTuple):
    """A command to be measured, and what to do before each time, unmeasured."""

    command: Sequence[str | Path]
    prepare: Callable[[], None] = lambda: None


def fresh(
    program: str,
    *arguments: str | Path,
    options: Sequence[str] = (),
    group: ControlGroup | None = None,
) -> list[float]:
    """Run a Python program in a process of its own; return the numbers that it prints as JSON.

    It is limited as `group` is. Raises RuntimeError with its messages where it fails.
    """
    command = [sys.executable, *options, "-c", program, *map(str, arguments)]
    if group is not None:
        command = group.command(command)
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: exit code {done.returncode}: {done.stderr}")
    return [float(number) for number in json.loads(done.stdout)]


def run(command: Sequence[str | Path]) -> Run:
    """Run a command to its end; raise RuntimeError with its messages where it fails."""
    return Run(*fresh(_LAUNCH, *command, options=("-I", "-S")))


def against(ours: Side, theirs: Side, rounds: int) -> tuple[list[Run], list[Run]]:
    """Run both sides once to warm up, then `rounds` times each, in turns."""
    sides = {"theirs": partial(_run_side, theirs), "ours": partial(_run_side, ours)}
    for side in reversed(list(sides.values())):
        side()
    runs = in_turns(sides, rounds)
    return runs["ours"], runs["theirs"]


def _run_side(side: Side) -> Run:
    side.prepare()
    return run(side.command)


def time_row(case: str, ours: Sequence[Run], theirs: Sequence[Run], limit: float) -> Row:
    """Compare the times of two sides that both handle the same bytes."""
    mine, others = ([run.seconds for run in runs] for runs in (ours, theirs))
    return Row(case, "time", "s", mine, others, limit=limit)


def speed_row(
    case: str,
    peer: str,
    ours: Sequence[float],
    theirs: Sequence[float],
    limit: float | None = None,
) -> Row:
    """Compare speeds in bytes a second, by how many times as fast as the peer ours was."""
    mine, others = ([speed / 1e9 for speed in side] for side in (ours, theirs))
    return Row(case, peer, "GB/s", mine, others, limit=limit, higher_is_better=True)
