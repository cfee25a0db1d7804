"""A backend that was chosen for a file system, and reads through the page cache if it refuses.

Some network and FUSE file systems open files for direct reads, do the first, and refuse others.
"""

import errno
import threading
import warnings
from collections.abc import Iterable

from moepack.storage.backend import Backend, Completion, ReadRequest
from moepack.storage.routed_backend import RoutedBackend, RoutedQueue
from moepack.storage.threaded import ThreadedBackend

_REFUSALS = {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS}


class FallbackBackend(RoutedBackend):
    """Reads through `first`; from its first refusal on, through the page cache, with a warning."""

    def __init__(self, first: Backend) -> None:
        self._first, self._plain = first, ThreadedBackend(direct=False)
        super().__init__(first, self._plain)
        self._has_fallen_back = False
        self._lock = threading.Lock()

    def of(self, request: ReadRequest) -> Backend:
        """Return the backend for a request."""
        return self.current

    def read(self, request: ReadRequest) -> Completion:
        """Do one request now, in this thread; its number is 0."""
        return self.settle(super().read(request), request)

    def queue(self, depth: int) -> "FallbackQueue":
        """Make a queue for up to `depth` requests in flight. Raises OSError if it cannot."""
        return FallbackQueue(self, self.current, depth)

    @property
    def current(self) -> Backend:
        """The backend that reads now."""
        return self._plain if self._has_fallen_back else self._first

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
            is_first, self._has_fallen_back = not self._has_fallen_back, True
        if is_first:
            problem = f"{request.path}: the backend {self.name} was refused a read"
            self.name = self._plain.name
            text = f"{problem} ({error.strerror}); {self.name} reads from now on"
            warnings.warn(text, RuntimeWarning, stacklevel=2)


class FallbackQueue(RoutedQueue):
    """The requests of one caller: refused ones are done again where their completions are taken."""

    def __init__(self, backend: FallbackBackend, first: Backend, depth: int) -> None:
        super().__init__(backend, first, depth)
        self._backend = backend
        self._requests: dict[int, ReadRequest] = {}

    def start(self, requests: Iterable[tuple[int, ReadRequest]]) -> None:
        """Begin requests, each under a number that its completion bears; do not wait for them."""
        requests = list(requests)
        self._requests.update(requests)
        super().start(requests)

    def finished(self, *, wait: bool) -> list[Completion]:
        """Return the completions so far; with `wait`, and if any are in flight, at least one."""
        return [
            self._backend.settle(completion, self._requests.pop(completion.number))
            for completion in super().finished(wait=wait)
        ]
