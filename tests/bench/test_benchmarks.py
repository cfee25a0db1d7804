"""`make bench`: when it fails, and what it prints. Its measurements take minutes: not here."""

import json
import runpy
import sys
from pathlib import Path

import pytest

from benchmarks import everything, header
from benchmarks.measure import Run, limit_row, ratio_row
from benchmarks.table import HEADING, Machine, Outcome, Row, cells, ending, line
from moepack.bench.measuring import Spread

ROOT = Path(__file__).parents[2]

MET = limit_row("import moepack", [40, 50, 70], "ms", 60)
MISSED = limit_row("locate a part", [2, 3, 4], "us", 2)
NOT_MEASURED = Row("random direct reads: fio", "fio is not installed")


@pytest.mark.parametrize(
    ("median", "higher_is_better", "is_met"),
    [(1.0, False, True), (1.01, False, False), (1.0, True, True), (0.99, True, False)],
)
def test_the_median_is_judged_by_the_limit(
    median: float, higher_is_better: bool, is_met: bool
) -> None:
    value = Spread(median, 0.5, 2.0)
    row = Row("name", "1 s", value=value, limit=1.0, higher_is_better=higher_is_better)
    assert row.met is is_met


def test_two_sides_are_compared_round_by_round() -> None:
    ours, theirs = [Run(1, 0), Run(4, 0), Run(2, 0)], [Run(2, 0), Run(2, 0), Run(2, 0)]
    row = ratio_row("pack: cp", ours, theirs, 2_000_000_000, 0.9)
    assert row.value == (1.0, 0.5, 2.0)
    assert (row.moepack, row.peer) == ("2.00 s, 1.00 GB/s", "2.00 s, 1.00 GB/s")
    assert row.met is False
    assert line(row).endswith("1.00 (0.50 to 2.00)     <= 0.90       NOT met")


def test_the_table_says_what_was_measured_and_what_was_missed() -> None:
    assert " ".join(line(MET).split()) == "import moepack 50 ms (40 to 70) <= 60 ms met"
    assert line(MISSED).endswith("(2 to 4)                <= 2 us       NOT met")
    assert line(NOT_MEASURED) == f"{'random direct reads: fio':<40}  fio is not installed"
    assert cells(HEADING).startswith("what: against what")
    machine = Machine("a processor, 2 CPUs", "Linux 6.18", "ext4", "madvise", "3.11")
    text = ending(Outcome(machine, (MET, MISSED, NOT_MEASURED), other_load=0.25))
    assert text.startswith("other processes took 25% of the CPUs meanwhile")
    assert text.endswith("\nlimits met: 1\nNOT met: locate a part: 3 us, limit <= 2 us")


@pytest.mark.parametrize(("row", "status"), [(MET, 0), (MISSED, 1)])
@pytest.mark.parametrize("option", [[], ["--json"]])
def test_the_command_ends_with_the_exit_code(
    row: Row,
    status: int,
    option: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(everything, "rows", lambda *_: iter((row,)))
    monkeypatch.setattr(sys, "argv", ["benchmarks", *option])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("benchmarks", run_name="__main__")
    assert ended.value.code == status
    printed = capsys.readouterr()
    if option:
        assert [one["name"] for one in json.loads(printed.out)["rows"]] == [row.name]
    assert line(row) in (printed.err if option else printed.out)


def test_without_a_c_compiler_its_row_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    (row,) = header.digests(tmp_path, 1)
    assert (row.moepack, row.met) == ("there is no C compiler", None)
