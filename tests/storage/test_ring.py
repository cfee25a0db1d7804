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
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from moepack.errors import MachineError
from moepack.storage.aligned_read import address
from moepack.storage.backend import ReadRequest
from moepack.storage.buffers import allocate
from moepack.storage.probe import choose

if sys.platform != "linux":
    pytest.skip("io_uring is Linux's", allow_module_level=True)

from moepack.storage import ring as module
from moepack.storage.io_uring import UringBackend, UringQueue
from moepack.storage.ring import READ, READ_FIXED, READV, Ring
from tests.support.children import PATIENCE
from tests.support.needs import require_locked_memory
from tests.support.reads import (
    ARENA,
    DATA,
    MIB,
    PAGE,
    Asked,
    Files,
    HeldFile,
    ask,
    in_child,
    is_readable,
    nothing_left,
    rings_mapped,
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
def slow(held: HeldFile) -> Iterator[int]:
    """Return the held file, opened for direct reads: these wait, and the ring does not."""
    descriptor = os.open(held.path, os.O_RDONLY | os.O_DIRECT)
    yield descriptor
    held.let_go()
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
        wanted = {}
        for slot in range(chance.randrange(1, 5)):
            tag += 1
            offset, length = chance.randrange(MIB), chance.randrange(1, 64)
            wanted[tag] = slot, offset, length
            ring.prepare(READ, opened, offset, address(ARENA[slot * 64 :]), length, tag)
        ring.submit()
        found: list[tuple[int, int]] = []
        while len(found) < len(wanted):
            found += ring.completions(wait=True)
        assert sorted(found) == sorted((tag, length) for tag, (_, _, length) in wanted.items())
        for slot, offset, length in wanted.values():
            assert ARENA[slot * 64 :][:length] == DATA[offset : offset + length]
        assert not ring.in_flight
    assert ring.completions(wait=True) == []


def test_completions_may_stay_in_the_ring_while_others_are_begun(ring: Ring, opened: int) -> None:
    """One is taken late, so that head and tail never meet at the same place twice."""
    for tag in range(200):
        ring.prepare(READ, opened, tag, address(ARENA[tag:]), 1, tag)
        ring.submit()
        if tag % 3 == 2:
            found: list[tuple[int, int]] = []
            while len(found) < 3:
                found += ring.completions(wait=False)
            assert sorted(found) == [(tag - 2, 1), (tag - 1, 1), (tag, 1)]
    while ring.completions(wait=True):
        pass
    assert ARENA[:200] == DATA[:200]


def test_pieces_and_registered_memory_and_large_tags(ring: Ring, opened: int) -> None:
    ring.register(address(ARENA), MIB)
    iovec = bytearray(
        struct.pack("=QQQQ", address(ARENA[PAGE:]), 100, address(ARENA[3 * PAGE :]), 50)
    )
    ring.prepare(READV, opened, 33, address(memoryview(iovec)), 2, 1 << 60)
    ring.prepare(READ_FIXED, opened, 1 << 20, address(ARENA[5 * PAGE :]), 1000, (1 << 64) - 1)
    ring.submit()
    found: list[tuple[int, int]] = []
    while len(found) < 2:
        found += ring.completions(wait=True)
    assert sorted(found) == [(1 << 60, 150), ((1 << 64) - 1, 1000)]
    assert ARENA[PAGE : PAGE + 100] == DATA[33:133]
    assert ARENA[3 * PAGE : 3 * PAGE + 50] == DATA[133:183]
    assert ARENA[5 * PAGE : 5 * PAGE + 1000] == DATA[1 << 20 :][:1000]


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


def test_what_the_kernel_refuses_is_a_result_below_zero(ring: Ring) -> None:
    ring.prepare(READ, 9999, 0, address(ARENA), 1, 5)
    ring.submit()
    assert ring.completions(wait=True) == [(5, -errno.EBADF)]


def test_waiting_submits_what_was_prepared(ring: Ring, opened: int) -> None:
    ring.prepare(READ, opened, 0, address(ARENA), 7, 3)
    assert ring.completions(wait=False) == []
    assert ring.completions(wait=True) == [(3, 7)]


def test_more_than_the_depth_is_a_mistake_of_the_caller(ring: Ring, opened: int) -> None:
    for tag in range(4):
        ring.prepare(READ, opened, 0, address(ARENA), 1, tag)
    with pytest.raises(AssertionError, match="room"):
        ring.prepare(READ, opened, 0, address(ARENA), 1, 4)
    ring.submit()
    with pytest.raises(AssertionError, match="room"):
        ring.prepare(READ, opened, 0, address(ARENA), 1, 4)


def test_waiting_goes_on_after_a_signal(held: HeldFile, slow: int, ring: Ring) -> None:
    """The read waits until the handler has run for the fifth time."""
    count = 0

    def on_alarm() -> None:
        nonlocal count
        count += 1
        if count == 5:
            held.let_go()

    ring.prepare(READ, slow, 0, address(ARENA), PAGE, 1)
    ring.submit()
    with alarms(on_alarm, 0.02, 0.02):
        assert ring.completions(wait=True) == [(1, PAGE)]
    assert count >= 5
    assert ARENA[:PAGE] == DATA[:PAGE]


def test_a_handler_that_raises_ends_the_wait_and_the_ring_is_still_good(
    held: HeldFile, slow: int, ring: Ring, opened: int
) -> None:
    ring.prepare(READ, slow, 0, address(ARENA), PAGE, 1)
    ring.submit()
    with alarms(raise_stop, 0.05, 0), pytest.raises(Stop):
        ring.completions(wait=True)
    assert ring.in_flight == 1
    ring.prepare(READ, opened, 9, address(ARENA[PAGE:]), 10, 2)
    ring.submit()
    assert ring.completions(wait=True) == [(2, 10)]
    held.let_go()
    assert ring.completions(wait=True) == [(1, PAGE)]


def test_a_handler_that_raises_in_a_queue_leaves_it_closable(held: HeldFile) -> None:
    asked = Asked(held.path, 0, 0, PAGE, DATA[:PAGE])
    with nothing_left(), contextlib.closing(UringBackend()) as backend:
        queue = backend.queue(2)
        queue.start([(1, asked.request)])
        with alarms(raise_stop, 0.05, 0), pytest.raises(Stop):
            queue.finished(wait=True)
        assert queue.finished(wait=False) == []
        with alarms(raise_stop, 0.05, 0), pytest.raises(Stop):
            queue.close()
        held.let_go()
        queue.close()
        again = backend.queue(2)
        again.start([(2, asked.request)])
        asked.check(take_all(again, 1)[2])
        again.close()


def test_a_handler_that_raises_as_requests_are_submitted_leaves_the_ring_good(
    ring: Ring, opened: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal comes during the system call; its handler runs when that has done its work."""
    real = module._enter

    def interrupted(*arguments: int) -> None:
        real(*arguments)
        raise Stop

    monkeypatch.setattr(module, "_enter", interrupted)
    ring.prepare(READ, opened, 0, address(ARENA), 10, 1)
    with pytest.raises(Stop):
        ring.submit()
    monkeypatch.setattr(module, "_enter", real)

    def too_long() -> None:
        raise TimeoutError

    with alarms(too_long, 0.5, 0):
        ring.submit()
    assert ring.completions(wait=True) == [(1, 10)]


@pytest.mark.parametrize("code", [errno.EAGAIN, errno.EBUSY, errno.EINTR])
def test_a_kernel_that_is_busy_is_asked_again(
    ring: Ring, opened: int, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    real = module._enter
    asked: list[int] = []

    def busy(*arguments: int) -> int:
        asked.append(len(asked))
        if len(asked) < 4:
            raise OSError(code, os.strerror(code))
        return real(*arguments)

    monkeypatch.setattr(module, "_enter", busy)
    ring.prepare(READ, opened, 0, address(ARENA), 10, 1)
    ring.submit()
    assert ring.completions(wait=True) == [(1, 10)]
    assert len(asked) >= 4


def test_an_error_of_the_ring_itself_is_raised(
    ring: Ring, opened: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> int:
        raise OSError(errno.ENXIO, "gone")

    ring.prepare(READ, opened, 0, address(ARENA), 10, 1)
    with monkeypatch.context() as patch:
        patch.setattr(module, "_enter", broken)
        with pytest.raises(OSError, match="gone"):
            ring.submit()
        with pytest.raises(OSError, match="gone"):
            ring.completions(wait=True)
    assert ring.completions(wait=True) == [(1, 10)]


@pytest.mark.parametrize("code", [errno.EAGAIN, errno.EINTR])
def test_a_read_that_ends_for_no_reason_is_begun_again(
    files: Files, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """Its place in the queue is kept, and the bytes are right."""
    with nothing_left(), contextlib.closing(UringBackend()) as backend:
        queue = backend.queue(4)
        real = queue._ring.completions
        left = 10

        def vain(*, wait: bool) -> list[tuple[int, int]]:
            nonlocal left
            found = real(wait=wait)
            for number, (slot, _) in enumerate(found):
                if left:
                    left -= 1
                    found[number] = slot, -code
            return found

        monkeypatch.setattr(queue._ring, "completions", vain)
        asked = [ask(files.ragged, n * 5001, n * 3 * PAGE + n, 5000) for n in range(4)]
        queue.start([(n, one.request) for n, one in enumerate(asked)])
        for number, completion in take_all(queue, 4).items():
            asked[number].check(completion)
        assert not left
        queue.close()


def test_the_system_itself_may_say_again(held: HeldFile) -> None:
    """A file system that answers EAGAIN a few times."""
    refusals = [errno.EAGAIN] * 5
    held.answer = lambda offset, length: (
        refusals.pop() if refusals else DATA[offset : offset + length]
    )
    held.let_go()
    asked = Asked(held.path, 10, 0, 3 * PAGE, DATA[10 : 10 + 3 * PAGE])
    with contextlib.closing(UringBackend()) as backend:
        queue = backend.queue(1)
        queue.start([(1, asked.request)])
        asked.check(take_all(queue, 1)[1])
        queue.close()
    assert not refusals


def test_other_errors_end_a_read(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    with nothing_left(), contextlib.closing(UringBackend()) as backend:
        queue = backend.queue(1)
        real = queue._ring.completions

        def failing(*, wait: bool) -> list[tuple[int, int]]:
            return [(slot, -errno.EIO) for slot, _ in real(wait=wait)]

        monkeypatch.setattr(queue._ring, "completions", failing)
        for number in range(3):
            queue.start([(number, ask(files.ragged, 0, 0, 100).request)])
            (completion,) = queue.finished(wait=True)
            assert completion.error is not None
            assert (completion.number, completion.length) == (number, 0)
            assert completion.error.errno == errno.EIO
            assert completion.error.strerror == os.strerror(errno.EIO)
        queue.close()


def test_all_reads_of_one_start_are_one_system_call(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = module._enter
    calls: list[int] = []

    def counted(*arguments: int) -> int:
        calls.append(len(calls))
        return real(*arguments)

    with nothing_left(), contextlib.closing(UringBackend()) as backend:
        queue = backend.queue(8)
        monkeypatch.setattr(module, "_enter", counted)
        queue.start([(n, ask(files.ragged, n, n * PAGE, 100).request) for n in range(8)])
        assert len(calls) == 1
        take_all(queue, 8)
        queue.close()


def test_registered_memory_is_used_as_such(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole blocks in it go to it as registered; other memory and ragged reads do not."""
    codes: list[int] = []
    real = Ring.prepare

    def noted(ring: Ring, code: int, *arguments: int) -> None:
        codes.append(code)
        real(ring, code, *arguments)

    monkeypatch.setattr(Ring, "prepare", noted)
    other = allocate(PAGE)
    with nothing_left(), contextlib.closing(UringBackend(ARENA[:MIB])) as backend:
        queue = backend.queue(1)
        for offset, buffer in ((0, ARENA[:PAGE]), (0, other), (5, ARENA[PAGE + 5 : 3 * PAGE])):
            queue.start([(1, ReadRequest(files.ragged, offset, buffer))])
            take_all(queue, 1)
        queue.close()
    assert codes == [READ_FIXED, READ, READV]


def test_rings_are_kept_for_the_next_queue_and_freed_with_the_backend(files: Files) -> None:
    before = rings_mapped()
    backend = UringBackend()
    queues = [backend.queue(4) for _ in range(3)]
    kept = {queue._ring._descriptor for queue in queues}
    mapped = rings_mapped() - before
    for queue in queues:
        queue.close()
    again = [backend.queue(4) for _ in range(3)]
    assert {queue._ring._descriptor for queue in again} == kept
    assert rings_mapped() - before == mapped
    for queue in again:
        queue.close()
    other = backend.queue(2)
    assert rings_mapped() - before == mapped
    other.close()
    backend.close()
    assert rings_mapped() == before


@pytest.mark.parametrize("depth", [0, 1 << 20])
def test_a_ring_of_no_possible_depth_is_an_error_and_leaves_nothing(depth: int) -> None:
    with nothing_left(), pytest.raises(OSError, match="nvalid"):
        Ring(depth)


@pytest.mark.parametrize("fails_at", [1, 2])
def test_a_ring_that_cannot_be_mapped_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, fails_at: int
) -> None:
    real = Ring._map_at
    count = 0

    def failing(ring: Ring, offset: int, length: int) -> object:
        nonlocal count
        count += 1
        if count == fails_at:
            raise OSError(errno.ENOMEM, "no room")
        return real(ring, offset, length)

    monkeypatch.setattr(Ring, "_map_at", failing)
    with nothing_left(), pytest.raises(OSError, match="no room"):
        Ring(4)


def test_rings_of_kernels_that_map_their_parts_one_by_one(
    monkeypatch: pytest.MonkeyPatch, opened: int
) -> None:
    """Before Linux 5.4; newer ones still allow it."""
    monkeypatch.setattr(module, "_FEAT_SINGLE_MMAP", 0)
    with nothing_left():
        made = Ring(2)
        for tag in range(20):
            made.prepare(READ, opened, tag, address(ARENA), 1, tag)
            assert made.completions(wait=True) == [(tag, 1)]
        made.close()


def test_the_eventfd_counts_completions(held: HeldFile, slow: int, ring: Ring) -> None:
    event = ring.event_descriptor()
    assert ring.event_descriptor() == event
    assert not os.get_inheritable(event)
    ring.prepare(READ, slow, 0, address(ARENA), PAGE, 1)
    ring.submit()
    held.wait_for(1)
    assert not is_readable(event)
    held.let_go()
    assert is_readable(event, PATIENCE)
    assert os.eventfd_read(event) == 1
    with pytest.raises(BlockingIOError):
        os.eventfd_read(event)
    assert ring.completions(wait=False) == [(1, PAGE)]


def test_a_ring_is_not_inherited(ring: Ring) -> None:
    assert not os.get_inheritable(ring._descriptor)


def test_a_thread_that_waits_lets_others_run(held: HeldFile, slow: int, ring: Ring) -> None:
    ring.prepare(READ, slow, 0, address(ARENA), PAGE, 1)
    ring.submit()
    found: list[tuple[int, int]] = []
    waiting = threading.Thread(target=lambda: found.extend(ring.completions(wait=True)))
    waiting.start()
    held.wait_for(1)
    held.let_go()
    waiting.join(PATIENCE)
    assert found == [(1, PAGE)]


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


def test_a_pool_of_more_than_a_gigabyte_is_registered() -> None:
    """None of it is touched before; that it may be locked at all is tried in a child."""
    require_locked_memory(2 << 30)

    def work() -> None:
        backend = UringBackend(allocate((1 << 30) + PAGE))
        queue = backend.queue(1)
        assert isinstance(queue, UringQueue)
        queue.close()
        backend.close()

    in_child(work)
