"""The narrow door for bytes: a file with a length and an identity, read by ranges.

A file of this machine is one kind behind it, an object in a store another.
"""

import os
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, TypeAlias

from moepack.common.paths import AnyPath, RemotePath, as_remote
from moepack.storage.regular_file import FileStamp, open_regular

if TYPE_CHECKING:
    from moepack.storage.remote.store import RemoteStamp

Stamp: TypeAlias = "FileStamp | RemoteStamp"
"""The facts of a file that change when it is replaced or written to, its length among them."""

_PIECE_LENGTH = 1 << 20
_WINDOW_LENGTH = 4 << 20
"""Bytes of a remote file that a thread gets at once: most read from the front to the end."""


def open_input(path: AnyPath) -> "InputFile":
    """Open a regular file, or an object in a store. Raises OSError, NotRegularError."""
    remote = as_remote(path)
    return InputFile(path, open_regular(path)) if remote is None else _RemoteFile(remote)


class InputFile:
    """An open file; `stamp` is that of when it was opened, `descriptor` None if it is in a store.

    The calls may be made from several threads. They raise OSError, with its text in `strerror`.
    """

    stamp: Stamp

    def __init__(self, path: AnyPath, descriptor: int) -> None:
        self._path = path
        self.descriptor: int | None = descriptor
        self.stamp = FileStamp.from_stat(os.fstat(descriptor))

    def read_into(self, offset: int, buffer: memoryview) -> int:
        """Read up to len(buffer) bytes from `offset`; 0 are the end of the file."""
        assert self.descriptor is not None
        return os.preadv(self.descriptor, [buffer], offset)

    def stream(self, offset: int, length: int) -> Iterator[bytes]:
        """Yield `length` bytes from `offset` on, piece by piece; fewer if the file ends."""
        assert self.descriptor is not None
        end = offset + length
        while offset < end and (
            piece := os.pread(self.descriptor, min(_PIECE_LENGTH, end - offset), offset)
        ):
            yield piece
            offset += len(piece)

    def current_stamp(self) -> Stamp:
        """Return the stamp of the file at the path now."""
        assert self.descriptor is not None
        opened = FileStamp.from_stat(os.fstat(self.descriptor))
        return opened if opened != self.stamp else FileStamp.from_stat(os.stat(self._path))

    def close(self) -> None:
        """Close the file; may be called again."""
        if self.descriptor is not None:
            descriptor, self.descriptor = self.descriptor, None
            os.close(descriptor)


class _RemoteFile(InputFile):
    stamp: "RemoteStamp"

    def __init__(self, path: RemotePath) -> None:
        from moepack.storage.remote.stores import check_length, store_of  # here: few are remote

        self.descriptor = None
        self._store = store_of(path)
        self._key = path.key
        self.stamp = self._store.stamp(path.key)
        check_length(path, self.stamp)
        self._window = threading.local()

    def read_into(self, offset: int, buffer: memoryview) -> int:
        length = max(0, min(len(buffer), self.stamp.length - offset))
        if not length:
            return 0
        start, data = getattr(self._window, "range", (0, b""))
        if not start <= offset < start + len(data):
            start, data = offset, b"".join(self.stream(offset, max(length, _WINDOW_LENGTH)))
            self._window.range = start, data
        piece = memoryview(data)[offset - start :][:length]
        buffer[: len(piece)] = piece
        return len(piece)

    def stream(self, offset: int, length: int) -> Iterator[bytes]:
        length = max(0, min(length, self.stamp.length - offset))
        return self._store.stream(self._key, offset, length, self.stamp)

    def current_stamp(self) -> Stamp:
        return self._store.stamp(self._key)
