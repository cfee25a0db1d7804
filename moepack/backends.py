"""How bytes come from the disk: the contract of a reading backend, and the buffered one.

A backend knows files, offsets and buffers, and nothing of experts. It fills each request's buffer
whole or reports what went wrong; it never returns with less and says nothing.
"""

import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol


class ReadRequest(NamedTuple):
    """Fill `buffer` with the bytes of the file at `path` from `offset` on.

    `offset` counts from the start of the file. The buffer belongs to the caller, is writable and
    must stay alive until the request is completed.
    """

    path: Path
    offset: int
    buffer: memoryview


class Completion(NamedTuple):
    """The end of request number `number`: `length` bytes are in its buffer.

    `error` is the operating system's, None where there was none; fewer bytes than asked and no
    error means that the file ended.
    """

    number: int
    length: int
    error: OSError | None


class Backend(Protocol):
    """A way to read. Each method may be called from several threads."""

    name: str

    def read(self, requests: Sequence[ReadRequest]) -> Iterator[Completion]:
        """Do all requests and yield each one's completion, in whatever order they end."""
        ...

    def close(self) -> None:
        """Close all files. Requests in flight are ended first."""
        ...


class BufferedBackend:
    """Plain positioned reads through the page cache: works everywhere."""

    name = "buffered"

    def __init__(self) -> None:
        self._descriptors: dict[Path, int] = {}
        self._lock = threading.Lock()

    def read(self, requests: Sequence[ReadRequest]) -> Iterator[Completion]:
        """Do the requests one after another, in the order given."""
        for number, request in enumerate(requests):
            length = 0
            error = None
            try:
                descriptor = self._descriptor(request.path)
                while length < len(request.buffer):
                    got = os.preadv(descriptor, [request.buffer[length:]], request.offset + length)
                    if not got:
                        break
                    length += got
            except OSError as caught:
                error = caught
            yield Completion(number, length, error)

    def close(self) -> None:
        """Close all files."""
        with self._lock:
            for descriptor in self._descriptors.values():
                os.close(descriptor)
            self._descriptors.clear()

    def _descriptor(self, path: Path) -> int:
        with self._lock:
            if path not in self._descriptors:
                self._descriptors[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            return self._descriptors[path]
