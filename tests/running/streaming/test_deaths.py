"""Whoever dies leaves the other side clear: nothing hangs, nothing is left."""

import os
import random
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from moepack.running.streaming.supervisor import Supervisor
from tests.support.children import wait_until
from tests.support.needs import needs_llama
from tests.support.supervised import (
    PROMPTS,
    SLOTS,
    Alone,
    Answers,
    Command,
    Form,
    Supervised,
    supervised,
)

pytestmark = needs_llama


@pytest.mark.parametrize(("kind", "through"), [("pack", "itself"), ("gguf", "a shell")])
def test_a_program_ends_with_moepack(form: Form, kind: str, through: str) -> None:
    words = [sys.executable, "-m", "tests.support.llama_program", "{}", "--tokens", "400"]
    if through == "a shell":
        words = ["sh", "-c", f'{" ".join(words[:3])} "$MOEPACK_MODEL" --tokens 400; :']
    with Command(form("qwen3moe", kind), "--memory", "floor", "--", *words) as run:
        for _ in range(100):  # an answer may take less than the end
            run.begin([1, 2, 3])
        time.sleep(0.1)
        run.process.kill()
        began = time.monotonic()
        while run.result() is not None:
            assert time.monotonic() - began < 2.0
        if through == "a shell":  # a child of moepack is also ended by the system
            assert "moepack, which started this program, has ended" in run.complaint


@pytest.fixture(params=["pack", "gguf"])
def run(form: Form, request: pytest.FixtureRequest) -> Iterator[Supervised]:
    model = form("qwen3moe", request.param)
    with supervised(model, memory="floor", micro_batch=32, records=True) as one:
        yield one


@pytest.fixture
def expected(alone: Alone) -> Answers:
    return alone("qwen3moe")[1]


def open_files() -> list[str]:
    """Return the open files of this process, but for pipes and temporary ones."""
    names = []
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            names.append(os.readlink(f"/proc/self/fd/{number}"))
    return sorted(name for name in names if not name.startswith(("pipe:", "/proc", "/tmp/#")))


def has_none(run: Supervised) -> bool:
    """Return whether no program is known to have the model mapped."""
    run.settle()
    return run.supervisor.usage.resident_length == 0


def assert_serves(run: Supervised, expected: Answers) -> None:
    with run.program(*SLOTS) as program:
        assert program.ask(*PROMPTS[1]) == expected
    wait_until(lambda: has_none(run))
    assert not run.failures


def test_programs_that_are_killed_leave_nothing(run: Supervised, expected: Answers) -> None:
    assert_serves(run, expected)
    files = open_files()
    order = random.Random(5)
    for number in range(4):
        program = run.program("--slots", 4, "--tokens", 400)
        if number:
            program.wait_ready().begin(*PROMPTS[2])
        time.sleep(order.uniform(0, 0.2))
        program.process.kill()
        program.__exit__(None, None, None)
    wait_until(lambda: has_none(run))
    assert open_files() == files
    assert_serves(run, expected)


def test_what_programs_counted_outlives_them(run: Supervised, expected: Answers) -> None:
    """More of them, one after another, than there are places in the control file."""
    assert_serves(run, expected)
    counts = run.supervisor.usage
    assert counts.miss_count > 0
    assert 0 < run.supervisor.final_usage.resident_length <= run.supervisor.budget, (
        "as the last one ended"
    )
    assert_serves(run, expected)
    assert run.supervisor.usage.miss_count == 2 * counts.miss_count


def test_moepack_ends_and_leaves_nothing(form: Form) -> None:
    files = open_files()
    with supervised(form("qwen3moe", "pack"), memory="floor") as one, one.program() as program:
        program.ask([1])
        assert Path(one.environment["MOEPACK_TABLE"]).exists()
    assert open_files() == files


NOISE = {
    "too long": [0, 2**32 - 1, 2**32 - 1],
    "no such layer": [2**32 - 1, 1, 1, 1],
    "no such expert": [0, 1, 1, 4_000_000_000],
    "endless": [],
}


def test_a_ring_of_noise_harms_nobody(run: Supervised, expected: Answers) -> None:
    with run.program(*SLOTS) as program:
        assert program.ask(*PROMPTS[1]) == expected
        for name, words in NOISE.items():
            run.do(partial(write_noise, words))
            run.settle()
            assert program.ask(*PROMPTS[1]) == expected, name
    assert not run.failures


def write_noise(words: list[int], supervisor: Supervisor) -> None:
    """Write words to the ring of a program's first context, as if it had; without any, no end."""
    control = supervisor._control
    (number,) = control.live()
    _, ring = next(iter(control._rings(number)))
    head = control._longs[ring // 8]
    for place, word in enumerate(words):
        control._words[(ring + 4096) // 4 + (head + place) % (1 << 18)] = word
    control._longs[ring // 8] = head + (len(words) or 1 << 60)
