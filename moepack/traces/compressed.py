"""Open a file that may be compressed, told by its first bytes: gzip, zstd, or plain."""

import gzip
import io
import os
import zlib
from typing import IO, Any

from zstandard import ZstdDecompressor, ZstdError

from moepack.common import digest
from moepack.common.errors import MachineError, MoepackError, TraceError, read_failure

_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
_READ_LENGTH = 1 << 18
PIECE_LENGTH = 512
"""Packed bytes that are unpacked at once: they become 16 MiB at most, zstd's 128 KiB for 4 bytes.

`zstandard` has no bound for what a call gives.
"""
_ZSTD_WINDOW = 128 << 20
"""Largest window of a frame, in bytes: that of `unzstd` by default, and of `zstd --ultra -22`."""
_WIDE_WINDOW = "too much memory"
_WIDE_HINT = f"window above {_ZSTD_WINDOW >> 20} MiB: `unzstd --long=31` unpacks it"


class TraceStream:
    """The bytes of a file, unpacked, from its beginning to its end. A context manager.

    `name` is the file's without its folder; `is_file` is whether it can be opened again, `is_plain`
    whether it is not compressed either. `digest` is that of the bytes read so far. `data` replaces
    the content of the file.

    Raises TraceError for a missing file, and for damaged or cut compression, MachineError for a
    file that cannot be read.
    """

    def __init__(self, path: str, data: bytes | None = None) -> None:
        self.path = path
        self.name = os.path.basename(path)
        self.is_file = os.path.isfile(path)
        self.is_plain = False
        self._ahead = b""
        self._digest = digest.stream()
        try:
            raw = io.FileIO(path) if data is None else io.BytesIO(data)
            self._file: io.BufferedReader[Any] = io.BufferedReader(raw, _READ_LENGTH)
            self._unpacked = self._unpack(self._file)
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
            raise read_failure(error, path, TraceError) from None
        except OSError as error:
            raise self._error(error) from None

    def _unpack(self, file: "io.BufferedReader[Any]") -> IO[bytes]:
        head = file.peek()
        if head.startswith(_GZIP):
            return gzip.GzipFile(fileobj=file)  # type: ignore[return-value]
        if head.startswith(_ZSTD):
            return io.BufferedReader(_ZstdFile(file), _READ_LENGTH)
        self.is_plain = self.is_file
        return file

    def __enter__(self) -> "TraceStream":
        return self

    def __exit__(self, *exception: object) -> None:
        self._unpacked.close()
        self._file.close()

    def peek(self, length: int) -> bytes:
        """Return the next `length` bytes, fewer only at the end, without reading them."""
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
            return self._unpacked.read(length)
        except (EOFError, zlib.error, OSError) as error:
            raise self._error(error) from None

    def _error(self, error: Exception) -> MoepackError:
        if isinstance(error, OSError) and error.errno is not None:
            return MachineError(f"cannot read: {error.strerror}", path=self.path)
        hint = "it was cut short or damaged: take it again from where it came"
        if _WIDE_WINDOW in str(error):
            hint = _WIDE_HINT
        return TraceError(f"cannot be unpacked: {error}", path=self.path, hint=hint)


class _ZstdFile(io.RawIOBase):
    """The unpacked bytes of a file of one frame, or of several that were joined."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._begin = ZstdDecompressor(max_window_size=_ZSTD_WINDOW).decompressobj
        self._frame = self._begin()
        self._packed = b""
        self._unpacked = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        while not self._unpacked:
            if self._frame.eof and not self._begin_next():
                return 0
            packed, self._packed = self._packed or self._file.read(PIECE_LENGTH), b""
            if not packed:
                raise EOFError("it ends too early")
            try:
                self._unpacked = memoryview(self._frame.decompress(packed))
            except ZstdError as error:
                raise OSError(str(error)) from None
        data = self._unpacked[: len(buffer)]
        self._unpacked = self._unpacked[len(data) :]
        buffer[: len(data)] = data
        return len(data)

    def _begin_next(self) -> bool:
        """Begin the frame that follows, if there is one."""
        rest = self._frame.unused_data or self._file.read(PIECE_LENGTH)
        if rest:
            self._packed, self._frame = rest, self._begin()
        return bool(rest)
