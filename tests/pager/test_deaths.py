"""Whoever dies, or talks nonsense, leaves the other side clear: nothing hangs, nothing is left."""

import array
import mmap
import os
import random
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

from moepack.pager import messages
from moepack.pager.messages import Say
from tests.support.children import PATIENCE
from tests.support.llama_program import Answer
from tests.support.models import first_shard
from tests.support.needs import needs_llama
from tests.support.pagers import PROMPTS, ROOT, Paging, Program, paging

Form = Callable[[str, str], Path]
SLOTS = ("--slots", 4, "--micro-batch", 32)
_SAID = struct.Struct("<IIQQQQ")


def seconds_until_closed(stream: int) -> float:
    """Wait until nobody has the other end of a pipe; return how long that took."""
    started = time.monotonic()
    while os.read(stream, 1 << 16):
        pass
    return time.monotonic() - started


@needs_llama
@pytest.mark.parametrize("is_computing", [False, True])
@pytest.mark.parametrize("through", ["itself", "a shell"])
@pytest.mark.parametrize("kind", ["pack", "gguf"])
def test_a_program_ends_with_its_pager(
    form: Form, kind: str, through: str, is_computing: bool
) -> None:
    words = [sys.executable, "-m", "tests.support.llama_program", "{}", "--tokens", "400"]
    if through == "a shell":
        words = ["sh", "-c", f'{" ".join(words[:3])} "$MOEPACK_MODEL" --tokens 400; :']
    command = [sys.executable, "-m", "moepack", "run", form("qwen3moe", kind)]
    pipes: dict[str, Any] = {
        "stdin": subprocess.PIPE,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
    }
    arguments = [*map(str, command), "--memory", "floor", "--", *words]
    run = subprocess.Popen(arguments, text=True, cwd=ROOT, **pipes)
    with run:
        assert run.stdin is not None
        assert run.stdout is not None
        assert run.stderr is not None
        assert run.stdout.readline() == "ready\n"
        if is_computing:
            run.stdin.write("[[1, 2, 3]]\n")
            run.stdin.flush()
            time.sleep(0.1)
        run.kill()
        assert seconds_until_closed(run.stdout.fileno()) < 1.0
        complaint = run.stderr.read()
    if through == "a shell":  # a child of the pager is also ended by the system
        assert "moepack: the pager, which brings the experts, has ended" in complaint


@pytest.fixture(params=["pack", "gguf"])
def run(form: Form, request: pytest.FixtureRequest) -> Iterator[Paging]:
    model = form("qwen3moe", request.param)
    with paging(model, memory="floor", micro_batch=32, records=True) as one:
        yield one


@pytest.fixture(scope="module")
def expected() -> list[Answer] | str:
    with Program(first_shard("qwen3moe"), *SLOTS) as program:
        return program.ask(*PROMPTS[1])


def open_files() -> list[str]:
    """Return what this process has open, without what comes and goes by itself."""
    names = []
    for number in os.listdir("/proc/self/fd"):
        try:
            names.append(os.readlink(f"/proc/self/fd/{number}"))
        except FileNotFoundError:
            continue
    return sorted(name for name in names if not name.startswith(("pipe:", "/proc", "/tmp/#")))


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def assert_serves(run: Paging, expected: list[Answer] | str) -> None:
    with run.program(*SLOTS) as program:
        assert program.ask(*PROMPTS[1]) == expected
    wait_for(lambda: not run.pager._mapper.clients)
    assert not run.failures


@needs_llama
def test_programs_that_are_killed_leave_nothing(run: Paging, expected: list[Answer] | str) -> None:
    assert_serves(run, expected)
    run.do(lambda _: None)
    files = open_files()
    order = random.Random(5)
    for _ in range(8):
        program = run.program("--slots", 4, "--tokens", 400)
        if order.random() < 0.7:
            program.wait_ready().begin(*PROMPTS[2])
        time.sleep(order.uniform(0, 0.2))
        program.process.kill()
        program.__exit__(None, None, None)
    wait_for(lambda: not run.pager._mapper.clients)
    run.do(lambda _: None)  # so that it has nothing of the last one in its hands
    assert open_files() == files
    assert_serves(run, expected)
    assert run.pager.usage.resident_length <= run.pager.budget


@needs_llama
def test_a_pager_that_ends_leaves_nothing(form: Form) -> None:
    files = open_files()
    with paging(form("qwen3moe", "pack"), memory="floor") as one, one.program() as program:
        program.ask([1])
        name = one.environment["MOEPACK_PAGER"]
        assert name in Path("/proc/net/unix").read_text()
    assert open_files() == files
    assert name not in Path("/proc/net/unix").read_text()


def said(kind: int, number: int = 0, *rest: int) -> bytes:
    return _SAID.pack(kind, number, *(rest or (0, 0, 0, 0)))


NONSENSE = {
    "nothing": [],
    "a byte": [b"\x01"],
    "half a message": [said(Say.HALF_FULL)[:20]],
    "noise": [bytes(range(256)) * 4],
    "a message that is too long": [said(Say.HALF_FULL) + bytes(10_000)],
    "an unknown kind": [said(99)],
    "a file that is none": [said(Say.REGION, 4_000_000_000, 1, 4096, 4096, 0)],
    "a region that is none": [said(Say.REGION, 0, 1, 2**64 - 1, 2**64 - 1, 2**64 - 1)],
    "a context that is none": [said(Say.CHOSEN, 4_000_000_000, 1, 0, 0, 0)],
    "a choice that nobody made": [said(Say.CHOSEN, 0, 1, 0, 0, 0)],
    "answers that nobody asked for": [said(Say.DONE), said(Say.DONE)],
    "refusals of nothing": [said(Say.DONE) + struct.pack("<I", 7)],
}


def connect(run: Paging) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(PATIENCE)
    connection.connect(f"\0{run.environment['MOEPACK_PAGER']}")
    return connection


@needs_llama
@pytest.mark.parametrize("nonsense", NONSENSE)
def test_nonsense_harms_nobody_else(
    run: Paging, expected: list[Answer] | str, nonsense: str
) -> None:
    with closing(connect(run)) as connection:
        with suppress(BrokenPipeError):  # it may hang up after the first
            for message in NONSENSE[nonsense]:
                connection.send(message)
        assert_goes_on(run, expected)
    assert_serves(run, expected)


def assert_goes_on(run: Paging, expected: list[Answer] | str) -> None:
    """Have a program served while another one is connected."""
    with run.program(*SLOTS) as program:
        assert program.ask(*PROMPTS[1]) == expected


@needs_llama
def test_a_ring_of_noise_harms_nobody_else(run: Paging, expected: list[Answer] | str) -> None:
    for words in ([0, 2**32 - 1, 2**32 - 1], [2**32 - 1, 1, 1, 1], [0, 1, 1, 4_000_000_000]):
        with closing(connect(run)) as connection:
            _, ancillary, _, _ = connection.recvmsg(100, socket.CMSG_SPACE(12))
            table, *others = array.array("i", ancillary[0][2])
            length = os.fstat(table).st_size
            with mmap.mmap(table, length) as memory:
                start = length - messages.MAX_CONTEXTS * messages.RING_LENGTH
                memory[start + 4096 : start + 4096 + 4 * len(words)] = struct.pack(
                    f"<{len(words)}I", *words
                )
                memory[start : start + 8] = struct.pack("<Q", len(words))
            connection.send(said(Say.CHOSEN, 0, 1, 0, 0, 0))
            assert_goes_on(run, expected)
            for descriptor in (table, *others):
                os.close(descriptor)
    assert_serves(run, expected)


@needs_llama
def test_a_descriptor_of_no_page_faults_harms_nobody_else(
    run: Paging, expected: list[Answer] | str
) -> None:
    reading, writing = os.pipe()
    os.write(writing, bytes([0x12]) * 4096)
    with closing(connect(run)) as connection:
        with suppress(BrokenPipeError):  # it may have hung up meanwhile
            socket.send_fds(connection, [said(Say.HALF_FULL)], [reading])
            socket.send_fds(connection, [said(Say.REGION, 0, 1, 4096, 4096, 0)], [reading])
        assert_goes_on(run, expected)
    os.close(reading)
    os.close(writing)
    assert_serves(run, expected)
