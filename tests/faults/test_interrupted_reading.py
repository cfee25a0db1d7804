"""Readers that are interrupted at any moment, by the handler of a signal, and read on."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import moepack
from moepack.storage.backend import Completion, ReadRequest
from tests.support.children import PATIENCE
from tests.support.faulty_backend import make

PROGRAM = """
import os, signal, sys, time, moepack

def stop(_, frame):
    while frame is not None:
        if frame.f_code is for_ever.__code__:  # else it comes late, on a slow machine
            raise KeyboardInterrupt
        frame = frame.f_back

def for_ever(work):
    while True:
        work()

def interrupted(work, seconds):
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds, 0.01)  # again: one may come in a __del__
        for_ever(work)
    except KeyboardInterrupt:
        signal.setitimer(signal.ITIMER_REAL, 0)

pack = moepack.open(sys.argv[1])
keys = [(1, n) for n in range(16)]
signal.signal(signal.SIGALRM, stop)
sys.unraisablehook = lambda hook: None  # an interruption of what is being dropped
reader = pack.reader(backend=sys.argv[2], depth=4)
work = {
    "single": lambda: reader.read(1, 3),
    "batch": lambda: [one.view for one in reader.read_many(keys)],
}[sys.argv[3]]
end = time.monotonic() + 1.5
count = 0
while time.monotonic() < end:
    interrupted(work, 0.0002 + 0.00001 * (count % 97))
    count += 1
signal.setitimer(signal.ITIMER_REAL, 0)
for one in reader.read_many(keys):
    where = pack.locate(*keys[one.number])
    assert one.view == os.pread(os.open(where.path, os.O_RDONLY), where.length, where.offset)
reader.close()
print("read on after", count)
"""

ONE_SIGNAL = """
import signal, sys, time, moepack

pack = moepack.open(sys.argv[1])
print("ready", flush=True)
try:
    with pack.reader(backend=sys.argv[2]) as reader:
        while True:
            for one in reader.read_many([(1, n) for n in range(16)]):
                pass
except KeyboardInterrupt:
    print("left")
"""


@pytest.mark.parametrize("how", ["single", "batch"])
def test_a_reader_that_was_interrupted_reads_on_and_closes(
    packs: dict[str, Path], name: str, how: str
) -> None:
    command = [sys.executable, "-c", PROGRAM, str(packs["qwen3moe"]), name, how]
    run = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert run.stdout.startswith("read on after"), run.stderr
    assert run.returncode == 0, run.stderr


def test_a_program_that_is_interrupted_while_it_reads_ends(
    packs: dict[str, Path], name: str
) -> None:
    for number in range(8):
        command = [sys.executable, "-c", ONE_SIGNAL, str(packs["qwen3moe"]), name]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == "ready\n"
            os.sched_yield()
            subprocess.run(["sleep", str(0.002 + number * 0.003)], check=True)
            try:
                assert interrupted_end(child) in (0, 1, -2)  # -2 where it came before the `try`
            finally:
                child.kill()


def interrupted_end(child: subprocess.Popen[str]) -> int:
    """Send signals until a process ends: Python ignores one that comes while it drops an object."""
    for _ in range(round(2 * PATIENCE)):
        child.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            return child.wait(0.5)
    return child.wait(0)


def test_an_interrupted_read_is_not_in_flight(
    packs: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_: ReadRequest) -> Completion:
        raise KeyboardInterrupt

    backend = make("buffered")
    monkeypatch.setattr(backend, "read", interrupt)
    with moepack.open(packs["qwen3moe"]) as pack, pack.reader(backend=backend) as reader:
        with pytest.raises(KeyboardInterrupt):
            reader.read(0, 0)
        assert reader.statistics.in_flight_count == 0
