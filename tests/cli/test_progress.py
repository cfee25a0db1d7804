"""Progress and live lines on real terminals, in pipes, and in commands that draw none."""

import contextlib
import json
import re
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from moepack.cli.running import answers
from moepack.cli.shared import progress as shown
from moepack.cli.shared.progress import progress, watched_progress
from tests.support.models import first_shard
from tests.support.terminals import streams_on_terminal
from tests.support.warm_command import Run

pytestmark = pytest.mark.long

UNKNOWN_SIZE = (0, 0)


@pytest.fixture(autouse=True)
def _terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")


def draw(what: str, unit: str, *steps: str, size: tuple[int, int] = UNKNOWN_SIZE) -> list[str]:
    """Make progress by steps, `count` or `count/total`; return the frames, also empty ones."""
    with streams_on_terminal(size) as written, progress(what, unit) as advance:
        assert advance is not None
        for step in steps:
            count, _, total = step.partition("/")
            advance(int(count), int(total) if total else None)
            time.sleep(0.06)
    before, *frames, after = written[0].split("\r") if written[0] else ("", "")
    assert before == after == "", "the bar is gone in the end"
    assert "\x1b" not in written[0], "without colours"
    return [frame.rstrip() for frame in frames]


def frames(*arguments: str) -> list[str]:
    return list(filter(None, draw(*arguments)))


def test_a_total_may_be_known_late_and_change() -> None:
    drawn = frames("packing", "runs", *["1"] * 8, *["1/40"] * 5, *["1/20"] * 5)
    assert re.fullmatch(r"packing \d runs", drawn[0])
    totals = [match[1] for frame in drawn if (match := re.search(r"of (\d+) runs", frame))]
    assert totals == sorted(totals, reverse=True)
    assert set(totals) == {"40", "20"}
    assert re.match(r"packing \[#+-*\]  \d\d %", drawn[-1])


def test_progress_for_programs_is_a_json_object_a_line(tmp_path: Path, cli: Run) -> None:
    """Each has the amount by now; the last one is about all of it, even with -q."""
    target = tmp_path / "new.moepack"
    form = ("--progress", "json", "--json", "-q")
    packed = cli("pack", first_shard("qwen3moe"), "-o", target, *form)
    assert packed.returncode == 0
    assert json.loads(packed.stdout)["path"] == str(target)
    lines = [json.loads(line) for line in packed.stderr.splitlines()]
    assert [list(line) for line in lines] == [
        ["progress", "unit", "done", "total", "seconds", "is_over"]
    ] * len(lines)
    first, last = lines[0], lines[-1]
    assert (last["progress"], last["unit"], last["is_over"]) == ("packing", "bytes", True)
    assert last["done"] == last["total"] > 1 << 20
    assert not first["is_over"]
    verified = cli("verify", target, *form)
    assert json.loads(verified.stderr.splitlines()[-1])["progress"] == "verifying"


def test_objects_for_programs_come_a_second_apart_and_the_last_one_only_if_all_is_done(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shown, "is_json_progress", lambda: True)
    with progress("packing", "runs") as advance:
        assert advance is not None
        for _ in range(100):
            advance(1, 100)
    assert [json.loads(line)["done"] for line in capsys.readouterr().err.splitlines()] == [1, 100]
    with contextlib.suppress(ValueError), progress("packing", "runs") as advance:
        assert advance is not None
        advance(1, 100)
        raise ValueError
    (line,) = capsys.readouterr().err.splitlines()
    assert not json.loads(line)["is_over"]


@pytest.mark.parametrize(("unit", "step"), [("tokens", "0/100"), ("s", "0")])
def test_a_bar_on_which_nothing_was_done_is_erased(unit: str, step: str) -> None:
    *drawn, blank = draw("prompt", unit, *[step] * 8)
    assert any("prompt" in frame for frame in drawn)
    assert blank == ""


def test_what_is_done_at_once_draws_nothing() -> None:
    assert frames("packing", "B", "5/10", "5") == []
    with streams_on_terminal() as written, watched_progress("prompt", "tokens", lambda: (1, 100)):
        time.sleep(0.2)
    assert not written[0].strip()


@pytest.mark.parametrize("columns", [24, 90, 200])
def test_a_bar_is_as_wide_as_its_terminal(columns: int) -> None:
    drawn = draw("packing", "runs", *["1/10"] * 8, size=(columns, 24))
    assert {len(frame) for frame in drawn if "packing" in frame} == {columns - 1}


def test_a_terminal_that_cannot_draw_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setattr(shown, "_SECONDS_BETWEEN_LINES", 0.0)
    with streams_on_terminal() as written, progress("packing") as advance:
        assert advance is not None
        advance(5, 10)
    assert re.fullmatch(r"packing  50 %  5 B of 10 B  .*left\r\n", written[0])


def test_what_is_watched_has_a_bar_that_is_gone_before_the_text() -> None:
    began = time.monotonic()

    def percent() -> tuple[int, int]:
        return round(100 * (time.monotonic() - began)), 100

    with streams_on_terminal() as written:
        with watched_progress("prompt", "tokens", percent):
            time.sleep(0.7)
        print("text")
    *drawn, text = written[0].split("\r")[:-1]
    pattern = r"prompt \[#+-*\]  \d\d %  \d+ tokens of 100 tokens  [\d.]+ tok/s  0:0\d left"
    assert re.search(pattern, written[0])
    assert (drawn[-1].strip(), text) == ("", "text")


@pytest.mark.parametrize(
    ("unit", "seconds", "count", "total", "line"),
    [
        ("ms", 30, 30_000, 60_000, " 50 %  0:30 of 1:00  0:30 left"),
        ("tokens", 30, 3000, 6000, " 50 %  3,000 tokens of 6,000 tokens  100 tok/s  0:30 left"),
        ("tokens", 30, 1000, None, "1,000 tokens"),
        ("runs", 30, 1, 5, " 20 %  1 run of 5 runs  2:00 left"),
        ("B", 30, 0, 5, "  0 %  0 B of 5 B"),  # no speed of nothing
        ("B", 10, 20 << 30, 100 << 30, " 20 %  20.0 GiB of 100.0 GiB  2.0 GiB/s  0:40 left"),
        ("B", 9.9, 20 << 30, 100 << 30, None),
    ],
)
def test_without_a_terminal_there_is_a_line_now_and_then(
    unit: str,
    seconds: float,
    count: int,
    total: int | None,
    line: str | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    now = [0.0]
    monkeypatch.setattr(shown, "time", SimpleNamespace(monotonic=lambda: now[0]))
    with progress("working", unit) as advance:
        assert advance is not None
        now[0] += seconds
        advance(count, total)
        advance(0, total)
    assert capsys.readouterr().err == ("" if line is None else f"working {line}\n")


def talk(*, is_wanted: bool = True) -> None:
    with answers.live_line(is_wanted=is_wanted) as draw_line:
        for number in range(6):
            print(f"word{number}", end=" ", flush=True)
            time.sleep(0.12)
            draw_line(lambda number=number: f"{number} words so far, and more to come")  # type: ignore[misc]
        print()
    print("done", flush=True)


@pytest.mark.parametrize("columns", [20, 80])
def test_a_live_line_stays_in_the_last_row(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("LINES", "30")
    with streams_on_terminal() as texts:
        talk()
    (written,) = texts
    row = r"\x1b\[30;1H\x1b\[2K([^\x1b]*)\x1b8"
    words = re.sub(r"\x1b(?:7|8|\[[\d;]*[rAK])", "", re.sub(row, "", written)).split()
    assert words == [*(f"word{number}" for number in range(6)), "done"]
    last = set(re.findall(row, written))
    assert "" in last, "it is gone in the end"
    assert any("words so far" in text for text in last)
    assert max(map(len, last)) < columns
    assert written.index("\x1b[1;29r") < written.index("word0")
    assert written.index("word5") < written.index("\x1b[r"), "the terminal is whole again"


def test_a_live_line_is_lines_elsewhere_and_nothing_where_it_is_not_wanted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(answers, "_SECONDS_BETWEEN_LINES", 0.2)
    talk()
    printed = capsys.readouterr()
    assert "\x1b" not in printed.out + printed.err
    assert printed.err.count("words so far") >= 2
    with streams_on_terminal() as texts:
        talk(is_wanted=False)
    assert "so far" not in texts[0]
