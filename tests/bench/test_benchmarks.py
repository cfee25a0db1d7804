"""`make bench` and other benchmarks: when they fail, what they print, what their records keep."""

import importlib
import runpy
import sys
from pathlib import Path

import pytest

from benchmarks import everything, header, program, record
from benchmarks.measure import Run, time_row
from benchmarks.table import HEADING, Row, cells, line

MET = Row("import moepack", "time", "ms", [40, 70, 50], limit=60)
MISSED = Row("locate a part", "time", "us", [2, 3, 4], limit=2)
NOT_MEASURED = Row("random direct reads", "fio", note="fio is not installed")


@pytest.mark.parametrize(
    ("median", "higher_is_better", "is_met"),
    [(1.0, False, True), (1.01, False, False), (1.0, True, True), (0.99, True, False)],
)
def test_the_median_is_judged_by_the_limit(
    median: float, higher_is_better: bool, is_met: bool
) -> None:
    row = Row("case", "x", "s", [0.5, median, 2], limit=1.0, higher_is_better=higher_is_better)
    assert row.met is is_met


def test_two_sides_are_compared_round_by_round() -> None:
    ours, theirs = [Run(1, 0), Run(4, 0), Run(2, 0)], [Run(2, 0), Run(2, 0), Run(2, 0)]
    row = time_row("pack", ours, theirs, 0.9)
    assert row.value == (1.0, 0.5, 2.0)
    assert row.met is False
    assert " ".join(line(row).split()) == "pack: time 2 s 2 s 1.00 (0.50 to 2.00) <= 0.90 NOT met"
    difference = Row("pack", "beyond cp", "s", [1, 4], [2, 2], relation="difference")
    assert difference.value == (0.5, -1, 2)


def test_a_round_that_is_excluded_stays_and_does_not_count() -> None:
    row = Row("pack", "cp", "s", [1, 9, 3], [2, 2, 2], excluded={2: "another program ran"})
    assert row.value == (1.0, 0.5, 1.5)
    assert row.our_spread == (2, 1, 3)
    assert list(row.ours) == [1, 9, 3]


def test_the_table_says_what_was_measured_and_what_was_not() -> None:
    assert " ".join(line(MET).split()) == "import moepack: time 50 ms 50 (40 to 70) <= 60 met"
    assert line(MISSED).endswith("<= 2          NOT met")
    assert " ".join(line(NOT_MEASURED).split()) == "random direct reads: fio fio is not installed"
    assert cells(HEADING).startswith("what: against what")


@pytest.mark.parametrize(("row", "status"), [(MET, 0), (MISSED, 1), (NOT_MEASURED, 0)])
def test_the_command_ends_with_the_exit_code_and_keeps_all_rounds(
    row: Row,
    status: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delitem(sys.modules, "benchmarks.__main__", raising=False)
    monkeypatch.setattr(everything, "rows", lambda *_: iter((row,)))
    path = tmp_path / "record.json"
    words = ["--rounds", "3", "--record", str(path), "--note", "alone", "--folder", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["benchmarks", *words])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("benchmarks", run_name="__main__")
    assert ended.value.code == status
    printed = capsys.readouterr().out
    assert line(row) in printed
    assert ("NOT met: locate a part: time: 3, limit <= 2" in printed) is bool(status)
    kept = record.read(path)
    assert kept.rows == (row,)
    assert kept.command == f"python -m benchmarks --rounds 3 --folder {tmp_path.name}"
    assert kept.machine.note == "alone"
    assert kept.commit == record.commit()[0]
    assert kept.load is not None


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"theirs": [1.0]}, "3 rounds against 1"),
        ({"ours": []}, "no reason is given"),
        ({"excluded": {"2": " "}}, "round 2 is excluded"),
        ({"excluded": {"4": "noise"}}, "round 4 is excluded"),
        ({"excluded": {"1": "a", "2": "b", "3": "c"}}, "all rounds are excluded"),
        ({"verdict": "fast"}, "fields"),
    ],
)
def test_a_record_that_is_wrong_is_refused(
    tmp_path: Path, change: dict[str, object], problem: str
) -> None:
    facts = {"case": "pack", "what": "cp", "unit": "s", "ours": [1, 2, 3], **change}
    with pytest.raises(ValueError, match=problem):
        record.rows_of(tmp_path / "one.json", [facts])


def test_a_command_names_files_and_not_where_they_lie() -> None:
    words = ["--trace", "/home/me/a.csv", "--record=x.json", "--note", "a b", "--shares", "12"]
    assert program.command("python -m one", words) == "python -m one --trace a.csv --shares 12"


def test_without_a_c_compiler_its_row_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    (row,) = header.digests(tmp_path, 1)
    assert (row.note, row.met) == ("there is no C compiler", None)


PROGRAMS = [
    path.stem
    for path in sorted(Path(everything.__file__).parent.glob("*.py"))
    if "program.measure(" in path.read_text()
]


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_benchmark_can_keep_a_record(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "benchmarks.__main__", raising=False)
    module = importlib.import_module(f"benchmarks.{name}")
    assert "--record" in module.parser().format_help()
    assert {"__main__", "forecasts", "published_runs", "resuming", "routed", "soak"} == {*PROGRAMS}
