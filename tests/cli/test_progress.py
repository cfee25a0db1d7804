"""Progress on real terminals: what is known late, what changes, and what is loaded for it."""

import re
import subprocess
import sys

import pytest

from tests.support.terminals import on_terminal

pytestmark = pytest.mark.long

STEPS = """
import sys, time
from moepack.cli.progress import progress
_, what, unit, *steps = sys.argv
with progress(None, what, unit) as advance:
    for step in steps:
        count, _, total = step.partition("/")
        advance(int(count), int(total) if total else None)
        time.sleep(0.12)
"""


def frames(what: str, unit: str, *steps: str) -> list[str]:
    """Return what was drawn for some steps: `count`, or `count/total` where one is told."""
    command = (sys.executable, "-c", STEPS, what, unit, *steps)
    *drawn, after = on_terminal(*command).split("\r")
    assert after == "", "the bar is gone in the end"
    return [frame.rstrip() for frame in drawn if frame.strip()]


def test_a_total_may_be_known_late_and_change() -> None:
    drawn = frames("packing", "runs", *["1"] * 6, *["1/40"] * 4, *["1/20"] * 4)
    texts = [re.sub(r"\[.*", "", frame) for frame in drawn]
    assert re.fullmatch(r"packing: \drun ", texts[0])
    totals = [match[1] for text in texts if (match := re.search(r"\d+/(\d+) $", text))]
    assert totals == sorted(totals, reverse=True)
    assert set(totals) == {"40", "20"}
    assert re.match(r"packing:  +\d\d%\|", texts[-1])


@pytest.mark.parametrize(("unit", "step"), [("tokens", "0/100"), ("s", "0")])
def test_a_bar_on_which_nothing_was_done_is_erased(unit: str, step: str) -> None:
    command = (sys.executable, "-c", STEPS, "prompt", unit, *[step] * 5)
    *drawn, blank, after = on_terminal(*command).split("\r")
    assert any("prompt" in frame for frame in drawn)
    assert (blank.strip(), after) == ("", "")
    assert len(blank) >= max(map(len, drawn))


def test_more_than_a_total_is_no_error() -> None:
    assert re.match(r"packing: \d+run \[", frames("packing", "runs", *["3/10"] * 8)[-1])


@pytest.mark.parametrize(
    ("unit", "step", "pattern"),
    [
        ("B", "1048576/10485760", r"8\.00M/10\.0M \[00:0\d<00:0\d, [\d.]+MiB/s\]"),
        ("tokens", "100/1000", r"800/1000 \[00:0\d<00:0\d, [\d.]+ tok/s\]"),
        ("ms", "100/1000", r"\[00:0\d<00:0\d\]"),
    ],
)
def test_each_unit_is_written_as_it_is_counted(unit: str, step: str, pattern: str) -> None:
    drawn = frames("x", unit, *[step] * 8)
    assert re.fullmatch(rf"x:  80%\|[^|]+\| {pattern}", drawn[-1])


def test_what_is_done_at_once_draws_nothing() -> None:
    assert frames("packing", "B", "5/10", "5") == []


def test_a_bar_is_as_wide_as_its_terminal() -> None:
    for columns in (50, 90):
        size = f'stty cols {columns} rows 24 && exec "$@"'
        steps = ["1/10"] * 8
        command = ("sh", "-c", size, "sh", sys.executable, "-c", STEPS, "packing", "runs", *steps)
        drawn = on_terminal(*command, COLUMNS="70").split("\r")
        assert {len(frame) for frame in drawn if "|" in frame} == {columns - 1}


def test_no_bar_has_colours() -> None:
    assert "\x1b" not in "".join(frames("packing", "B", *["1/10"] * 6))


LOADED = (
    STEPS
    + """
print("tqdm" in sys.modules, "multiprocessing.synchronize" in sys.modules)
import threading
print(threading.active_count())
"""
)


def test_tqdm_is_loaded_where_a_bar_is_drawn_alone() -> None:
    """Without a thread of its own, and without locks between processes."""
    command = (sys.executable, "-c", LOADED, "packing", "B", *["1/10"] * 6)
    assert on_terminal(*command).endswith("\rTrue False\r\n1\r\n")
    assert on_terminal(*command, TERM="dumb").endswith("False False\r\n1\r\n")
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert run.stdout == "False False\n1\n"
    nothing = (sys.executable, "-c", LOADED, "packing", "B")
    assert on_terminal(*nothing) == "False False\r\n1\r\n"


def test_a_quiet_command_on_a_terminal_loads_no_tqdm(packs: dict[str, object]) -> None:
    code = (
        "import sys; from moepack.cli.main import cli\n"
        "cli(sys.argv[1:], standalone_mode=False); print('tqdm' in sys.modules)"
    )
    verify = (sys.executable, "-c", code, "verify", str(packs["qwen3moe"]))
    assert on_terminal(*verify, "-q") == "False\r\n"
    assert on_terminal(*verify).endswith("True\r\n")


WATCHED = """
import sys, time
from moepack.cli.watched_progress import watched_progress
seconds = float(sys.argv[1])
began = time.monotonic()
with watched_progress("prompt", "tokens", lambda: (round(100 * (time.monotonic() - began)), 100)):
    time.sleep(seconds)
print("text")
"""


def test_what_is_watched_has_a_bar_that_is_gone_before_the_text() -> None:
    drawn = on_terminal(sys.executable, "-c", WATCHED, "0.9")
    *frames, text = drawn.split("\r")[:-1]
    assert re.search(r"prompt: +\d\d%\|[^|]+\| +\d+/100 \[00:00<00:00, [\d.]+ tok/s\]", drawn)
    assert not frames[-1].strip()
    assert text == "text"


def test_what_is_watched_for_a_moment_draws_nothing() -> None:
    assert on_terminal(sys.executable, "-c", WATCHED, "0.2").strip() == "text"
