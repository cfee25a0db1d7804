"""The contract of a reading backend: how bytes come from the disk into memory.

A backend knows files, offsets and buffers, and nothing of experts. Any offset, length and buffer is
allowed: the alignment of direct I/O is the backend's own business. A request ends with its buffers
full, with an error, or with fewer bytes because the file ended; never with less and silence.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple, Protocol


class ReadRequest(NamedTuple):
    """Fill `buffer`, then each of `more`, with the bytes of the file at `path` from `offset` on.

    `offset` counts from the start of the file. The buffers are writable, not empty, and nobody
    else's until the request has ended.
    """

    path: Path
    offset: int
    buffer: memoryview
    more: tuple[memoryview, ...] = ()

    @property
    def length(self) -> int:
        """The bytes requested."""
        return len(self.buffer) + sum(map(len, self.more))


class Completion(NamedTuple):
    """The end of the request that was started as `number`: `length` bytes are in its buffers.

    `error` is the operating system's, None if there was none; fewer bytes than requested and no
    error means that the file ended.
    """

    number: int
    length: int
    error: OSError | None = None


class ReadQueue(Protocol):
    """Requests in flight of one caller. Used by one thread at a time, not always the same."""

    def start(self, requests: Iterable[tuple[int, ReadRequest]]) -> None:
        """Begin requests, each under a number that its completion bears; do not wait for them.

        No more than the queue's depth may be in flight. A request that cannot begin ends with an
        error.
        """
        ...

    def finished(self, *, wait: bool) -> list[Completion]:
        """Return the completions so far, in the order in which the requests ended.

        With `wait`, and if requests are in flight, there is at least one.
        """
        ...

    def cancel(self) -> None:
        """Drop requests that have not begun; wait for nothing and take no lock: for finalisers."""
        ...

    def close(self) -> None:
        """Drop requests that have not begun, wait for those in flight, and free the queue."""
        ...


class Backend(Protocol):
    """A way to read. Its methods may be called from several threads of the process that made it."""

    name: str

    def read(self, request: ReadRequest) -> Completion:
        """Do one request now, in this thread; its number is 0."""
        ...

    def queue(self, depth: int) -> ReadQueue:
        """Make a queue for up to `depth` requests in flight."""
        ...

    def close(self) -> None:
        """Close all files. All queues are closed, or cancelled and dropped."""
        ...
