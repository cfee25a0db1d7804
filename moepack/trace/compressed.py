"""Open a file that may be compressed, told by its first bytes: plain, gzip or zstd."""

import gzip
import io
import os
import sys
import zlib
from typing import IO

from moepack import digest
from moepack.errors import MachineError, MoepackError, TraceError

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

__all__ = ["TraceStream", "zstd"]

_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
_READ_LENGTH = 1 << 18


class TraceStream:
    """The bytes of a file, unpacked, from its beginning to its end. A context manager.

    `name` is the file's without its folder; `is_file` says that it can be opened again, `is_plain`
    that it is not compressed either. `digest` is that of all that was read so far.

    Raises TraceError for what is no file, or one whose compression is damaged or cut short,
    MachineError for one that cannot be read.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.name = os.path.basename(path)
        self.is_file = os.path.isfile(path)
        self.is_plain = False
        self._ahead = b""
        self._digest = digest.stream()
        try:
            self._file: IO[bytes] = open(path, "rb", buffering=0)  # noqa: SIM115 - close() closes it
            self._unpacked = self._unpack(self._file)
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
            raise TraceError(f"cannot read: {error.strerror}", path=path) from None
        except OSError as error:
            raise self._error(error) from None

    def _unpack(self, file: IO[bytes]) -> IO[bytes]:
        head = file.read(4)
        if not file.seekable():  # a pipe: what was read of it is put back in front
            file = io.BufferedReader(_Rejoined(head, file), _READ_LENGTH)
        else:
            file.seek(0)
        if head.startswith(_GZIP):
            return gzip.GzipFile(fileobj=file)  # type: ignore[return-value]
        if head.startswith(_ZSTD):
            return zstd.ZstdFile(file)  # type: ignore[return-value]
        self.is_plain = self.is_file
        return file

    def __enter__(self) -> "TraceStream":
        return self

    def __exit__(self, *exception: object) -> None:
        self._unpacked.close()
        self._file.close()

    def peek(self, length: int) -> bytes:
        """Return the next `length` bytes, fewer only at the end, without going on."""
        while len(self._ahead) < length and (more := self._read(length - len(self._ahead))):
            self._ahead += more
        return self._ahead[:length]

    def read(self, length: int = _READ_LENGTH) -> bytes:
        """Read up to `length` bytes; none at the end."""
        if self._ahead:
            data, self._ahead = self._ahead[:length], self._ahead[length:]
        else:
            data = self._read(length)
        self._digest.update(data)
        return data

    @property
    def digest(self) -> int:
        """The XXH3-64 of the bytes that were read, unpacked."""
        return self._digest.intdigest()

    def read_whole(self, length: int) -> bytes:
        """Read `length` bytes, fewer only at the end."""
        parts = []
        while length and (data := self.read(length)):
            parts.append(data)
            length -= len(data)
        return b"".join(parts)

    def _read(self, length: int) -> bytes:
        try:
            return self._unpacked.read(length) or b""
        except (EOFError, zlib.error, zstd.ZstdError, gzip.BadGzipFile, OSError) as error:
            raise self._error(error) from None

    def _error(self, error: Exception) -> MoepackError:
        if isinstance(error, OSError) and error.errno is not None:
            return MachineError(f"cannot read: {error.strerror}", path=self.path)
        hint = "it was cut short or damaged: take it again from where it came"
        return TraceError(f"cannot be unpacked: {error}", path=self.path, hint=hint)


class _Rejoined(io.RawIOBase):
    """A pipe whose first bytes were read already."""

    def __init__(self, head: bytes, rest: IO[bytes]) -> None:
        self._head = head
        self._rest = rest

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        data = self._head[: len(buffer)] or self._rest.read(len(buffer)) or b""
        self._head = self._head[len(data) :] if self._head else b""
        buffer[: len(data)] = data
        return len(data)
