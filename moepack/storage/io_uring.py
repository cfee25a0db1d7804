"""The backend `uring`: many direct reads in flight through an io_uring, without threads (Linux)."""

import contextlib
import errno
import os
import struct
from collections.abc import Iterable

from moepack.storage import aligned_read, ring
from moepack.storage.aligned_read import MAX_PIECES, RoundedRead, address, is_aligned
from moepack.storage.backend import Completion, ReadRequest, completed
from moepack.storage.open_files import OpenFile, OpenFiles, open_direct
from moepack.storage.ring import Ring

_IOVEC = struct.Struct("=QQ")
_ASK_AGAIN = {-errno.EINTR, -errno.EAGAIN}


class UringBackend:
    """Reads with O_DIRECT: queued reads through a ring, single ones at once.

    A single read gains nothing from a ring. Rings are set up once and kept for the next queue; with
    `fixed`, memory is registered with each of them, so that the kernel need not pin its pages for
    every read into it.
    """

    name = "uring"

    def __init__(self, fixed: memoryview | None = None) -> None:
        self._files = OpenFiles(open_direct)
        self._fixed = fixed
        self._idle: list[UringQueue] = []
        self._is_closed = False

    def read(self, request: ReadRequest) -> Completion:
        """Do one request now, in this thread."""
        return aligned_read.read(self._files, 0, request)

    def queue(self, depth: int) -> "UringQueue":
        """Return a queue with a ring of its own. Raises OSError if there is none."""
        with contextlib.suppress(IndexError):
            queue = self._idle.pop()
            if queue.depth == depth:
                return queue
            queue.free()
        return UringQueue(self, self._files, depth, self._fixed)

    def close(self) -> None:
        """Free all rings and close all files."""
        self._is_closed = True
        self._free_idle()
        self._files.close()

    def keep(self, queue: "UringQueue") -> None:
        """Take a closed queue back, for the next owner."""
        if queue not in self._idle:  # a close that was cut off is done again
            self._idle.append(queue)
        if self._is_closed:  # it may have been closed in between
            self._free_idle()

    def _free_idle(self) -> None:
        with contextlib.suppress(IndexError):
            while True:
                self._idle.pop().free()


class UringQueue:
    """The requests of one caller in a ring."""

    def __init__(
        self, backend: UringBackend, files: OpenFiles, depth: int, fixed: memoryview | None
    ) -> None:
        self.depth = depth
        self._backend = backend
        self._files = files
        self._ring = Ring(depth)
        self._fixed = range(0)
        if fixed is not None:
            self._fixed = range(address(fixed), address(fixed) + len(fixed))
            try:
                self._ring.register(self._fixed.start, len(fixed))
            except OSError:
                self._ring.close()
                raise
        self._iovecs = memoryview(bytearray(depth * MAX_PIECES * _IOVEC.size))
        self._free = list(range(depth))
        # Those that need no rounding, nearly all, end with one result and no more arithmetic.
        self._reads: dict[int, tuple[int, ReadRequest, OpenFile, RoundedRead | None]] = {}
        self._failed: list[Completion] = []
        self._event: int | None = None

    def start(self, requests: Iterable[tuple[int, ReadRequest]]) -> None:
        """Submit requests, all with one system call."""
        for number, request in requests:
            path, offset, buffer, more = request
            try:
                file = self._files.get(path)
                start, length = address(buffer), len(buffer)
                if not more and is_aligned(offset, length, start, file.alignment):
                    slot = self._free.pop()
                    self._reads[slot] = (number, request, file, None)
                    self._prepare_piece(slot, file, offset, start, length)
                    continue
                read = RoundedRead(request, file.alignment)
            except OSError as error:
                self._failed.append(Completion(number, 0, error))
                if self._event is not None:
                    os.eventfd_write(self._event, 1)
                continue
            slot = self._free.pop()
            self._reads[slot] = (number, request, file, read)
            self._prepare_rest(slot, file, read)
        self._ring.submit()

    def finished(self, *, wait: bool) -> list[Completion]:
        """Return the completions so far; with `wait`, at least one."""
        if self._event is not None:
            _clear(self._event)
        completions, self._failed = self._failed, []
        while True:
            for slot, result in self._ring.completions(wait=wait and not completions):
                completion = self._end(slot, result)
                if completion is not None:
                    completions.append(completion)
            self._ring.submit()
            if completions or not wait or not self._reads:
                return completions

    def fileno(self) -> int:
        """Return the descriptor of an eventfd that counts completions from now on."""
        if self._event is None:
            self._event = self._ring.event_descriptor()
        return self._event

    def close(self) -> None:
        """Wait for the requests in flight: the kernel writes into their memory till then.

        Reads that a device has begun cannot be called back, so none is cancelled. The ring is kept.
        """
        while self._ring.completions(wait=True):
            pass
        self._reads.clear()
        self._free = list(range(self.depth))
        self._failed.clear()
        if self._event is not None:
            _clear(self._event)  # else the next owner would see them
        self._backend.keep(self)

    def free(self) -> None:
        """Free the ring; nothing is in flight."""
        self._ring.close()

    def _prepare_piece(
        self, slot: int, file: OpenFile, offset: int, start: int, length: int
    ) -> None:
        # An entry has 32 bits for it; the rest is requested again as after a short read.
        length = min(length, ring.MAX_BUFFER_LENGTH)
        code, buffer = ring.READ, 0
        if self._fixed and start in self._fixed and start + length <= self._fixed.stop:
            number, at = divmod(start - self._fixed.start, ring.MAX_BUFFER_LENGTH)
            if at + length <= ring.MAX_BUFFER_LENGTH:
                code, buffer = ring.READ_FIXED, number
        self._ring.prepare(code, file.descriptor, offset, start, length, slot, buffer)

    def _prepare_rest(self, slot: int, file: OpenFile, read: RoundedRead) -> None:
        """Prepare the rest of a read; the kernel reads the iovecs when it is submitted."""
        pieces, offset = read.rest, read.offset + read.done
        if len(pieces) == 1:
            return self._prepare_piece(slot, file, offset, address(pieces[0]), len(pieces[0]))
        first = slot * MAX_PIECES * _IOVEC.size
        for number, piece in enumerate(pieces):
            at = first + number * _IOVEC.size
            _IOVEC.pack_into(self._iovecs, at, address(piece), len(piece))
        start = address(self._iovecs[first:])
        return self._ring.prepare(ring.READV, file.descriptor, offset, start, len(pieces), slot)

    def _end(self, slot: int, result: int) -> Completion | None:
        """Return the completion of a read by its result; None if the read goes on."""
        number, request, file, read = self._reads[slot]
        if read is None and result == len(request.buffer):
            del self._reads[slot]
            self._free.append(slot)
            return completed(number, result)
        if read is None:
            read = RoundedRead(request, file.alignment)
            self._reads[slot] = (number, request, file, read)
        if result in _ASK_AGAIN or (result >= 0 and not read.advance(result)):
            self._prepare_rest(slot, file, read)
            return None
        del self._reads[slot]
        self._free.append(slot)
        if result < 0:
            return Completion(number, 0, OSError(-result, os.strerror(-result)))
        return Completion(number, read.finish(), None)


def _clear(event: int) -> None:
    with contextlib.suppress(BlockingIOError):
        os.eventfd_read(event)
