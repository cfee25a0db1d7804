"""Whoever dies, or talks nonsense, leaves the other side clear: nothing hangs, nothing is left."""

import array
import mmap
import os
import random
import socket
import struct
import sys
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest

from moepack.running.pager import messages
from moepack.running.pager.messages import MessageKind as Kind
from tests.support.children import PATIENCE, wait_until
from tests.support.needs import needs_llama
from tests.support.pagers import PROMPTS, SLOTS, Alone, Answers, Command, Form, Paging, paging

pytestmark = needs_llama

_MESSAGE = struct.Struct("<IIQQQQ")


@pytest.mark.parametrize(("kind", "through"), [("pack", "itself"), ("gguf", "a shell")])
def test_a_program_ends_with_its_pager(form: Form, kind: str, through: str) -> None:
    words = [sys.executable, "-m", "tests.support.llama_program", "{}", "--tokens", "400"]
    if through == "a shell":
        words = ["sh", "-c", f'{" ".join(words[:3])} "$MOEPACK_MODEL" --tokens 400; :']
    with Command(form("qwen3moe", kind), "--memory", "floor", "--", *words) as run:
        run.begin([1, 2, 3])
        time.sleep(0.1)
        run.process.kill()
        began = time.monotonic()
        assert run.result() is None
        assert time.monotonic() - began < 1.0
        if through == "a shell":  # a child of the pager is also ended by the system
            assert "moepack: the pager, which brings the experts, has ended" in run.complaint


@pytest.fixture(params=["pack", "gguf"])
def run(form: Form, request: pytest.FixtureRequest) -> Iterator[Paging]:
    model = form("qwen3moe", request.param)
    with paging(model, memory="floor", micro_batch=32, records=True) as one:
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


def assert_serves(run: Paging, expected: Answers) -> None:
    with run.program(*SLOTS) as program:
        assert program.ask(*PROMPTS[1]) == expected
    wait_until(lambda: not run.pager._mapper.clients)
    assert not run.failures


def test_programs_that_are_killed_leave_nothing(run: Paging, expected: Answers) -> None:
    assert_serves(run, expected)
    run.settle()
    files = open_files()
    order = random.Random(5)
    for number in range(4):
        program = run.program("--slots", 4, "--tokens", 400)
        if number:
            program.wait_ready().begin(*PROMPTS[2])
        time.sleep(order.uniform(0, 0.2))
        program.process.kill()
        program.__exit__(None, None, None)
    wait_until(lambda: not run.pager._mapper.clients)
    run.settle()  # so that it has nothing of the last one in its hands
    assert open_files() == files
    assert_serves(run, expected)
    assert run.pager.usage.resident_length <= run.pager.budget


def test_a_pager_that_ends_leaves_nothing(form: Form) -> None:
    files = open_files()
    with paging(form("qwen3moe", "pack"), memory="floor") as one, one.program() as program:
        program.ask([1])
        name = one.environment["MOEPACK_PAGER"]
        assert name in Path("/proc/net/unix").read_text()
    assert open_files() == files
    assert name not in Path("/proc/net/unix").read_text()


def message(kind: int, number: int = 0, *rest: int) -> bytes:
    return _MESSAGE.pack(kind, number, *(rest or (0, 0, 0, 0)))


NONSENSE = {
    "nothing": [],
    "a byte": [b"\x01"],
    "half a message": [message(Kind.HALF_FULL)[:20]],
    "noise": [bytes(range(256)) * 4],
    "a message that is too long": [message(Kind.HALF_FULL) + bytes(10_000)],
    "an unknown kind": [message(99)],
    "a file that is none": [message(Kind.REGION, 4_000_000_000, 1, 4096, 4096, 0)],
    "a region that is none": [message(Kind.REGION, 0, 1, 2**64 - 1, 2**64 - 1, 2**64 - 1)],
    "a context that is none": [message(Kind.CHOSEN, 4_000_000_000, 1, 0, 0, 0)],
    "a selection that nobody made": [message(Kind.CHOSEN, 0, 1, 0, 0, 0)],
    "answers that nobody asked for": [message(Kind.DONE), message(Kind.DONE)],
    "refusals of nothing": [message(Kind.DONE) + struct.pack("<I", 7)],
}


def connect(run: Paging) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(PATIENCE)
    connection.connect(f"\0{run.environment['MOEPACK_PAGER']}")
    return connection


def test_nonsense_harms_nobody_else(run: Paging, expected: Answers) -> None:
    with run.program(*SLOTS) as program:
        for name, pieces in NONSENSE.items():
            with closing(connect(run)) as connection:
                with suppress(BrokenPipeError):  # it may hang up after the first
                    for piece in pieces:
                        connection.send(piece)
                assert program.ask(*PROMPTS[1]) == expected, name
    assert_serves(run, expected)


def test_a_ring_of_noise_harms_nobody_else(run: Paging, expected: Answers) -> None:
    noise = ([0, 2**32 - 1, 2**32 - 1], [2**32 - 1, 1, 1, 1], [0, 1, 1, 4_000_000_000])
    with run.program(*SLOTS) as program:
        for words in noise:
            with closing(connect(run)) as connection:
                _, ancillary, _, _ = connection.recvmsg(100, socket.CMSG_SPACE(12))
                table, *others = array.array("i", ancillary[0][2])
                length = os.fstat(table).st_size
                with mmap.mmap(table, length) as memory:
                    start = length - messages.MAX_CONTEXTS * messages.RING_LENGTH
                    ring = struct.pack(f"<{len(words)}I", *words)
                    memory[start + 4096 : start + 4096 + len(ring)] = ring
                    memory[start : start + 8] = struct.pack("<Q", len(words))
                connection.send(message(Kind.CHOSEN, 0, 1, 0, 0, 0))
                assert program.ask(*PROMPTS[1]) == expected
                for descriptor in (table, *others):
                    os.close(descriptor)
    assert_serves(run, expected)


def test_a_descriptor_of_no_page_faults_harms_nobody_else(run: Paging, expected: Answers) -> None:
    reading, writing = os.pipe()
    os.write(writing, bytes([0x12]) * 4096)
    with closing(connect(run)) as connection, run.program(*SLOTS) as program:
        with suppress(BrokenPipeError):  # it may have hung up meanwhile
            socket.send_fds(connection, [message(Kind.HALF_FULL)], [reading])
            socket.send_fds(connection, [message(Kind.REGION, 0, 1, 4096, 4096, 0)], [reading])
        assert program.ask(*PROMPTS[1]) == expected
    os.close(reading)
    os.close(writing)
    assert_serves(run, expected)
