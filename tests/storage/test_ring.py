"""The io_uring underneath: indices that wrap, waits that a signal ends, limits of the system."""

import contextlib
import ctypes
import errno
import os
import random
import resource
import signal
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from moepack.common.errors import MachineError
from moepack.storage.aligned_read import address
from moepack.storage.probe import choose

if sys.platform != "linux":
    pytest.skip("io_uring is Linux's", allow_module_level=True)

from moepack.storage import ring as module
from moepack.storage.io_uring import UringBackend
from moepack.storage.ring import READ, Ring
from tests.support.interruptions import before_each
from tests.support.reads import (
    ARENA,
    DATA,
    MIB,
    PAGE,
    Asked,
    Files,
    HeldFile,
    in_child,
    nothing_left,
    queue_of,
    take_all,
)

_CAP_IPC_LOCK = 14
_libc = ctypes.CDLL(None, use_errno=True)


def can_make_rings() -> bool:
    try:
        Ring(1).close()
    except OSError:
        return False
    return True


pytestmark = pytest.mark.skipif(not can_make_rings(), reason="io_uring is forbidden here")


@pytest.fixture
def opened(files: Files) -> Iterator[int]:
    """Return the ragged file, opened for plain reads."""
    descriptor = os.open(files.ragged, os.O_RDONLY)
    yield descriptor
    os.close(descriptor)


@pytest.fixture
def slow(slow_file: HeldFile) -> Iterator[int]:
    """Return the slow file, opened for direct reads: these wait, and the ring does not."""
    descriptor = os.open(slow_file.path, os.O_RDONLY | os.O_DIRECT)
    yield descriptor
    slow_file.let_go()
    os.close(descriptor)


@pytest.fixture
def ring() -> Iterator[Ring]:
    with nothing_left():
        made = Ring(4)
        yield made
        while made.completions(wait=True):
            pass
        made.close()


@contextlib.contextmanager
def alarms(handler: Callable[[], None], first: float, interval: float) -> Iterator[None]:
    """Let a signal come after `first` seconds, and then every `interval`."""
    before = signal.signal(signal.SIGALRM, lambda *_: handler())
    signal.setitimer(signal.ITIMER_REAL, first, interval)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class Stop(Exception):  # noqa: N818
    """What a signal's handler raises."""


def raise_stop() -> None:
    raise Stop


def test_indices_wrap_around_many_times(ring: Ring, opened: int) -> None:
    """Far more requests than there are entries, at every fill from one to the depth."""
    chance = random.Random(4)
    tag = 0
    for _ in range(1500):
        reads = {}
        for slot in range(chance.randrange(1, 5)):
            tag += 1
            offset, length = chance.randrange(MIB), chance.randrange(1, 64)
            reads[tag] = slot, offset, length
            ring.prepare(READ, opened, offset, address(ARENA[slot * 64 :]), length, tag)
        ring.submit()
        completions: list[tuple[int, int]] = []
        while len(completions) < len(reads):
            completions += ring.completions(wait=True)
        assert sorted(completions) == sorted((tag, length) for tag, (_, _, length) in reads.items())
        for slot, offset, length in reads.values():
            assert ARENA[slot * 64 :][:length] == DATA[offset : offset + length]
        assert not ring.in_flight
    assert ring.completions(wait=True) == []


def test_an_offset_beyond_four_gigabytes_arrives(ring: Ring, tmp_path: Path) -> None:
    path = tmp_path / "sparse"
    with open(path, "wb") as file:
        file.seek(5 << 30)
        file.write(b"far away")
    descriptor = os.open(path, os.O_RDONLY)
    ring.prepare(READ, descriptor, 5 << 30, address(ARENA), 100, 1)
    assert ring.completions(wait=True) == [(1, 8)]
    assert bytes(ARENA[:8]) == b"far away"
    os.close(descriptor)


def test_waiting_goes_on_after_a_signal(slow_file: HeldFile, slow: int, ring: Ring) -> None:
    """The read waits until the handler has run for the fifth time."""
    count = 0

    def on_alarm() -> None:
        nonlocal count
        count += 1
        if count == 5:
            slow_file.let_go()

    ring.prepare(READ, slow, 0, address(ARENA), PAGE, 1)
    ring.submit()
    with alarms(on_alarm, 0.02, 0.02):
        assert ring.completions(wait=True) == [(1, PAGE)]
    assert count >= 5
    assert ARENA[:PAGE] == DATA[:PAGE]


def test_a_handler_that_raises_in_a_queue_leaves_it_closable(slow_file: HeldFile) -> None:
    read = Asked(slow_file.path, 0, 0, PAGE, DATA[:PAGE])
    with nothing_left(), contextlib.closing(UringBackend()) as backend:
        queue = backend.queue(2)
        queue.start([(1, read.request)])
        with alarms(raise_stop, 0.05, 0), pytest.raises(Stop):
            queue.finished(wait=True)
        assert queue.finished(wait=False) == []
        with alarms(raise_stop, 0.05, 0), pytest.raises(Stop):
            queue.close()
        slow_file.let_go()
        queue.close()
        again = backend.queue(2)
        again.start([(2, read.request)])
        read.check(take_all(again, 1)[2])
        again.close()


@pytest.mark.parametrize("code", [errno.EAGAIN, errno.EBUSY, errno.EINTR])
def test_a_kernel_that_is_busy_is_asked_again(
    ring: Ring, opened: int, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    read: list[int] = []

    def be_busy(*_: object) -> None:
        read.append(len(read))
        if len(read) < 4:
            raise OSError(code, os.strerror(code))

    before_each(monkeypatch, be_busy, (module, "_enter"))
    ring.prepare(READ, opened, 0, address(ARENA), 10, 1)
    ring.submit()
    assert ring.completions(wait=True) == [(1, 10)]
    assert len(read) >= 4


@pytest.mark.parametrize("code", [errno.EAGAIN, errno.EINTR])
def test_a_read_that_ends_for_no_reason_is_begun_again(slow_file: HeldFile, code: int) -> None:
    refusals = [code] * 5
    slow_file.answer = lambda offset, length: (
        refusals.pop() if refusals else DATA[offset : offset + length]
    )
    slow_file.let_go()
    read = Asked(slow_file.path, 10, 0, 3 * PAGE, DATA[10 : 10 + 3 * PAGE])
    with queue_of(UringBackend, 1) as queue:
        queue.start([(1, read.request)])
        read.check(take_all(queue, 1)[1])
    assert not refusals


@pytest.mark.parametrize("depth", [0, 1 << 20])
def test_a_ring_of_no_possible_depth_is_an_error_and_leaves_nothing(depth: int) -> None:
    with nothing_left(), pytest.raises(OSError, match="nvalid"):
        Ring(depth)


def forbid_locked_memory() -> None:
    """Allow little locked memory, and take the privilege away that root has there.

    It is more than the rings of all tests of this user, which newer kernels count as well.
    """
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (4 * MIB, 4 * MIB))
    header = ctypes.create_string_buffer(struct.pack("=Ii", 0x20080522, 0), 8)
    data = ctypes.create_string_buffer(24)
    assert not _libc.capget(header, data)
    words = list(struct.unpack("=6I", data.raw))
    words[0] &= ~(1 << _CAP_IPC_LOCK)
    assert not _libc.capset(header, ctypes.create_string_buffer(struct.pack("=6I", *words), 24))


def test_memory_beyond_the_limit_is_not_registered(files: Files) -> None:
    def work() -> None:
        forbid_locked_memory()
        with nothing_left():
            backend = UringBackend(ARENA)
            with pytest.raises(OSError, match="memory") as caught:
                backend.queue(4)
            assert caught.value.errno == errno.ENOMEM
            backend.close()
        with nothing_left():
            with pytest.raises(MachineError) as refused:
                choose("uring", [files.ragged], 4, ARENA)
            assert "locked memory" in (refused.value.hint or "")
            assert "uring" in refused.value.problem
            assert refused.value.path == str(files.ragged)
        with nothing_left():
            backend_without, _ = choose("uring", [files.ragged], 4)
            backend_without.close()

    in_child(work)
