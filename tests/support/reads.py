"""Files to read, requests for them, and checks of their ends."""

import contextlib
import ctypes
import errno
import gc
import mmap
import os
import random
import select
import signal
import struct
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, Self

import pytest

from moepack.storage.backend import Completion, ReadQueue, ReadRequest
from moepack.storage.buffers import allocate
from tests.support.children import PATIENCE, wait_until

PAGE = 4096
MIB = 1 << 20
ARENA = allocate(6 * MIB)
"""All buffers of these tests lie in here, so that a backend can be told of it beforehand."""
DATA = random.Random(1).randbytes(3 * MIB + 1234)
ALIGNED_DATA = DATA[: 16 * PAGE]
_libc = ctypes.CDLL(None, use_errno=True)


class Files(NamedTuple):
    """A file that ends within a block, and one that ends with a block."""

    ragged: Path
    aligned: Path


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    folder = tmp_path_factory.mktemp("backends")
    ragged, aligned = folder / "ragged.bin", folder / "aligned.bin"
    ragged.write_bytes(DATA)
    aligned.write_bytes(ALIGNED_DATA)
    return Files(ragged, aligned)


def descriptors() -> set[str]:
    """Return the open descriptors of this process, but for sockets.

    Those of connections to stores, which earlier tests left idle, are closed at any time.
    """
    numbers = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of this very list
            if not os.readlink(f"/proc/self/fd/{number}").startswith("socket:"):
                numbers.add(number)
    return numbers


@contextlib.contextmanager
def nothing_left() -> Iterator[None]:
    """Check that the block leaves no descriptor and no thread behind."""
    gc.collect()  # what earlier tests left is not to go meanwhile
    before, threads = descriptors(), threading.active_count()
    yield
    assert descriptors() == before
    assert threading.active_count() == threads


def in_child(work: Callable[[], None]) -> None:
    """Run `work` in a forked child, which may harm itself; fail if it fails.

    A child that takes too long is killed by its alarm, and TimeoutError is raised here.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(round(PATIENCE))
        try:
            work()
        except BaseException:
            os.write(writing, traceback.format_exc().encode()[-4000:])
            os._exit(1)
        os._exit(0)
    os.close(writing)
    with open(reading, "rb") as pipe:
        message = pipe.read().decode()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status == -signal.SIGALRM:
        raise TimeoutError("the child hangs")
    assert not status, f"child ended with {status}: {message}"


_FUSE_IN = struct.Struct("<IIQQIIIHH")
_FUSE_OUT = struct.Struct("<IiQ")
_FUSE_ATTRIBUTES = struct.Struct("<6Q10I")
_LOOKUP, _FORGET, _GETATTR, _OPEN, _READ, _INIT, _INTERRUPT = 1, 2, 3, 14, 15, 26, 36
_RELEASE, _FLUSH, _BATCH_FORGET = 18, 25, 42
_FSOPEN, _FSCONFIG, _FSMOUNT = 430, 431, 432
_SET_STRING, _CREATE = 1, 6
_FOPEN_DIRECT_IO = 1
_ASYNC_DIRECT = 1 << 15
"""Without it the kernel waits for the answer to a direct read while it submits it."""


def _system_call(number: int, *arguments: int | bytes | None) -> int:
    plain = [ctypes.c_long(one) if isinstance(one, int) else one for one in arguments]
    result: int = _libc.syscall(ctypes.c_long(number), *plain)
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


class HeldFile:
    """A file on which reads wait until `let_go`: FUSE, served by a thread, mounted nowhere.

    `answer` says what a read of (offset, length) gets: bytes, or an errno. The mount has no place
    in the tree of files and ends with its descriptor.
    """

    def __init__(
        self, answer: Callable[[int, int], bytes | int] | None = None, length: int = len(DATA)
    ) -> None:
        self._length = length
        self.answer = answer or (lambda offset, length: DATA[offset : offset + length])
        self.asked: list[tuple[int, int]] = []
        self._lock = threading.Lock()
        self._open = False
        self._held: list[tuple[int, int, int]] = []
        self._device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
        self._stop = os.eventfd(0)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        context = _system_call(_FSOPEN, b"fuse", 1)
        options = {"fd": str(self._device), "rootmode": "40000", "user_id": "0", "group_id": "0"}
        for key, value in options.items():
            _system_call(_FSCONFIG, context, _SET_STRING, key.encode(), value.encode(), 0)
        _system_call(_FSCONFIG, context, _CREATE, None, None, 0)
        self._mount = _system_call(_FSMOUNT, context, 1, 0)
        os.close(context)
        self._thread.start()
        self.path = Path(f"/proc/self/fd/{self._mount}/file")

    def let_go(self) -> None:
        """Answer all reads, waiting and later ones."""
        with self._lock:
            self._open = True
            waiting, self._held = self._held, []
        for one in waiting:
            self._answer(*one)

    def wait_for(self, count: int) -> None:
        """Wait until `count` reads wait for their answer."""
        wait_until(lambda: len(self._held) >= count, pause=0.001)

    def close(self) -> None:
        """End the file system; further reads fail."""
        self.let_go()
        os.close(self._mount)
        os.eventfd_write(self._stop, 1)
        self._thread.join()
        os.close(self._device)
        os.close(self._stop)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _serve(self) -> None:
        while True:
            ready, _, _ = select.select([self._device, self._stop], [], [], PATIENCE)
            if self._stop in ready:
                return
            if not ready:
                self.let_go()  # a test that hangs shall fail instead
                continue
            try:
                message = os.read(self._device, MIB + PAGE)
            except OSError:  # the one that asked is gone
                continue
            _, code, unique, node, *_ = _FUSE_IN.unpack_from(message)
            if code == _READ:
                _, offset, length = struct.unpack_from("<QQI", message, _FUSE_IN.size)
                with self._lock:
                    self.asked.append((offset, length))
                    if not self._open:
                        self._held.append((unique, offset, length))
                        continue
                self._answer(unique, offset, length)
            elif code not in (_FORGET, _BATCH_FORGET, _INTERRUPT):
                self._reply(unique, self._metadata(code, node))

    def _metadata(self, code: int, node: int) -> bytes | int:
        if code == _INIT:  # version, read-ahead, flags, background, write length, time unit
            return struct.pack("<4I2H2I", 7, 31, 0, _ASYNC_DIRECT, 64, 48, PAGE, 1).ljust(64, b"\0")
        is_file = code == _LOOKUP or node == 2
        mode, number = (0o100644, 2) if is_file else (0o40755, 1)
        times = (0,) * 6
        attributes = _FUSE_ATTRIBUTES.pack(
            number, self._length, 0, *times, mode, 1, 0, 0, 0, PAGE, 0
        )
        if code == _LOOKUP:
            return struct.pack("<QQQQII", 2, 0, 3600, 3600, 0, 0) + attributes
        if code == _GETATTR:
            return struct.pack("<QII", 3600, 0, 0) + attributes
        if code == _OPEN:
            return struct.pack("<QII", 0, _FOPEN_DIRECT_IO, 0)
        return b"" if code in (_RELEASE, _FLUSH) else errno.ENOSYS

    def _answer(self, unique: int, offset: int, length: int) -> None:
        self._reply(unique, self.answer(offset, length))

    def _reply(self, unique: int, body: bytes | int) -> None:
        code, body = (-body, b"") if isinstance(body, int) else (0, body)
        with contextlib.suppress(OSError):  # the reader was killed
            os.write(self._device, _FUSE_OUT.pack(16 + len(body), code, unique) + body)


@contextlib.contextmanager
def unmappable(pack: Path, folder: Path) -> Iterator[Path]:
    """Give a pack's files on a FUSE that maps none of them, by links in `folder`."""
    folder.mkdir()
    with contextlib.ExitStack() as stack:
        for path in pack.iterdir():
            data = path.read_bytes()
            try:
                file = HeldFile(lambda at, length, data=data: data[at : at + length], len(data))  # type: ignore[misc]
            except OSError as error:
                pytest.skip(f"this user may not mount FUSE: {error.strerror}")
            stack.enter_context(file).let_go()
            mount = Path(f"/proc/{os.getpid()}") / file.path.relative_to("/proc/self")
            (folder / path.name).symlink_to(mount)
        with pytest.raises(OSError, match=os.strerror(errno.ENODEV)), open(mount, "rb") as opened:
            mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
        yield folder


@pytest.fixture
def slow_file() -> Iterator[HeldFile]:
    """Return a file whose reads wait; a test names this before its backend."""
    try:
        file = HeldFile()
    except OSError as error:
        pytest.skip(f"this user may not mount FUSE: {error.strerror}")
    with file:
        yield file


class Asked(NamedTuple):
    """A read with its place in the arena, and the bytes that it shall give."""

    path: Path
    offset: int
    start: int
    length: int
    expected: bytes

    @property
    def request(self) -> ReadRequest:
        """Return the request."""
        return ReadRequest(self.path, self.offset, ARENA[self.start : self.start + self.length])

    def check(self, completion: Completion) -> None:
        """Compare the completion and the buffer with the plain read."""
        assert completion.error is None
        assert completion.length == len(self.expected)
        assert ARENA[self.start : self.start + completion.length] == self.expected


def ask(path: Path, offset: int, start: int, length: int) -> Asked:
    with open(path, "rb") as file:
        file.seek(offset)
        return Asked(path, offset, start, length, file.read(length))


def take_all(queue: ReadQueue, count: int) -> dict[int, Completion]:
    """Wait for `count` completions; give them by number."""
    completions: dict[int, Completion] = {}
    while len(completions) < count:
        ended = queue.finished(wait=True)
        assert ended, "nothing ended, and something is in flight"
        for completion in ended:
            assert completion.number not in completions
            completions[completion.number] = completion
    assert queue.finished(wait=False) == []
    return completions
