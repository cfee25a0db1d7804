"""`python -m benchmarks`: measure against peers and limits, each pair in one run.

Ends with status 1 where a limit is not met.
"""

import argparse
import os
import platform
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from benchmarks import everything
from benchmarks.table import HEADING, Machine, Outcome, cells, ending, line
from moepack.bench.diagnosis.system import check_file_system
from moepack.host.processors import OtherWork, cpu_count
from moepack.report.facts import json_text


def main() -> int:
    """Measure, print each row as it is known, and end with the limits that are not met.

    With --json the table goes to standard error, and all of it to standard output as one object.
    """
    options = _options()
    table = sys.stderr if options.json else sys.stdout
    others = OtherWork()
    machine = _machine(options.folder)
    print(_heading(machine), cells(HEADING), sep="\n\n", file=table)
    rows = []
    with tempfile.TemporaryDirectory(prefix="moepack-bench-", dir=options.folder) as folder:
        for row in everything.rows(Path(folder), options.layers, options.rounds, options.trace):
            print(line(row), file=table, flush=True)
            rows.append(row)
    busy = others.processor_count(sum(os.times()[2:4]))
    outcome = Outcome(machine, tuple(rows), None if busy is None else busy / cpu_count())
    print(ending(outcome), file=table)
    if options.json:
        print(json_text(outcome))
    return outcome.exit_code


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--layers", type=int, default=6, help="of the model, 0.37 GB each")
    parser.add_argument("--rounds", type=int, default=5, help="measured runs of each side")
    parser.add_argument(
        "--folder", type=Path, default=Path(tempfile.gettempdir()), help="on the disk to measure"
    )
    parser.add_argument("--trace", type=Path, help="of the routing that a model repeats")
    parser.add_argument("--json", action="store_true", help="print one JSON object as well")
    return parser.parse_args()


def _machine(folder: Path) -> Machine:
    return Machine(
        machine=f"{_processor()}, {os.cpu_count()} CPUs",
        kernel=f"{platform.system()} {platform.release()}",
        file_system=check_file_system(folder).measured or "unknown",
        huge_pages=_huge_pages(),
        python=platform.python_version(),
    )


def _heading(machine: Machine) -> str:
    facts = asdict(machine).items()
    return "\n".join(f"{name.replace('_', ' ') + ':':13}{fact}" for name, fact in facts)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _huge_pages() -> str:
    try:
        words = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    except OSError:
        return "unknown"
    return words.partition("[")[2].partition("]")[0]


if __name__ == "__main__":
    sys.exit(main())
