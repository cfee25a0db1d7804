"""Readers that are interrupted at any moment, by the handler of a signal, and read on."""

import sys
from pathlib import Path

import pytest

import moepack
from moepack.storage.backend import Completion, ReadRequest
from tests.support.children import run_command
from tests.support.faulty_backend import make

PROGRAM = """
import os, signal, sys, moepack

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
for count in range(150):
    interrupted(work, 0.0002 + 0.00002 * (count % 47))
signal.setitimer(signal.ITIMER_REAL, 0)
for one in reader.read_many(keys):
    where = pack.locate(*keys[one.number])
    assert one.view == os.pread(os.open(where.path, os.O_RDONLY), where.length, where.offset)
reader.close()
print("read on")
"""


@pytest.mark.parametrize("how", ["single", "batch"])
def test_a_reader_that_was_interrupted_reads_on_and_closes(
    packs: dict[str, Path], name: str, how: str
) -> None:
    """It may complain: Python prints an interruption of what is dropped."""
    run = run_command(sys.executable, "-c", PROGRAM, packs["qwen3moe"], name, how)
    assert (run.returncode, run.stdout) == (0, "read on\n"), run.stderr


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
