"""Backends of two others: for files of two kinds, or for a file system that refuses reads."""

from __future__ import annotations

import errno
import selectors
import threading
import warnings
from collections.abc import Iterable
from typing import Any

from moepack.common.paths import RemotePath
from moepack.storage.backend import Backend, Completion, ReadQueue, ReadRequest
from moepack.storage.threaded import ThreadedBackend

_REFUSALS = {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS}


class RoutedBackend:
    """Reads files of this machine through the backend `local`, and files in stores by `remote`."""

    def __init__(self, local: Backend, remote: Backend) -> None:
        self.name = local.name
        self._local = local
        self._remote = remote

    def of(self, request: ReadRequest) -> Backend:
        """Return the backend for a request."""
        return self._remote if isinstance(request.path, RemotePath) else self._local

    def settle(self, completion: Completion, request: ReadRequest) -> Completion:
        """Return the completion of a request, or that of another try."""
        return completion

    def read(self, request: ReadRequest) -> Completion:
        """Do one request now, in this thread; its number is 0."""
        return self.settle(self.of(request).read(request), request)

    def queue(self, depth: int) -> RoutedQueue:
        """Make a queue for up to `depth` requests in flight. Raises OSError if it cannot."""
        return RoutedQueue(self, self._local, depth)

    def close(self) -> None:
        """Close all files. All queues are closed and no request is in flight."""
        self._local.close()
        self._remote.close()


class FallbackBackend(RoutedBackend):
    """Reads through `first`; from its first refusal on, through the page cache, with a warning.

    Some network and FUSE file systems open files for direct reads, do the first, and refuse others.
    """

    def __init__(self, first: Backend) -> None:
        self._plain = ThreadedBackend(direct=False)
        super().__init__(first, self._plain)
        self._lock = threading.Lock()

    def of(self, request: ReadRequest) -> Backend:
        """Return the backend that reads now."""
        return self._local

    def settle(self, completion: Completion, request: ReadRequest) -> Completion:
        """Return the completion of a request, which is done again if it was refused."""
        if completion.error is None or completion.error.errno not in _REFUSALS:
            return completion
        again = self._plain.read(request)._replace(number=completion.number)
        if again.error is None:
            self._fall_back(request, completion.error)
        return again

    def _fall_back(self, request: ReadRequest, error: OSError) -> None:
        with self._lock:
            is_first = self._local is not self._plain
            if is_first:
                self._local, self._remote = self._plain, self._local
        if is_first:
            problem = f"{request.path}: the backend {self.name} was refused a read"
            self.name = self._plain.name
            text = f"{problem} ({error.strerror}); {self.name} reads from now on"
            warnings.warn(text, RuntimeWarning, stacklevel=2)


class RoutedQueue:
    """The requests of one caller in the queues of two backends; a second one is made if needed."""

    def __init__(self, backends: RoutedBackend, first: Backend, depth: int) -> None:
        self._backends = backends
        self._depth = depth
        self._queues: dict[Backend, ReadQueue] = {first: first.queue(depth)}
        self._in_flight: dict[int, ReadRequest] = {}
        self._selector: selectors.BaseSelector | None = None

    def start(self, requests: Iterable[tuple[int, ReadRequest]]) -> None:
        """Begin requests, each under a number that its completion bears; do not wait for them."""
        by_backend: dict[Backend, list[tuple[int, ReadRequest]]] = {}
        for number, request in requests:
            by_backend.setdefault(self._backends.of(request), []).append((number, request))
        for backend, own in by_backend.items():
            if backend not in self._queues:
                queue = self._queues[backend] = backend.queue(self._depth)
                if self._selector is not None:
                    self._selector.register(queue.fileno(), selectors.EVENT_READ)
            self._in_flight.update(own)
            self._queues[backend].start(own)

    def finished(self, *, wait: bool) -> list[Completion]:
        """Return the completions so far; with `wait`, and if any are in flight, at least one."""
        if len(self._queues) == 1:
            (queue,) = self._queues.values()
            completions = queue.finished(wait=wait)
        else:
            completions = self._completions()
            if wait and self._in_flight and not completions:
                selector = self._watched()
                # Those that ended before they were watched count for nothing there.
                while not (completions := self._completions()):
                    selector.select()
        settle, pop = self._backends.settle, self._in_flight.pop
        return [settle(completion, pop(completion.number)) for completion in completions]

    def _completions(self) -> list[Completion]:
        queues = self._queues.values()
        return [completion for queue in queues for completion in queue.finished(wait=False)]

    def _watched(self) -> selectors.BaseSelector:
        if self._selector is None:
            self._selector = selectors.DefaultSelector()
            for queue in self._queues.values():
                self._selector.register(queue.fileno(), selectors.EVENT_READ)
        return self._selector

    def fileno(self) -> int:
        """Return a descriptor that is readable when requests have ended, for event loops."""
        watched: Any = self._watched()  # of epoll or kqueue, which have one
        return int(watched.fileno())

    def close(self) -> None:
        """Drop requests that have not begun, wait for those in flight, and free the queues."""
        for queue in self._queues.values():
            queue.close()
        if self._selector is not None:
            self._selector.close()
            self._selector = None
