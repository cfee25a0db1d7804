"""What all benchmarks have in common: their options, the table that they print, and the record.

A module that is a program has `parser`, which makes its options, and `rows`, which measures by
them; a record's command is checked by the first.
"""

import argparse
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from benchmarks import record
from benchmarks.record import Record
from benchmarks.table import HEADING, Row, cells, limit_text, line, number_text
from moepack.host.processors import OtherWork, cpu_count

_NOT_OF_THE_COMMAND = ("--record", "--note")


def new_parser(name: str, doc: str | None) -> argparse.ArgumentParser:
    """Make the parser of `python -m NAME`, with the options that all have."""
    parser = argparse.ArgumentParser(prog=f"python -m {name}", description=doc, allow_abbrev=False)
    parser.add_argument("--record", type=Path, help="the file to keep all rounds in, as JSON")
    parser.add_argument("--note", default="", help="about the machine, for the record")
    parser.add_argument(
        "--folder", type=Path, default=Path(tempfile.gettempdir()), help="on the disk to measure"
    )
    return parser


def measure(
    parser: argparse.ArgumentParser, rows: Callable[[argparse.Namespace], Iterator[Row]]
) -> int:
    """Measure, print each row as it is known, keep the record; return the exit code.

    That is 1 where a limit is not met; what could not be measured misses none.
    """
    options = parser.parse_args()
    others, began, start = OtherWork(), datetime.now(UTC), time.perf_counter()
    machine, load = record.machine(options.folder, options.note), os.getloadavg()[0]
    facts = asdict(machine).items()
    print("\n".join(f"{name.replace('_', ' ') + ':':13}{fact}" for name, fact in facts))
    print("", cells(HEADING), sep="\n", flush=True)
    measured = []
    for row in rows(options):
        print(line(row), flush=True)
        measured.append(row)
    busy = others.processor_count(sum(os.times()[2:4]))
    commit, has_changes = record.commit()
    result = Record(
        command=command(parser.prog, sys.argv[1:]),
        commit=commit,
        has_changes=has_changes,
        began=f"{began:%Y-%m-%dT%H:%M:%SZ}",
        seconds=round(time.perf_counter() - start, 1),
        machine=machine,
        load=(load, os.getloadavg()[0]),
        other_load=None if busy is None else round(busy / cpu_count(), 3),
        rows=tuple(measured),
    )
    print(_ending(result))
    if options.record is not None:
        record.write(result, options.record)
    return 1 if result.missed else 0


def command(program: str, words: list[str]) -> str:
    """Return the command, for a record: files are named, but not where they lie."""
    kept: list[str] = []
    previous = ""
    for word in words:
        if previous not in _NOT_OF_THE_COMMAND and word.split("=")[0] not in _NOT_OF_THE_COMMAND:
            kept.append(Path(word).name if word.startswith("/") else word)
        previous = word
    return shlex.join([*program.split(), *kept])


def _ending(result: Record) -> str:
    lines = []
    if result.load is not None:
        lines.append(f"load {result.load[0]:.1f} before, {result.load[1]:.1f} after")
    if result.other_load is not None:
        lines.append(f"other processes took {result.other_load:.0%} of the CPUs meanwhile")
    lines.append(f"limits met: {sum(row.met is True for row in result.rows)}")
    for row in result.missed:
        assert row.value is not None
        median = number_text(row.value.median)
        lines.append(f"NOT met: {row.case}: {row.what}: {median}, limit {limit_text(row)}")
    return "\n".join(lines)
