"""`make bench` and other benchmarks: when they fail, what they print and keep, what they run."""

import importlib
import runpy
import sys
from pathlib import Path

import pytest

from benchmarks import everything, header, program, record, routed
from benchmarks.forecasts import Comparison, write_trace
from benchmarks.measure import Run, time_row
from benchmarks.routed import Texts
from benchmarks.routing import Routing, made_up_routing, read_routing
from benchmarks.soak import Findings, Level, judge_levels, soak
from benchmarks.table import HEADING, Row, cells, line
from tests.support.needs import needs_library, needs_llama

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


# Routing that a model repeats: its model, its tokens, its routing.

_SIZE = (512, 256)


def test_routing_that_is_made_up_is_like_that_of_a_real_model() -> None:
    """As measured of Qwen3-30B-A3B's; of uniform routers 6 of 128 are 5 %."""
    made_up, uniform = made_up_routing(layers=8), made_up_routing(layers=8, is_uniform=True)
    assert _share_of_likeliest(made_up, 8) == pytest.approx(0.40, abs=0.05)
    assert _share_of_likeliest(made_up, 32) == pytest.approx(0.82, abs=0.05)
    assert _repeated(made_up, 1) == pytest.approx(0.37, abs=0.03)
    assert _repeated(made_up, 32) == pytest.approx(0.21, abs=0.03)
    assert _repeated(uniform, 1) == pytest.approx(6 / 128, abs=0.01)


def _share_of_likeliest(routing: Routing, count: int) -> float:
    shares = []
    for layer in range(routing.layer_count):
        counts = [0] * routing.expert_count
        for token in routing.tokens:
            for expert in token[layer]:
                counts[expert] += 1
        shares.append(sum(sorted(counts)[-count:]) / sum(counts))
    return sum(shares) / len(shares)


def _repeated(routing: Routing, distance: int) -> float:
    pairs = [
        (set(before), set(after))
        for one, other in zip(routing.tokens, routing.tokens[distance:], strict=False)
        for before, after in zip(one, other, strict=True)
    ]
    return sum(len(before & after) for before, after in pairs) / sum(len(one) for one, _ in pairs)


@needs_library
def test_a_model_repeats_its_routing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """llama.cpp says the tokens that are expected, and reads what LRU reads.

    But for what the server routed when it tried the model.
    """
    pytest.importorskip("xllamacpp")
    monkeypatch.setattr(routed, "_FIO_SECONDS", "100ms")
    routing = made_up_routing(layers=6, experts=16, used=4)
    model = routed.Model(tmp_path, routing, _SIZE, noise=1.0)
    assert "4 of 16 experts of 234.0 KiB" in model.describe(routing)
    assert "made up" in model.describe(routing)
    texts = routed.Texts(routing, prompt_count=9, token_count=32)
    rows = list(routed.rows(model, texts, rounds=1, shares=[0.5]))
    assert all(row.value is not None for row in rows)
    (reads,) = (row.value for row in rows if row.what == "reads of LRU, without prefetching")
    assert reads is not None
    assert 0.7 < reads.median < 1.1, "LRFU reads less"


# Forecasts: the traces that the benchmark writes, and its rows.


def test_the_trace_of_a_text_is_what_it_is_routed_to(tmp_path: Path) -> None:
    routing = made_up_routing(layers=3, experts=16, used=2)
    path = write_trace(tmp_path / "trace.csv", Texts(routing, prompt_count=5, token_count=20))
    written = read_routing(path).tokens
    assert len(written) == 5 + 19, "the last token is not computed"
    assert [set(experts) for experts in written[4]] == [set(one) for one in routing.tokens[4]]
    assert written[3][2] == [], "of a prompt the last layer computes the last token alone"


def test_a_comparison_is_with_the_forecast_and_its_range() -> None:
    rows = list(Comparison(10, 8, 12, 11).rows("small, 12 %", "speed", "tok/s"))
    assert [row.what for row in rows] == ["speed", "speed, at least", "speed, at most"]
    assert [(*row.ours, *row.theirs) for row in rows] == [(11, 10), (11, 8), (11, 12)]


# `make soak`: that it runs, and that it notices.


@pytest.mark.slow
@needs_llama
def test_a_short_one_finds_nothing() -> None:
    rows = list(soak(1, round_seconds=3))
    assert not [row for row in rows if row.met is False]
    assert {"messages, stream", "left in a stream"} <= {row.what for row in rows}
    (memory,) = (row for row in rows if (row.case, row.what) == ("moepack", "memory"))
    assert len(memory.ours) == 3


@pytest.mark.parametrize("grown", [Level(16 << 20, 0, 0), Level(0, 3, 0), Level(0, 0, 3)])
def test_what_grows_is_noticed_and_noise_is_not(grown: Level) -> None:
    level = Level(100 << 20, 20, 5)
    for share, is_noticed in ((1.0, True), (0.5, False)):
        findings = Findings()
        for number in range(10):
            sums = (a + int(b * share * number / 4) for a, b in zip(level, grown, strict=True))
            findings.levels.append({"server": Level(*sums)})
        (*_, threads) = judge_levels(findings)
        assert len(threads.ours) == 10
        assert bool(findings.problems) is is_noticed


def test_an_answer_that_differs_is_noticed() -> None:
    findings = Findings()
    for text in ("a", "a", "b"):
        findings.add("chat", ("chat", 0), text)
    assert findings.problems == ["chat to prompt 0: 'b' instead of 'a'"]
