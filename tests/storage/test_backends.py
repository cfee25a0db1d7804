"""The contract of a backend, for each one: its bytes are those of a plain read.

Files, disks and threads are real. `HeldFile` is a file system of one file whose answers a
test gives, so that reads wait, come short or fail when the test wants it.
"""

import contextlib
import errno
import itertools
import os
import random
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moepack.storage.backend import Backend, ReadQueue, ReadRequest
from moepack.storage.open_files import open_direct
from moepack.storage.threaded import MAX_THREADS, ThreadedBackend

if sys.platform != "linux":
    pytest.skip("FUSE and /proc are Linux's", allow_module_level=True)

from tests.support.reads import (
    ARENA,
    DATA,
    PAGE,
    Asked,
    Files,
    HeldFile,
    ask,
    in_child,
    nothing_left,
    take_all,
)

pytestmark = pytest.mark.long

DEPTH = 16
CANARY = 0xA5

BACKENDS: dict[str, Callable[[], Backend]] = {
    "buffered": lambda: ThreadedBackend(direct=False),
    "direct": lambda: ThreadedBackend(direct=True),
    "direct that may fall back": lambda: ThreadedBackend(direct=True, falls_back=True),
}


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest, files: Files) -> Iterator[Backend]:
    """Return each backend in turn; all that it had must be gone when it is closed."""
    if request.param != "buffered":
        try:
            os.close(open_direct(files.ragged).descriptor)
        except OSError:
            pytest.skip("no O_DIRECT where temporary files are")
    with nothing_left():
        made = BACKENDS[request.param]()
        yield made
        made.close()


def check_canaries(reads: list[Asked], behind: int) -> None:
    """See that up to `behind` nothing was touched but the buffers."""
    ends = sorted(end for one in reads for end in (one.start, one.start + one.length))
    for start, end in zip([0, *ends[1::2]], [*ends[::2], behind], strict=True):
        assert ARENA[start:end] == bytes([CANARY]) * (end - start)


def lay_canaries(behind: int) -> None:
    ARENA[:behind] = bytes([CANARY]) * behind


def check_both_ways(backend: Backend, read: Asked) -> None:
    """Do a read at once, and through a queue; nothing else may be touched."""
    with closing(backend.queue(1)) as queue:
        for is_queued in (False, True):
            lay_canaries(8 * PAGE)
            if is_queued:
                queue.start([(1, read.request)])
                read.check(take_all(queue, 1)[1])
            else:
                read.check(backend.read(read.request))
            check_canaries([read], 8 * PAGE)


NEAR_A_BLOCK = st.builds(
    lambda block, by: max(0, block * 512 + by), st.integers(0, 400), st.integers(-2, 2)
)
OFFSETS = st.one_of(st.integers(0, len(DATA) + 9000), NEAR_A_BLOCK)
LENGTHS = st.one_of(
    st.integers(1, 40_000), st.sampled_from([1, 511, 512, 513, 4095, 4096, 4097, 65536, 12288])
)
STARTS = st.one_of(st.integers(0, 9000), st.sampled_from([0, 1, 4, 8, 511, 512, 513, 4095, 4096]))
EACH = settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
SLOT = 96 * 1024


class TestContract:
    """The promises of `moepack.storage.backend`."""

    @EACH
    @given(OFFSETS, LENGTHS, STARTS, st.booleans())
    def test_a_read_gives_the_bytes_of_a_plain_read_and_touches_nothing_else(
        self, backend: Backend, files: Files, offset: int, length: int, start: int, ragged: bool
    ) -> None:
        path = files.ragged if ragged else files.aligned
        read = ask(path, offset, PAGE + start, length)
        lay_canaries(3 * PAGE + start + length)
        completion = backend.read(read.request)
        assert completion.number == 0
        read.check(completion)
        check_canaries([read], 3 * PAGE + start + length)

    @EACH
    @given(
        st.lists(st.tuples(OFFSETS, LENGTHS, STARTS, st.booleans()), min_size=1, max_size=DEPTH),
        st.randoms(use_true_random=False),
    )
    def test_queued_reads_give_the_bytes_of_plain_reads_each_under_its_number(
        self,
        backend: Backend,
        files: Files,
        reads: list[tuple[int, int, int, bool]],
        chance: random.Random,
    ) -> None:
        """Numbers come in no order, and reads begin in two goes."""
        lay_canaries(SLOT * len(reads) + PAGE)
        numbers = chance.sample(range(1 << 40), len(reads))
        by_number = {
            number: ask(files.ragged if ragged else files.aligned, offset, slot * SLOT + at, length)
            for slot, (number, (offset, length, at, ragged)) in enumerate(
                zip(numbers, reads, strict=True)
            )
        }
        pairs = [(number, one.request) for number, one in by_number.items()]
        cut = chance.randrange(len(pairs) + 1)
        with closing(backend.queue(DEPTH)) as queue:
            queue.start(pairs[:cut])
            queue.start(iter(pairs[cut:]))
            check_all(queue, by_number)
        check_canaries(list(by_number.values()), SLOT * len(reads) + PAGE)

    @pytest.mark.parametrize("before_the_end", [0, 1, 511, PAGE, PAGE + 1, -1, -PAGE])
    def test_a_read_over_the_end_is_short_and_no_error(
        self, backend: Backend, files: Files, before_the_end: int
    ) -> None:
        for path, length, start in itertools.product(files, (1, PAGE, 3 * PAGE), (PAGE, PAGE + 3)):
            read = ask(path, path.stat().st_size - before_the_end, start, length)
            assert len(read.expected) == max(0, min(length, before_the_end))
            check_both_ways(backend, read)

    def test_a_file_that_cannot_be_read_is_an_error_of_its_read_and_the_queue_goes_on(
        self, backend: Backend, files: Files, tmp_path: Path
    ) -> None:
        """A missing file, a directory, memory that is not there, a directory that is none."""
        late = tmp_path / "late.bin"
        paths = [late, Path("/"), Path("/proc/self/mem"), Path("/proc/self/mem/file")]
        bad = [ReadRequest(path, 0, ARENA[PAGE:][:10]) for path in paths]
        good = ask(files.ragged, 100, 0, 500)
        with closing(backend.queue(5)) as queue:
            for _ in range(3):  # more than the depth: nothing of a failed read stays in the queue
                queue.start([*enumerate(bad), (9, good.request)])
                completions = take_all(queue, 5)
                good.check(completions.pop(9))
                for completion in completions.values():
                    assert isinstance(completion.error, OSError)
                    assert completion.length == 0
                assert isinstance(completions[0].error, FileNotFoundError)
        assert isinstance(backend.read(bad[0]).error, FileNotFoundError)
        late.write_bytes(DATA[:10])
        ask(late, 0, PAGE, 10).check(backend.read(bad[0]))

    def test_looking_for_completions_does_not_wait_and_waiting_does(
        self, slow_file: HeldFile, backend: Backend
    ) -> None:
        """The file holds its reads back, so nothing can have ended."""
        by_number = {n: of_held(slow_file, n * PAGE, n * SLOT, 100) for n in range(4)}
        with closing(backend.queue(4)) as queue:
            queue.start([(n, one.request) for n, one in by_number.items()])
            slow_file.wait_for(4)
            assert queue.finished(wait=False) == []
            with later(slow_file.let_go):
                completions = queue.finished(wait=True)
                assert completions
                while len(completions) < 4:
                    completions += queue.finished(wait=True)
        for one in completions:
            by_number[one.number].check(one)

    def test_completions_come_in_the_order_in_which_reads_end(
        self, slow_file: HeldFile, backend: Backend, files: Files
    ) -> None:
        """One read waits, and those begun after it are not held up."""
        slow = of_held(slow_file, 0, 0, 100)
        with closing(backend.queue(4)) as queue:
            queue.start([(1, slow.request)])
            for number in range(2, 30):
                quick = ask(files.ragged, number, SLOT, 1000)
                queue.start([(number, quick.request)])
                (completion,) = queue.finished(wait=True)
                assert completion.number == number
                quick.check(completion)
            slow_file.let_go()
            slow.check(take_all(queue, 1)[1])

    def test_close_waits_for_what_is_in_flight_and_nothing_is_written_after_it(
        self, slow_file: HeldFile, backend: Backend
    ) -> None:
        queue = backend.queue(8)
        reads = [of_held(slow_file, n * 3 * PAGE + n % 2, n * SLOT, 3 * PAGE) for n in range(8)]
        queue.start((n, one.request) for n, one in enumerate(reads))
        slow_file.wait_for(8)
        with later(slow_file.let_go):
            queue.close()
            lay_canaries(9 * SLOT)
            assert slow_file._open, "closed before the reads had ended"
            time.sleep(0.02)
            check_canaries([], 9 * SLOT)

    def test_a_read_that_stops_short_goes_on(self, slow_file: HeldFile, backend: Backend) -> None:
        """The file gives little at a time; a read has whole blocks and ragged ends."""
        most = 999 if backend.name == "buffered" else PAGE
        slow_file.answer = lambda offset, length: DATA[offset : offset + min(length, most)]
        slow_file.let_go()
        for offset, start, length in ((0, 0, 5 * PAGE), (77, PAGE + 77, 5 * PAGE), (77, 3, 9000)):
            check_both_ways(backend, of_held(slow_file, offset, start, length))

    def test_an_error_within_a_read_is_an_error_and_no_end_of_the_file(
        self, slow_file: HeldFile, backend: Backend
    ) -> None:
        """One block is given, and the next one fails: that is no short read."""
        slow_file.answer = lambda offset, length: DATA[:PAGE] if not offset else errno.EIO
        slow_file.let_go()
        request = ReadRequest(slow_file.path, 0, ARENA[: 3 * PAGE])
        with closing(backend.queue(1)) as queue:
            queue.start([(1, request)])
            for completion in (backend.read(request), take_all(queue, 1)[1]):
                assert completion.error is not None
                assert (completion.error.errno, completion.length) == (errno.EIO, 0)


def of_held(slow_file: HeldFile, offset: int, start: int, length: int) -> Asked:
    return Asked(slow_file.path, offset, start, length, DATA[offset : offset + length])


def check_all(queue: ReadQueue, reads: dict[int, Asked]) -> None:
    """Wait for all of these reads, and compare them."""
    for number, completion in take_all(queue, len(reads)).items():
        reads[number].check(completion)


@contextlib.contextmanager
def later(work: Callable[[], None]) -> Iterator[None]:
    """Do `work` in a moment, in another thread."""
    timer = threading.Timer(0.05, work)
    timer.start()
    yield
    timer.join()


class TestThreads:
    """Faults that only a backend with threads can have."""

    @pytest.mark.parametrize("end", ["cancel", "close"])
    def test_what_has_not_begun_is_never_begun_then(self, end: str, slow_file: HeldFile) -> None:
        """More reads wait than there are threads. `cancel` waits for nothing."""
        with nothing_left(), closing(ThreadedBackend(direct=False)) as backend:
            queue = backend.queue(200)
            requests = [ReadRequest(slow_file.path, n, ARENA[n * 100 :][:100]) for n in range(150)]
            queue.start(enumerate(requests))
            slow_file.wait_for(MAX_THREADS)
            if end == "cancel":
                queue.cancel()
                slow_file.let_go()
            else:
                with later(slow_file.let_go):
                    queue.close()
        assert len(slow_file.asked) == MAX_THREADS

    def test_no_more_threads_to_be_had_is_no_reason_to_hang(self, files: Files) -> None:
        """What cannot begin ends with an error, or is done by the threads that there are."""

        def without_threads() -> None:
            os.setresuid(65500, 65500, 65500)
            resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
            backend = ThreadedBackend(direct=False)
            with closing(backend), closing(backend.queue(2)) as queue:
                queue.start([(1, ReadRequest(Path("/proc/self/maps"), 0, ARENA[:10]))])
                assert len(take_all(queue, 1)) == 1

        if os.geteuid():
            pytest.skip("only root can become a user who has no processes")
        in_child(without_threads)
