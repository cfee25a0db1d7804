"""Open a file that may be compressed, told by its first bytes: gzip, zstd, xz, bzip2, or plain."""

import gzip
import importlib
import io
import os
import re
import zlib
from collections.abc import Callable
from functools import partial
from typing import IO, Any, Protocol

from zstandard import ZstdError

from moepack import digest
from moepack.errors import MachineError, MoepackError, TraceError, read_failure
from moepack.trace.zstd_frame import FrameUnpacker

_GZIP, _ZSTD, _XZ = b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"\xfd7zXZ"
_BZIP2 = re.compile(rb"BZh[1-9][1\x17]")
_HEAD_LENGTH = 5
_READ_LENGTH = 1 << 18
_XZ_MEMORY = 256 << 20
"""What unpacking xz may take, in bytes: four times what `xz -9` needs."""
_ZSTD_WINDOW = 128 << 20
"""Of a frame, in bytes: what `unzstd` takes unasked, and `zstd --ultra -22` needs."""
_HINTS = {
    "Memory usage limit": f"it takes more than {_XZ_MEMORY >> 20} MiB to unpack; unxz does that",
    "too much memory": f"window above {_ZSTD_WINDOW >> 20} MiB: `unzstd --long=31` unpacks it",
}
"""What helps, by words of the error."""


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
            raise read_failure(error, path, TraceError) from None
        except OSError as error:
            raise self._error(error) from None

    def _unpack(self, file: IO[bytes]) -> IO[bytes]:
        head = b""
        while len(head) < _HEAD_LENGTH and (more := file.read(_HEAD_LENGTH - len(head))):
            head += more  # a pipe gives what there is
        if not file.seekable():  # a pipe: what was read of it is put back in front
            file = _buffered(_Rejoined(head, file))
        else:
            file.seek(0)
        if head.startswith(_GZIP):
            return gzip.GzipFile(fileobj=file)  # type: ignore[return-value]
        if head.startswith(_ZSTD):
            begin = partial(FrameUnpacker, _ZSTD_WINDOW)
            return _buffered(_Unpacked(file, begin, ZstdError, padding=b""))
        if head.startswith(_XZ):
            lzma = self._module("lzma", "unxz")
            begin = partial(lzma.LZMADecompressor, memlimit=_XZ_MEMORY)
            return _buffered(_Unpacked(file, begin, lzma.LZMAError))
        if _BZIP2.match(head):
            return _buffered(_Unpacked(file, self._module("bz2", "bunzip2").BZ2Decompressor))
        self.is_plain = self.is_file
        return file

    def _module(self, name: str, tool: str) -> Any:
        """Import a module that Python may have been built without."""
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError:
            problem, hint = f"this Python has no {name}", f"{tool} unpacks it"
            raise MachineError(problem, path=self.path, hint=hint) from None

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
        except (EOFError, zlib.error, _DamagedError, OSError) as error:
            raise self._error(error) from None

    def _error(self, error: Exception) -> MoepackError:
        if isinstance(error, OSError) and error.errno is not None:
            return MachineError(f"cannot read: {error.strerror}", path=self.path)
        hint = "it was cut short or damaged: take it again from where it came"
        hint = next((_HINTS[words] for words in _HINTS if words in str(error)), hint)
        return TraceError(f"cannot be unpacked: {error}", path=self.path, hint=hint)


def _buffered(file: io.RawIOBase) -> IO[bytes]:
    return io.BufferedReader(file, _READ_LENGTH)


class _Decompressor(Protocol):
    """One stream that is being unpacked, as `lzma` and `bz2` have it."""

    @property
    def eof(self) -> bool: ...
    @property
    def needs_input(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...

    def decompress(self, data: bytes, max_length: int) -> bytes: ...


class _DamagedError(Exception):
    """What is packed is damaged."""


class _Unpacked(io.RawIOBase):
    """What is packed in a file, in one stream or in several that were joined.

    Python's own `LZMAFile` would take as much memory as a file asks for. `error` is what `begin`'s
    streams raise; `padding` are the bytes that may stand behind a stream.
    """

    def __init__(
        self,
        file: IO[bytes],
        begin: Callable[[], _Decompressor],
        error: type[Exception] = OSError,
        *,
        padding: bytes = b"\0",
    ) -> None:
        self._file = file
        self._padding = padding
        self._begin = begin
        self._error = error
        self._stream = begin()
        self._rest = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        data = b""
        while not data:
            if self._stream.eof and not self._begin_next():
                return 0
            more = b""
            if self._stream.needs_input:
                more, self._rest = self._rest or self._file.read(_READ_LENGTH), b""
                if not more:
                    raise EOFError("it ends too early")
            try:
                data = self._stream.decompress(more, len(buffer))
            except self._error as error:
                raise _DamagedError(str(error)) from None
        buffer[: len(data)] = data
        return len(data)

    def _begin_next(self) -> bool:
        """Begin the stream that follows, if there is one."""
        rest = self._stream.unused_data.lstrip(self._padding)
        while not rest:
            more = self._file.read(_READ_LENGTH)
            if not more:
                return False
            rest = more.lstrip(self._padding)
        self._rest, self._stream = rest, self._begin()
        return True


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
