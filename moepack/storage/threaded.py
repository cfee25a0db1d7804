"""The backends `buffered`, `direct` and `remote`: reads that wait, many at a time in a few threads.

`os.preadv` lets go of the interpreter lock while it reads. Threads are started when there is work
for them, and end when the backend is closed.
"""

import contextlib
import ctypes
import errno
import os
import threading
import warnings
from collections.abc import Iterable, Sequence
from queue import Empty, SimpleQueue

from moepack.common.paths import RemotePath
from moepack.common.sizes import align
from moepack.storage.backend import Completion, ReadRequest
from moepack.storage.buffers import map_memory
from moepack.storage.open_files import Alignment, OpenFiles, open_buffered, open_direct
from moepack.storage.remote.calls import CallGroup, CanceledError
from moepack.storage.remote.store import RemoteStamp

MAX_THREADS = 64
_MAX_CACHED = 1 << 20
"""Bytes that are copied out of the page cache at once: in that time a thread would hardly wake."""
_NOWAIT = getattr(os, "RWF_NOWAIT", 0)
_PATIENCE = 5.0
"""Seconds for a thread that has nothing to do to end: a finaliser must not wait for ever."""
_REFUSALS = {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS}


class ThreadedBackend:
    """Reads with `os.preadv`: through the page cache, or past it if `direct`.

    One that `falls_back` reads through the page cache from the first refusal on, with a warning:
    some network and FUSE file systems open files for direct reads, do the first, and refuse others.
    """

    def __init__(self, *, direct: bool, falls_back: bool = False) -> None:
        self.name = "direct" if direct else "buffered"
        self._files = OpenFiles(open_direct if direct else open_buffered)
        self._plain_files = OpenFiles(open_buffered) if falls_back else self._files
        self._all_files = self._files, self._plain_files
        self._warning: str | None = None
        self._work: SimpleQueue[_Started | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._unfinished = 0
        self._lock = threading.Lock()

    def read(self, request: ReadRequest) -> Completion:
        """Do one request now, in this thread."""
        completion = self.do(0, request)
        self.warn()
        return completion

    def do(self, number: int, request: ReadRequest) -> Completion:
        """Do the request `number` now, in this thread; a thread of ours, which must not warn."""
        files, plain = self._files, self._plain_files
        completion = _read(files, number, request)
        error = completion.error
        if error is None or files is plain or error.errno not in _REFUSALS:
            return completion
        again = _read(plain, number, request)
        if again.error is None:
            self._fall_back(request, error)
        return again

    def _fall_back(self, request: ReadRequest, error: OSError) -> None:
        with self._lock:
            if self._files is self._plain_files:
                return
            problem = f"{request.path}: the backend {self.name} was refused a read"
            self.name = "buffered"
            self._warning = f"{problem} ({error.strerror}); buffered reads from now on"
            self._files = self._plain_files

    def warn(self) -> None:
        """Warn once if the backend has fallen back."""
        if self._warning is None:
            return
        with self._lock:  # of threads that read at once, one warns
            warning, self._warning = self._warning, None
        if warning is not None:
            warnings.warn(warning, RuntimeWarning, stacklevel=2)

    def queue(self, depth: int) -> "ThreadedQueue":
        """Make a queue; more than MAX_THREADS requests are never read at a time."""
        return ThreadedQueue(self)

    def close(self) -> None:
        """End the threads, which have nothing to do any more, and close all files."""
        self._work.put(None)
        for thread in self._threads:
            # An interruption kept it from starting, or it is this one, which dropped the reader.
            with contextlib.suppress(RuntimeError):
                thread.join(_PATIENCE)
        self._threads.clear()
        for files in self._all_files:
            files.close()

    def read_cached(self, number: int, request: ReadRequest) -> Completion | None:
        """Do a request in this thread if that needs no waiting; return None if it would wait."""
        path, offset, buffer, more = request
        length = request.length if more else len(buffer)
        if self.name != "buffered" or length > _MAX_CACHED:
            return None
        try:
            file = self._files.get(path)
            if not (_NOWAIT or file.is_in_memory):
                return None
            flags = 0 if file.is_in_memory else _NOWAIT
            read_length = os.preadv(file.descriptor, [buffer, *more], offset, flags)
        except OSError:  # it is not cached, or the file system cannot tell; a thread finds out more
            return None
        return Completion(number, read_length) if read_length == length else None

    def begin(self, queue: "ThreadedQueue", number: int, request: ReadRequest) -> None:
        """Submit a request to a thread, which gives its completion to `queue`."""
        with self._lock:
            self._unfinished += 1
            if len(self._threads) < min(self._unfinished, MAX_THREADS):
                self._add_thread()
        self._work.put((queue, number, request))
        if not self._threads:
            self._work.get()
            self._end(queue, self._read(queue, number, request))

    def _add_thread(self) -> None:
        thread = threading.Thread(target=self._run, name="moepack-read", daemon=True)
        self._threads.append(thread)
        try:
            thread.start()
        except RuntimeError:  # no more to be had: those that are there do it
            self._threads.remove(thread)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            queue, number, request = work
            del work
            queue.calls.enter()
            completion = self._read(queue, number, request)
            del request  # else its buffer would be held for a moment after the owner has the bytes
            self._end(queue, completion)
        self._work.put(None)  # for the next thread

    def _read(self, queue: "ThreadedQueue", number: int, request: ReadRequest) -> Completion | None:
        if not queue.begin():
            return None
        try:
            return self.do(number, request)
        except CanceledError:
            return Completion(number, 0, OSError(errno.ECANCELED, os.strerror(errno.ECANCELED)))

    def _end(self, queue: "ThreadedQueue", completion: Completion | None) -> None:
        with self._lock:
            self._unfinished -= 1
        if completion is not None:
            queue.end(completion)


def _read(files: OpenFiles, number: int, request: ReadRequest) -> Completion:
    """Do one request, rounded outwards to the alignment of direct I/O.

    It may begin and end anywhere, and so may its buffers. If all are aligned, it is read to where
    it belongs; any other comes as whole blocks into memory of ours, and is copied.
    """
    try:
        path, offset, buffer, more = request
        descriptor, alignment, _ = files.get(path)
        if not more and _is_aligned(offset, buffer, alignment):
            length = os.preadv(descriptor, [buffer], offset)
            if length == len(buffer):
                return Completion(number, length)
        buffers, block = (buffer, *more), alignment.offset
        if offset % block == 0 and all(_is_aligned(0, one, alignment) for one in buffers):
            return Completion(number, _fill(descriptor, buffers, offset, block))
        head = offset % block
        memory = map_memory(align(head + request.length, block))
        filled = _fill(descriptor, (memory,), offset - head, block)
    except OSError as error:
        return Completion(number, 0, error)
    length = min(max(0, filled - head), request.length)
    _copy(memory[head : head + length], buffers)
    return Completion(number, length)


def _fill(descriptor: int, buffers: Sequence[memoryview], offset: int, block: int) -> int:
    """Read into buffers, one after another, as far as the file goes; return how many bytes.

    A read that stops off the grid of blocks has reached the end of the file: to go on would take a
    misaligned read, and there is nothing to get.
    """
    done, rest = 0, list(buffers)
    while rest:
        length = os.preadv(descriptor, rest, offset + done)
        done += length
        if not length or done % block:
            break
        while rest and length >= len(rest[0]):
            length -= len(rest.pop(0))
        if rest:
            rest[0] = rest[0][length:]
    return done


def _copy(data: memoryview, buffers: Sequence[memoryview]) -> None:
    """Copy bytes into buffers, one after another."""
    for buffer in buffers:
        length = min(len(buffer), len(data))
        buffer[:length], data = data[:length], data[length:]


def _is_aligned(offset: int, buffer: memoryview, alignment: Alignment) -> bool:
    """Return whether the kernel reads from `offset` into a whole buffer as it is."""
    memory, block = alignment
    start = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    return not (offset % block or len(buffer) % block or start % memory)


class RemoteBackend(ThreadedBackend):
    """Reads objects in stores, each range by one request; a replaced object is an error."""

    def __init__(self) -> None:
        super().__init__(direct=True)
        self.name = "remote"
        self._stamps: dict[RemotePath, RemoteStamp] = {}

    def do(self, number: int, request: ReadRequest) -> Completion:
        """Do the request `number` now, in this thread."""
        from moepack.storage.remote.stores import store_of  # here, since few are remote

        path = request.path
        assert isinstance(path, RemotePath)
        buffers = [request.buffer, *request.more]
        try:
            length, self._stamps[path] = store_of(path).read_into(
                path.key, request.offset, buffers, self._stamps.get(path)
            )
        except OSError as error:
            return Completion(number, 0, error)
        return Completion(number, length)


class ThreadedQueue:
    """The requests of one caller that threads are doing; `calls` are theirs to stores."""

    def __init__(self, backend: ThreadedBackend) -> None:
        self.calls = CallGroup()
        self._backend = backend
        self._ended: SimpleQueue[Completion] = SimpleQueue()
        self._in_flight = 0
        # Threads count the reads that `close` waits for: no signal's handler interrupts these.
        # Released by its owner alone: an interrupted wait must not release it for a thread.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._reading = 0
        self._is_closing = False

    def start(self, requests: Iterable[tuple[int, ReadRequest]]) -> None:
        """Do cached reads at once, and hand the others to the threads."""
        for number, request in requests:
            completion = self._backend.read_cached(number, request)
            if completion is None:
                self._backend.begin(self, number, request)
            else:
                self._ended.put(completion)
            self._in_flight += 1

    def finished(self, *, wait: bool) -> list[Completion]:
        """Return the completions so far; with `wait`, at least one."""
        completions: list[Completion] = []
        wait = wait and self._in_flight > 0
        try:
            while True:
                completions.append(self._ended.get(block=wait and not completions))
                self._in_flight -= 1
        except Empty:
            self._backend.warn()
            return completions

    def begin(self) -> bool:
        """Return whether a thread is to do a request; false once the queue is closing."""
        with self._lock:
            if self._is_closing:
                return False
            self._reading += 1
            return True

    def end(self, completion: Completion) -> None:
        """Take a request back from the thread that did it."""
        with self._lock:
            self._ended.put(completion)
            self._reading -= 1
            if self._is_closing:
                self._changed.notify_all()

    def cancel(self) -> None:
        """Drop the requests that no thread has begun; those in flight end by themselves."""
        self._is_closing = True

    def close(self) -> None:
        """Drop the requests that no thread has begun, stop calls to stores, wait for the others."""
        with self._changed:
            self._is_closing = True
            self.calls.stop()
            self._changed.wait_for(lambda: not self._reading)


_Started = tuple[ThreadedQueue, int, ReadRequest]
