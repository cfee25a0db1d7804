"""A record: everything that a benchmark measured, where, when and by which command; kept as JSON.

Records in `benchmarks/records/` are what README.md and docs/numbers.md claim their numbers by
(`benchmarks/claims.py`). They are kept as they were written, but for rounds, and whole runs, that
somebody throws away: those stay, and are `excluded` or `thrown_away` with a reason.
"""

import json
import os
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any

from benchmarks.table import Row
from moepack.bench.diagnosis.system import check_file_system

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "benchmarks" / "records"


@dataclass(frozen=True, slots=True)
class Machine:
    """What was measured on. `huge_pages` is when the system gives them: who reads asks for them."""

    machine: str
    kernel: str
    file_system: str
    huge_pages: str
    python: str
    note: str


@dataclass(frozen=True, slots=True)
class Record:
    """One run of a benchmark.

    `has_changes` is whether its files differed from those of the commit. `load` is that before and
    after, None if it was not read; `other_load` is the share of the CPUs that other processes took.
    A run that is `thrown_away`, for the reason given, stays, and nothing can be claimed by it.
    """

    command: str
    commit: str
    has_changes: bool
    began: str
    seconds: float
    machine: Machine
    load: tuple[float, float] | None
    other_load: float | None
    rows: tuple[Row, ...]
    thrown_away: str = ""

    @property
    def missed(self) -> tuple[Row, ...]:
        """The rows whose limit is not met."""
        return tuple(row for row in self.rows if row.met is False)


@dataclass(frozen=True, slots=True)
class Published:
    """A result of earlier days, as it was printed: its rounds were not kept.

    `commit` of `date` brought it into the documents; `by` is what measured it.
    """

    topic: str
    text: str
    by: str
    commit: str
    date: str


def write(record: Record, path: Path) -> None:
    """Write a record, a row on each line."""
    facts = asdict(record)
    rows = [json.dumps(_without_defaults(row), ensure_ascii=False) for row in record.rows]
    facts["rows"] = "ROWS"
    text = json.dumps(facts, indent=1, ensure_ascii=False)
    path.write_text(text.replace('"ROWS"', "[\n  " + ",\n  ".join(rows) + "\n ]") + "\n")


def _without_defaults(row: Row) -> dict[str, Any]:
    facts = asdict(row)
    return {name: value for name, value in facts.items() if value or name in ("case", "what")}


def read(path: Path) -> Record:
    """Read a record. Raises ValueError for what is none."""
    facts = json.loads(path.read_text())
    _require_fields(path, facts, Record)
    rows, machine = rows_of(path, facts.pop("rows")), Machine(**facts.pop("machine"))
    return Record(rows=tuple(rows), machine=machine, **facts)


def rows_of(path: Path, rows: Sequence[dict[str, Any]]) -> list[Row]:
    """Return the rows of a record. Raises ValueError for fields and rounds that are wrong."""
    found = []
    for facts in rows:
        _require_fields(path, facts, Row)
        excluded = {int(number): why for number, why in facts.get("excluded", {}).items()}
        found.append(Row(**{**facts, "excluded": excluded}))
        _check_rounds(path, found[-1])
    return found


def read_published(path: Path) -> list[Published]:
    """Read results of earlier days. Raises ValueError for what is none."""
    results = json.loads(path.read_text())["published; the rounds were not kept"]
    for one in results:
        _require_fields(path, one, Published)
    return [Published(**one) for one in results]


def _require_fields(path: Path, facts: dict[str, Any], kind: Any) -> None:
    required = {
        one.name
        for one in fields(kind)
        if one.default is MISSING and one.default_factory is MISSING
    }
    allowed = {one.name for one in fields(kind)}
    if not required <= set(facts) <= allowed:
        raise ValueError(f"{path.name}: fields {sorted(facts)} instead of {sorted(allowed)}")


def _check_rounds(path: Path, row: Row) -> None:
    name = f"{path.name}, {row.case}: {row.what}"
    if not row.ours and not row.note:
        raise ValueError(f"{name}: nothing was measured, and no reason is given")
    if row.theirs and len(row.theirs) != len(row.ours):
        raise ValueError(f"{name}: {len(row.ours)} rounds against {len(row.theirs)}")
    for number, why in row.excluded.items():
        if not (1 <= number <= len(row.ours) and why.strip()):
            raise ValueError(f"{name}: round {number} is excluded: {why!r}")
    if row.ours and row.value is None:
        raise ValueError(f"{name}: all rounds are excluded")


def commit() -> tuple[str, bool]:
    """Return the commit of this checkout, and whether files of it were changed."""
    others = ("--", ".", ":!benchmarks/records")
    changes = _git("status", "--porcelain", "--untracked-files=no", *others)
    return _git("rev-parse", "HEAD") or "unknown", bool(changes)


def _git(*words: str) -> str:
    command = ("git", "-C", str(ROOT), *words)
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    return done.stdout.strip()


def machine(folder: Path, note: str) -> Machine:
    """Return the facts of this machine, and of the disk that a folder lies on."""
    return Machine(
        machine=f"{_processor()}, {os.cpu_count()} CPUs, {_memory()}",
        kernel=f"{platform.system()} {platform.release()}",
        file_system=check_file_system(folder).measured or "unknown",
        huge_pages=_huge_pages(),
        python=platform.python_version(),
        note=note,
    )


def _memory() -> str:
    return f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / (1 << 30):.0f} GiB"


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
