"""The contract of a backend, held against each one: its bytes are those of a plain read.

Files, disks, rings and threads are real. `HeldFile` is a file system of one file whose answers a
test gives, so that reads wait, come short or fail when the test wants it.
"""

import errno
import os
import random
import resource
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moepack.errors import MoepackError
from moepack.storage import page_cache
from moepack.storage.aligned_read import MAX_PIECES, RoundedRead, address
from moepack.storage.backend import Backend, Completion, ReadQueue, ReadRequest
from moepack.storage.buffers import allocate
from moepack.storage.open_files import ANY, Alignment, open_direct
from moepack.storage.threaded import MAX_THREADS, ThreadedBackend

if sys.platform != "linux":
    pytest.skip("io_uring, FUSE and /proc are Linux's", allow_module_level=True)

from moepack.storage.io_uring import UringBackend
from tests.support.children import PATIENCE
from tests.support.needs import require_locked_memory
from tests.support.reads import (
    ALIGNED_DATA,
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
    take_all,
)

pytestmark = pytest.mark.long

DEPTH = 16
CANARY = 0xA5

BACKENDS: dict[str, Callable[[], Backend]] = {
    "buffered": lambda: ThreadedBackend(direct=False),
    "direct": lambda: ThreadedBackend(direct=True),
    "uring": UringBackend,
    "uring with registered memory": lambda: UringBackend(ARENA),
}


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest, files: Files) -> Iterator[Backend]:
    """Return each backend in turn; all that it had must be gone when it is closed."""
    if request.param != "buffered":
        try:
            os.close(open_direct(files.ragged).descriptor)
        except OSError:
            pytest.skip("no O_DIRECT where temporary files are")
    if "registered" in request.param:
        # Each queue locks all of it, and workers share what their user may lock.
        require_locked_memory(64 * len(ARENA))
    with nothing_left():
        made = BACKENDS[request.param]()
        try:
            made.queue(1).close()
        except OSError as error:
            made.close()
            pytest.skip(f"not to be had here: {error.strerror}")
        yield made
        made.close()


def alignment_of(path: Path) -> Alignment:
    """Return what a file asks of direct reads."""
    file = open_direct(path)
    os.close(file.descriptor)
    return file.alignment


def check_canaries(asked: list[Asked], before: int, behind: int) -> None:
    """See that from `before` to `behind` nothing was touched but the buffers."""
    places = sorted((one.start, one.start + one.length) for one in asked)
    for start, end in places:
        assert ARENA[before:start] == bytes([CANARY]) * (start - before)
        before = end
    assert ARENA[before:behind] == bytes([CANARY]) * (behind - before)


def lay_canaries(start: int, end: int) -> None:
    ARENA[start:end] = bytes([CANARY]) * (end - start)


def becomes_unreadable(queue: ReadQueue) -> bool:
    """Say whether `finished` makes the descriptor unreadable; a thread may be about to signal."""
    deadline = time.monotonic() + PATIENCE
    while is_readable(queue.fileno()):
        if time.monotonic() > deadline:
            return False
        assert queue.finished(wait=False) == []
    return True


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
    """What `moepack.storage.backend` promises."""

    @EACH
    @given(OFFSETS, LENGTHS, STARTS, st.booleans())
    def test_a_read_gives_the_bytes_of_a_plain_read_and_touches_nothing_else(
        self, backend: Backend, files: Files, offset: int, length: int, start: int, ragged: bool
    ) -> None:
        path = files.ragged if ragged else files.aligned
        asked = ask(path, offset, PAGE + start, length)
        lay_canaries(0, 3 * PAGE + start + length)
        completion = backend.read(asked.request)
        assert completion.number == 0
        asked.check(completion)
        check_canaries([asked], 0, 3 * PAGE + start + length)

    @EACH
    @given(
        st.lists(st.tuples(OFFSETS, LENGTHS, STARTS, st.booleans()), min_size=1, max_size=DEPTH),
        st.randoms(use_true_random=False),
    )
    def test_queued_reads_give_the_bytes_of_plain_reads_each_under_its_number(
        self,
        backend: Backend,
        files: Files,
        wanted: list[tuple[int, int, int, bool]],
        chance: random.Random,
    ) -> None:
        """Numbers come in no order, and reads begin in two goes."""
        lay_canaries(0, SLOT * len(wanted) + PAGE)
        numbers = chance.sample(range(1 << 40), len(wanted))
        asked = {
            number: ask(files.ragged if ragged else files.aligned, offset, slot * SLOT + at, length)
            for slot, (number, (offset, length, at, ragged)) in enumerate(
                zip(numbers, wanted, strict=True)
            )
        }
        pairs = [(number, one.request) for number, one in asked.items()]
        cut = chance.randrange(len(pairs) + 1)
        with closing(backend.queue(DEPTH)) as queue:
            queue.start(pairs[:cut])
            queue.start(iter(pairs[cut:]))
            for number, completion in take_all(queue, len(pairs)).items():
                asked[number].check(completion)
        check_canaries(list(asked.values()), 0, SLOT * len(wanted) + PAGE)

    @pytest.mark.parametrize("length", [1, 512, PAGE, PAGE + 1, 3 * PAGE])
    @pytest.mark.parametrize(
        "before_the_end", [0, 1, 511, 512, PAGE - 1, PAGE, PAGE + 1, -1, -PAGE]
    )
    def test_a_read_over_the_end_is_short_and_no_error(
        self, backend: Backend, files: Files, before_the_end: int, length: int
    ) -> None:
        queue = backend.queue(4)
        for path in files:
            offset = path.stat().st_size - before_the_end
            for start in (PAGE, PAGE + 3):
                asked = ask(path, offset, start, length)
                assert len(asked.expected) == max(0, min(length, before_the_end))
                for how in ("read", "queue"):
                    lay_canaries(0, 8 * PAGE)
                    if how == "read":
                        asked.check(backend.read(asked.request))
                    else:
                        queue.start([(7, asked.request)])
                        asked.check(take_all(queue, 1)[7])
                    check_canaries([asked], 0, 8 * PAGE)
        queue.close()

    @pytest.mark.parametrize("start", [0, 1, 512, 700])
    @pytest.mark.parametrize("offset", [0, 1, 512, PAGE, MIB - 100])
    def test_megabytes_are_read_whole(
        self, backend: Backend, files: Files, offset: int, start: int
    ) -> None:
        asked = ask(files.ragged, offset, PAGE + start, 2 * MIB + 77)
        lay_canaries(0, 3 * MIB)
        queue = backend.queue(1)
        queue.start([(1, asked.request)])
        asked.check(take_all(queue, 1)[1])
        check_canaries([asked], 0, 3 * MIB)
        queue.close()

    def test_an_empty_file_ends_at_once(self, backend: Backend, tmp_path: Path) -> None:
        (tmp_path / "empty").touch()
        assert backend.read(ReadRequest(tmp_path / "empty", 0, ARENA[:100])) == (0, 0, None)

    def test_a_hundred_reads_go_through_a_queue_of_eight(
        self, backend: Backend, files: Files
    ) -> None:
        """What ends makes room at once for the next: slots and numbers are used again."""
        chance = random.Random(2)
        queue = backend.queue(8)
        slots = list(range(8))
        flying: dict[int, tuple[int, Asked]] = {}
        begun = 0
        while begun < 100 or flying:
            while slots and begun < 100:
                slot = slots.pop()
                start = slot * SLOT + chance.choice([0, 0, 1, 512])
                one = ask(
                    files.ragged, chance.randrange(len(DATA)), start, chance.randrange(1, 9999)
                )
                flying[begun] = slot, one
                queue.start([(begun, one.request)])
                begun += 1
            for completion in queue.finished(wait=True):
                slot, one = flying.pop(completion.number)
                one.check(completion)
                slots.append(slot)
        queue.close()

    def test_a_full_queue_starts_at_once(self, backend: Backend, files: Files) -> None:
        """As many as the depth allows, of a depth that is no power of two."""
        asked = [ask(files.ragged, n * 5000, n * SLOT, 5000) for n in range(13)]
        queue = backend.queue(13)
        for _ in range(3):
            lay_canaries(0, 13 * SLOT)
            queue.start([(n, one.request) for n, one in enumerate(asked)])
            for number, completion in take_all(queue, 13).items():
                asked[number].check(completion)
        queue.close()

    def test_a_missing_file_is_a_completion_and_the_queue_goes_on(
        self, backend: Backend, files: Files, tmp_path: Path
    ) -> None:
        late = tmp_path / "late.bin"
        good = ask(files.ragged, 100, 0, 500)
        queue = backend.queue(4)
        bad = ReadRequest(late, 0, ARENA[PAGE : PAGE + 10])
        for _ in range(3 * 4):  # more than the depth: nothing of a failed read stays in the queue
            queue.start([(1, bad), (2, good.request), (3, bad)])
            taken = take_all(queue, 3)
            assert isinstance(taken[1].error, FileNotFoundError)
            assert isinstance(taken[3].error, FileNotFoundError)
            assert taken[1].length == 0
            good.check(taken[2])
        assert isinstance(backend.read(bad).error, FileNotFoundError)
        late.write_bytes(DATA[:10])
        ask(late, 0, PAGE, 10).check(backend.read(bad))
        queue.close()

    def test_what_cannot_begin_makes_the_descriptor_readable(
        self, backend: Backend, tmp_path: Path
    ) -> None:
        queue = backend.queue(2)
        descriptor = queue.fileno()
        assert not is_readable(descriptor)
        queue.start([(1, ReadRequest(tmp_path / "none", 0, ARENA[:10]))])
        assert is_readable(descriptor, 5)
        assert isinstance(queue.finished(wait=False)[0].error, FileNotFoundError)
        assert becomes_unreadable(queue)
        queue.close()

    @pytest.mark.parametrize("path", ["/", "/proc/self/mem", "/proc/self/mem/file"])
    def test_what_cannot_be_read_is_an_error_of_the_system(
        self, backend: Backend, files: Files, path: str
    ) -> None:
        """A directory, memory that is not there, a directory that is none."""
        good = ask(files.ragged, 100, 0, 500)
        queue = backend.queue(4)
        queue.start([(1, ReadRequest(Path(path), 0, ARENA[PAGE : PAGE + 10])), (2, good.request)])
        taken = take_all(queue, 2)
        assert isinstance(taken[1].error, OSError)
        assert taken[1].length == 0
        good.check(taken[2])
        queue.close()

    def test_a_device_that_fails_is_an_error_and_no_end_of_the_file(
        self, backend: Backend, tmp_path: Path
    ) -> None:
        """A loop device whose lower half was cut off under it; reads span what is there and not."""
        image = tmp_path / "image"
        image.write_bytes(DATA[: 64 * PAGE])
        command = ["losetup", "--find", "--show", str(image)]
        try:
            made = subprocess.run(command, capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError):
            pytest.skip("this user may not make loop devices")
        device = Path(made.stdout.strip())
        try:
            os.truncate(image, 16 * PAGE)
            for offset, start in ((20 * PAGE, 0), (8 * PAGE, 0), (8 * PAGE + 5, 3)):
                for completion in (
                    backend.read(ReadRequest(device, offset, ARENA[start : start + 16 * PAGE])),
                    self._queued(backend, device, offset, start),
                ):
                    assert completion.error is not None
                    assert completion.error.errno == errno.EIO
            assert backend.read(ReadRequest(device, 0, ARENA[: 4 * PAGE])) == (0, 4 * PAGE, None)
        finally:
            subprocess.run(["losetup", "--detach", device], check=True)

    def _queued(self, backend: Backend, path: Path, offset: int, start: int) -> Completion:
        queue = backend.queue(1)
        queue.start([(0, ReadRequest(path, offset, ARENA[start : start + 16 * PAGE]))])
        taken = take_all(queue, 1)[0]
        queue.close()
        return taken

    @pytest.mark.parametrize("left", [0, 100, PAGE, PAGE + 100])
    def test_a_file_cut_short_after_it_was_opened_gives_what_is_left(
        self, backend: Backend, tmp_path: Path, left: int
    ) -> None:
        path = tmp_path / "shrinking.bin"
        path.write_bytes(DATA[: 4 * PAGE])
        whole = ask(path, 0, 0, 4 * PAGE)
        whole.check(backend.read(whole.request))
        os.truncate(path, left)
        lay_canaries(0, 6 * PAGE)
        queue = backend.queue(1)
        for start in (0, 1):
            asked = ask(path, 0, start, 3 * PAGE)
            queue.start([(1, asked.request)])
            asked.check(take_all(queue, 1)[1])
            assert len(asked.expected) == left
        queue.close()

    def test_an_open_file_is_read_on_after_its_name_is_gone(
        self, backend: Backend, tmp_path: Path
    ) -> None:
        path = tmp_path / "removed.bin"
        path.write_bytes(DATA[:PAGE])
        asked = ask(path, 0, 0, PAGE)
        asked.check(backend.read(asked.request))
        path.unlink()
        queue = backend.queue(1)
        queue.start([(1, asked.request)])
        asked.check(take_all(queue, 1)[1])
        queue.close()

    def test_nothing_in_flight_is_nothing_to_wait_for(self, backend: Backend) -> None:
        queue = backend.queue(2)
        queue.start([])
        assert queue.finished(wait=True) == []
        assert queue.finished(wait=False) == []
        queue.close()

    def test_looking_for_completions_does_not_wait_and_waiting_does(
        self, held: HeldFile, backend: Backend
    ) -> None:
        """The file holds its reads back, so nothing can have ended."""
        asked = [
            Asked(held.path, n * PAGE, n * SLOT, 100, DATA[n * PAGE :][:100]) for n in range(4)
        ]
        queue = backend.queue(4)
        descriptor = queue.fileno()
        queue.start([(n, one.request) for n, one in enumerate(asked)])
        held.wait_for(4)
        assert queue.finished(wait=False) == []
        assert not is_readable(descriptor)
        later = threading.Timer(0.05, held.let_go)
        later.start()
        taken = {one.number: one for one in queue.finished(wait=True)}
        assert taken
        while len(taken) < 4:
            taken |= {one.number: one for one in queue.finished(wait=True)}
        for number, one in taken.items():
            asked[number].check(one)
        queue.close()
        later.join()

    def test_completions_come_in_the_order_in_which_reads_end(
        self, held: HeldFile, backend: Backend, files: Files
    ) -> None:
        """One read waits, and those begun after it are not held up."""
        slow = Asked(held.path, 0, 0, 100, DATA[:100])
        queue = backend.queue(4)
        queue.start([(1, slow.request)])
        for number in range(2, 30):
            quick = ask(files.ragged, number, SLOT, 1000)
            queue.start([(number, quick.request)])
            (completion,) = queue.finished(wait=True)
            assert completion.number == number
            quick.check(completion)
        held.let_go()
        slow.check(take_all(queue, 1)[1])
        queue.close()

    def test_the_descriptor_is_readable_when_reads_have_ended_and_not_after_they_are_taken(
        self, held: HeldFile, backend: Backend
    ) -> None:
        held.let_go()
        asked = Asked(held.path, 5, 0, 100, DATA[5:105])
        queue = backend.queue(4)
        descriptor = queue.fileno()
        assert queue.fileno() == descriptor
        assert not is_readable(descriptor)
        for number in range(20):
            queue.start([(number, asked.request), (100, asked.request._replace(offset=0))])
            taken = 0
            while taken < 2:
                assert is_readable(descriptor, 5)
                taken += len(queue.finished(wait=False))
            assert becomes_unreadable(queue)
        queue.close()

    def test_the_descriptor_of_a_new_queue_is_unreadable(
        self, backend: Backend, files: Files
    ) -> None:
        """Whatever ended in the queue before it, and though that was never taken."""
        asked = ask(files.ragged, 0, 0, 100)
        for _ in range(3):
            with closing(backend.queue(2)) as queue:
                assert not is_readable(queue.fileno())
                queue.start([(1, asked.request)])
                assert is_readable(queue.fileno(), 5)

    def test_close_waits_for_what_is_in_flight_and_nothing_is_written_after_it(
        self, held: HeldFile, backend: Backend
    ) -> None:
        length = 3 * PAGE
        queue = backend.queue(8)
        requests = [
            ReadRequest(held.path, n * length + n % 2, ARENA[n * SLOT :][:length]) for n in range(8)
        ]
        queue.start(enumerate(requests))
        held.wait_for(8)
        later = threading.Timer(0.05, held.let_go)
        later.start()
        queue.close()
        lay_canaries(0, 9 * SLOT)
        assert held._open, "closed before the reads had ended"
        time.sleep(0.02)
        check_canaries([], 0, 9 * SLOT)
        later.join()

    def test_close_gives_up_many_reads_of_a_disk(self, backend: Backend, files: Files) -> None:
        """Buffers are the caller's again at once, whatever the disk is doing."""
        for _ in range(5):
            queue = backend.queue(DEPTH)
            requests = [
                ReadRequest(files.ragged, n * MIB // 8, ARENA[n * MIB // 4 :][: MIB // 4])
                for n in range(DEPTH)
            ]
            queue.start(enumerate(requests))
            queue.close()
            lay_canaries(0, DEPTH * MIB // 4)
            time.sleep(0.01)
            check_canaries([], 0, DEPTH * MIB // 4)

    def test_a_new_queue_knows_nothing_of_the_one_before(
        self, backend: Backend, files: Files, tmp_path: Path
    ) -> None:
        """Queues of the same depth and of another one, closed with completions not taken."""
        missing = ReadRequest(tmp_path / "none", 0, ARENA[:10])
        for round_number, depth in enumerate((4, 4, 3, 8, 8, 1)):
            queue = backend.queue(depth)
            assert queue.finished(wait=True) == []
            asked = [ask(files.ragged, n + round_number, n * SLOT, 5000) for n in range(depth)]
            queue.start([(n, one.request) for n, one in enumerate(asked)])
            taken = take_all(queue, depth)
            for number, completion in taken.items():
                asked[number].check(completion)
            queue.start([(50 + n, one.request) for n, one in enumerate(asked[:-1])])
            queue.start([(99, missing)])
            queue.close()

    def test_each_thread_has_a_queue_of_its_own(self, backend: Backend, files: Files) -> None:
        problems: list[str] = []

        def work(thread: int) -> None:
            chance = random.Random(thread)
            try:
                for _ in range(8):
                    queue = backend.queue(4)
                    asked = [
                        ask(
                            files.ragged, chance.randrange(len(DATA)), thread * MIB + n * SLOT,
                            chance.randrange(1, SLOT),
                        )
                        for n in range(4)
                    ]  # fmt: skip
                    queue.start([(n, one.request) for n, one in enumerate(asked)])
                    for number, completion in take_all(queue, 4).items():
                        asked[number].check(completion)
                    queue.close()
            except BaseException:
                problems.append(traceback.format_exc())

        run_threads(work, 4)
        assert not problems, problems[0]

    def test_single_reads_from_eight_threads(self, backend: Backend, files: Files) -> None:
        problems: list[str] = []

        def work(thread: int) -> None:
            chance = random.Random(thread)
            try:
                for _ in range(20):
                    offset, length = chance.randrange(len(DATA)), chance.randrange(1, SLOT)
                    asked = ask(chance.choice(files), offset, thread * SLOT * 2, length)
                    asked.check(backend.read(asked.request))
            except BaseException:
                problems.append(traceback.format_exc())

        run_threads(work, 8)
        assert not problems, problems[0]

    def test_a_queue_may_be_handed_from_one_thread_to_another(
        self, held: HeldFile, backend: Backend
    ) -> None:
        """Begun in one, waited for in the second, closed in the third, with reads in flight."""
        asked = [Asked(held.path, n * 999, n * SLOT, 999, DATA[n * 999 :][:999]) for n in range(8)]
        queues: list[ReadQueue] = []
        taken: dict[int, Completion] = {}

        def begin(_: int) -> None:
            queues.append(backend.queue(8))
            queues[0].start([(n, one.request) for n, one in enumerate(asked)])

        def wait(_: int) -> None:
            held.let_go()
            taken.update(take_all(queues[0], 8))
            queues[0].start([(n, one.request) for n, one in enumerate(asked)])

        run_threads(begin, 1)
        held.wait_for(8)
        run_threads(wait, 1)
        run_threads(lambda _: queues[0].close(), 1)
        for number, one in taken.items():
            asked[number].check(one)

    def test_a_read_that_stops_short_on_a_block_goes_on(
        self, held: HeldFile, backend: Backend
    ) -> None:
        """The file gives at most one block at a time; a read has whole blocks and ragged ends."""
        held.answer = lambda offset, length: DATA[offset : offset + min(length, PAGE)]
        held.let_go()
        for offset, start, length in ((0, 0, 5 * PAGE), (77, PAGE + 77, 5 * PAGE), (77, 3, 9000)):
            lay_canaries(0, 8 * PAGE)
            asked = Asked(held.path, offset, start, length, DATA[offset : offset + length])
            asked.check(backend.read(asked.request))
            check_canaries([asked], 0, 8 * PAGE)
            lay_canaries(0, 8 * PAGE)
            queue = backend.queue(1)
            queue.start([(1, asked.request)])
            asked.check(take_all(queue, 1)[1])
            check_canaries([asked], 0, 8 * PAGE)
            queue.close()

    def test_an_error_within_a_read_is_an_error(self, held: HeldFile, backend: Backend) -> None:
        """One block is given, and the next one fails: that is no short read."""
        held.answer = lambda offset, length: DATA[:PAGE] if not offset else errno.EIO
        held.let_go()
        queue = backend.queue(1)
        request = ReadRequest(held.path, 0, ARENA[: 3 * PAGE])
        queue.start([(1, request)])
        for completion in (backend.read(request), take_all(queue, 1)[1]):
            assert completion.error is not None
            assert (completion.error.errno, completion.length) == (errno.EIO, 0)
        queue.close()

    def test_a_request_longer_than_four_gigabytes_is_read(
        self, held: HeldFile, backend: Backend
    ) -> None:
        """The file ends before the buffer does, so that almost none of it becomes real memory."""
        held.let_go()
        try:
            buffer = allocate((4 << 30) + PAGE)
        except MoepackError:
            pytest.skip("no address space for it")
        asked = ReadRequest(held.path, 3 * MIB, buffer)
        assert backend.read(asked) == (0, 1234, None)
        with closing(backend.queue(1)) as queue:
            queue.start([(1, asked)])
            assert take_all(queue, 1)[1] == (1, 1234, None)
            assert buffer[:1234] == DATA[3 * MIB :]

    def test_registered_memory_may_end_within_a_buffer(self, files: Files) -> None:
        """A buffer of which only the start is registered is a buffer like any other."""
        memory = allocate(4 * PAGE)
        made = UringBackend(memory[: 2 * PAGE])
        with closing(made), closing(made.queue(1)) as queue:
            queue.start([(1, ReadRequest(files.ragged, 0, memory))])
            assert take_all(queue, 1)[1] == (1, 4 * PAGE, None)


def run_threads(work: Callable[[int], None], count: int) -> None:
    """Run `work` in so many threads at a time, each with its number."""
    threads = [threading.Thread(target=work, args=(n,)) for n in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


class TestThreads:
    """What only a backend with threads can do wrong."""

    @pytest.mark.parametrize("direct", [False, True])
    def test_short_answers_of_the_system_are_gone_on_with(
        self, monkeypatch: pytest.MonkeyPatch, files: Files, direct: bool
    ) -> None:
        """Of what is asked, the system gives one block or some bytes at a time."""
        chance = random.Random(3)
        real = os.preadv
        calls = []
        block = alignment_of(files.ragged).offset if direct else 1

        def short(descriptor: int, buffers: list[memoryview], offset: int) -> int:
            calls.append(offset)
            most = block * chance.randrange(1, 9999 // block + 2)
            clipped = []
            for buffer in buffers:
                clipped.append(buffer[:most])
                most -= len(clipped[-1])
            return real(descriptor, [one for one in clipped if len(one)], offset)

        monkeypatch.setattr(os, "preadv", short)
        with closing(ThreadedBackend(direct=direct)) as backend:
            for _ in range(40):
                offset, start = chance.randrange(len(DATA)), chance.randrange(2 * PAGE)
                if direct and chance.random() < 0.5:
                    start = offset % PAGE
                asked = ask(files.ragged, offset, start, chance.randrange(1, 60_000))
                lay_canaries(0, 80_000)
                asked.check(backend.read(asked.request))
                check_canaries([asked], 0, 80_000)
        assert len(calls) > 100

    def test_no_more_threads_are_started_than_there_is_work_for(
        self, held: HeldFile, files: Files
    ) -> None:
        with nothing_left(), closing(ThreadedBackend(direct=False)) as backend:
            before = threading.active_count()
            queue = backend.queue(200)
            one = ask(files.ragged, 0, 0, 2 * MIB)
            for number in range(20):
                queue.start([(number, one.request)])
                take_all(queue, 1)
            assert threading.active_count() - before == 1
            requests = [ReadRequest(held.path, n, ARENA[n * 100 :][:100]) for n in range(100)]
            queue.start(enumerate(requests))
            assert threading.active_count() - before == MAX_THREADS
            held.let_go()
            assert len(take_all(queue, 100)) == 100
            queue.close()

    @pytest.mark.skipif(not hasattr(os, "RWF_NOWAIT"), reason="this system cannot read so")
    def test_what_is_cached_needs_no_thread_and_what_is_long_or_not_cached_has_one(
        self, tmp_path: Path
    ) -> None:
        path = tmp_path / "file.bin"
        path.write_bytes(DATA)
        os.sync()
        with nothing_left(), closing(ThreadedBackend(direct=False)) as backend:
            before = threading.active_count()
            for queue in (backend.queue(2), backend.queue(2)):
                short, long = ask(path, 4321, 0, MIB), ask(path, 99, MIB, MIB + 1)
                queue.start([(1, short.request)])
                assert threading.active_count() == before
                (completion,) = queue.finished(wait=False)
                short.check(completion)
                queue.close()
            queue = backend.queue(2)
            queue.start([(2, long.request)])
            assert threading.active_count() == before + 1
            long.check(take_all(queue, 1)[2])
            queue.close()
        page_cache.drop([path])
        if page_cache.cached_share([path]):
            pytest.skip("this file system keeps its files in memory")
        with closing(ThreadedBackend(direct=False)) as backend:
            queue = backend.queue(2)
            queue.start([(3, short.request)])
            assert threading.active_count() == before + 1
            short.check(take_all(queue, 1)[3])
            queue.close()

    def test_a_direct_read_is_never_done_by_who_begins_it(self, files: Files) -> None:
        with nothing_left(), closing(ThreadedBackend(direct=True)) as backend:
            before = threading.active_count()
            queue = backend.queue(2)
            one = ask(files.aligned, 0, 0, 2 * PAGE)
            queue.start([(1, one.request)])
            assert threading.active_count() == before + 1
            assert len(take_all(queue, 1)) == 1
            queue.close()

    @pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="there is no tmpfs to be had")
    def test_what_lies_in_memory_needs_no_thread(self) -> None:
        with (
            tempfile.NamedTemporaryFile(dir="/dev/shm") as file,
            closing(ThreadedBackend(direct=False)) as backend,
        ):
            path = Path(file.name)
            path.write_bytes(DATA)
            before = threading.active_count()
            queue = backend.queue(2)
            signal = queue.fileno()
            one = ask(path, 4321, 0, 5000)
            queue.start([(1, one.request)])
            assert threading.active_count() == before
            assert is_readable(signal)
            one.check(take_all(queue, 1)[1])
            assert not is_readable(signal)
            queue.close()

    def test_close_does_not_begin_what_has_not_begun(self, held: HeldFile) -> None:
        """More reads wait than there are threads, and those are never asked of the file."""
        with nothing_left(), closing(ThreadedBackend(direct=False)) as backend:
            queue = backend.queue(200)
            requests = [ReadRequest(held.path, n, ARENA[n * 100 :][:100]) for n in range(150)]
            queue.start(enumerate(requests))
            held.wait_for(MAX_THREADS)
            later = threading.Timer(0.05, held.let_go)
            later.start()
            queue.close()
            later.join()
            assert len(held.asked) == MAX_THREADS

    def test_a_thread_never_writes_to_a_descriptor_that_is_closed(
        self, monkeypatch: pytest.MonkeyPatch, files: Files
    ) -> None:
        """The owner takes a completion and closes while the thread that gave it is to signal it.

        A thread may lose the processor just before its write; here it does. A pipe that is opened
        then gets the number of the closed one.
        """
        real = os.write

        def late(descriptor: int, data: bytes) -> int:
            time.sleep(0.1)
            return real(descriptor, data)

        problems: list[object] = []
        monkeypatch.setattr(threading, "excepthook", problems.append)
        monkeypatch.setattr(os, "write", late)
        backend = ThreadedBackend(direct=False)
        queue = backend.queue(1)
        queue.fileno()
        queue.start([(1, ask(files.ragged, 0, 0, 100).request)])
        queue.finished(wait=True)
        queue.close()
        reading, writing = os.pipe()
        backend.close()
        hit = is_readable(reading)
        os.close(reading)
        os.close(writing)
        assert not hit
        assert not problems

    def test_no_memory_for_a_misaligned_read_is_an_error_of_that_read(self, files: Files) -> None:
        in_child(lambda: read_without_memory(ThreadedBackend(direct=True), files.ragged))

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


def test_no_memory_for_a_misaligned_read_through_a_ring_is_an_error_of_that_read(
    files: Files,
) -> None:
    in_child(lambda: read_without_memory(UringBackend(), files.ragged))


def read_without_memory(backend: Backend, path: Path) -> None:
    """Read where a copy of the buffer does not fit into the address space any more."""
    buffer = allocate(512 * MIB)[1:]
    used = int(Path("/proc/self/statm").read_text().split()[0]) * PAGE
    resource.setrlimit(resource.RLIMIT_AS, (used + 256 * MIB, used + 256 * MIB))
    with closing(backend), closing(backend.queue(4)) as queue:
        queue.start([(1, ReadRequest(path, 0, ARENA[:PAGE])), (2, ReadRequest(path, 0, buffer))])
        taken = take_all(queue, 2)
        assert taken[1] == (1, PAGE, None)
        error = taken[2].error
        assert error is not None
        assert error.errno == errno.ENOMEM


ALIGNMENTS = [ANY, *(Alignment(m, o, True) for m, o in ((1, 512), (4, 512), (512, 512)))]
ALIGNMENTS += [Alignment(4, PAGE, True), Alignment(512, PAGE, True), Alignment(PAGE, PAGE, False)]


class TestRoundedRead:
    """Pieces that any device takes, and bytes that are right however the device gives them."""

    @settings(max_examples=150, deadline=None, derandomize=True)
    @given(
        st.sampled_from(ALIGNMENTS),
        st.one_of(st.integers(0, 70_000), NEAR_A_BLOCK),
        LENGTHS,
        st.one_of(STARTS, st.none()),
        st.randoms(use_true_random=False),
    )
    def test_pieces_are_aligned_and_bytes_are_right_after_any_stop(
        self,
        alignment: Alignment,
        offset: int,
        length: int,
        start: int | None,
        chance: random.Random,
    ) -> None:
        """`start` None is a buffer that lies in its page as the bytes lie in the file's."""
        data = ALIGNED_DATA[: chance.choice([65536, 65536 - 512, 65000, 5])]
        start = offset % PAGE if start is None else start
        buffer = ARENA[PAGE + start :][:length]
        lay_canaries(0, 3 * PAGE + start + length)
        read = RoundedRead(ReadRequest(Path("any"), offset, buffer), alignment)
        assert read.offset % alignment.offset == 0
        self._check(read, buffer, alignment, offset)
        ended = False
        while not ended:
            at = read.offset + read.done
            there = b"".join([data[at : at + sum(map(len, read.rest))]])
            blocks = -(-len(there) // alignment.offset)
            there = there[: chance.randrange(1, blocks + 1) * alignment.offset] if blocks else b""
            self._fill(read.rest, there)
            ended = read.advance(len(there))
            if not ended:
                assert all(address(one) % alignment.memory == 0 for one in read.rest)
                assert at + len(there) == read.offset + read.done
        expected = data[offset : offset + length]
        assert read.finish() == len(expected)
        assert buffer[: len(expected)] == expected
        asked = Asked(Path("any"), offset, PAGE + start, length, expected)
        check_canaries([asked], 0, 3 * PAGE + start + length)

    def _check(
        self, read: RoundedRead, buffer: memoryview, alignment: Alignment, offset: int
    ) -> None:
        pieces = read.rest
        assert 1 <= len(pieces) <= MAX_PIECES
        assert all(address(one) % alignment.memory == 0 for one in pieces)
        assert all(len(one) and len(one) % alignment.offset == 0 for one in pieces)
        head = offset - read.offset
        assert 0 <= head < alignment.offset
        assert 0 <= sum(map(len, pieces)) - head - len(buffer) < alignment.offset
        begin = address(buffer)
        ours = [one for one in pieces if not begin <= address(one) < begin + len(buffer)]
        if (begin - offset) % max(alignment) == 0:
            assert sum(map(len, ours)) <= 2 * alignment.offset
        if alignment == ANY:
            assert not ours

    def _fill(self, pieces: list[memoryview], data: bytes) -> None:
        for piece in pieces:
            piece[: len(data)] = data[: len(piece)]
            data = data[len(piece) :]

    def test_whole_blocks_go_to_the_buffer_itself(self) -> None:
        buffer = ARENA[PAGE : 9 * PAGE]
        (piece,) = RoundedRead(ReadRequest(Path("any"), PAGE, buffer), ALIGNMENTS[-1]).rest
        assert address(piece) == address(buffer)
