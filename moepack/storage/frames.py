"""Frames of Zstandard, as parts are stored by the codec `zstd` (FORMAT.md, "Codec").

One frame without a dictionary, which states its content size; nothing follows it. No more is
decoded than the caller's buffer takes, whatever a frame states, in a window of 64 MiB at most.
"""

import threading
from collections.abc import Callable, Iterator

from zstandard import (
    FRAME_HEADER,
    ZSTD_VERSION,
    ZstdCompressor,
    ZstdDecompressionReader,
    ZstdDecompressor,
    ZstdError,
    frame_header_size,
    get_frame_parameters,
)

ReadAt = Callable[[int, int], bytes | bytearray | memoryview]
"""Returns bytes of a frame, by their offset in it and their number."""

VERSION = ".".join(map(str, ZSTD_VERSION))
"""Of the library: other versions write other frames of the same bytes."""

_MAX_HEADER_LENGTH = 18
_BLOCK_HEADER_LENGTH = 3
_REPEATED, _RESERVED = 1, 3
"""Types of blocks: one byte that is repeated, and none."""
_CHECKSUM_LENGTH = 4
MAX_WINDOW = 1 << 26
"""Of a frame, in bytes; that of a single segment is its content."""


class _OfThread(threading.local):
    """Each thread's decoder, which uses its memory again."""

    def __init__(self) -> None:
        self.decompressor = ZstdDecompressor(max_window_size=MAX_WINDOW)


_of_thread = _OfThread()


class FrameError(ValueError):
    """A frame that breaks these rules."""


def compress(data: bytes | bytearray | memoryview, level: int) -> bytes:
    """Return one frame of `data`; always the same bytes, as long as `VERSION` is the same."""
    compressor = ZstdCompressor(level, write_checksum=False, write_content_size=True, threads=0)
    return compressor.compress(data)


def decompress_into(frame: memoryview, target: memoryview) -> None:
    """Decode one frame to exactly `target`. Raises FrameError, with it partly filled."""
    check(lambda offset, length: frame[offset : offset + length], len(frame), len(target))
    _fill(_of_thread.decompressor.stream_reader(frame), target)


def check(read_at: ReadAt, stored_length: int, length: int) -> None:
    """Check that `stored_length` bytes are one frame of `length` bytes, without decoding it.

    Raises FrameError, and errors of `read_at`.
    """
    head = bytes(read_at(0, min(stored_length, _MAX_HEADER_LENGTH)))
    position, has_checksum = _check_header(head, length)
    is_last = False
    while not is_last:
        if position + _BLOCK_HEADER_LENGTH > stored_length:
            raise FrameError("its frame is cut short")
        block = int.from_bytes(read_at(position, _BLOCK_HEADER_LENGTH), "little")
        is_last, kind, block_length = bool(block & 1), block >> 1 & 3, block >> 3
        if kind == _RESERVED:
            raise FrameError("its frame has a block of no known type")
        position += _BLOCK_HEADER_LENGTH + (1 if kind == _REPEATED else block_length)
    position += _CHECKSUM_LENGTH if has_checksum else 0
    if position > stored_length:
        raise FrameError("its frame is cut short")
    if position < stored_length:
        raise FrameError(f"its frame ends {stored_length - position:,} bytes early")


def _check_header(head: bytes, length: int) -> tuple[int, bool]:
    """Return the length of a frame's header, and whether the frame ends in a checksum."""
    if not head.startswith(FRAME_HEADER):
        raise FrameError("its frame is none of Zstandard")
    try:
        parameters, header_length = get_frame_parameters(head), frame_header_size(head)
    except ZstdError:
        raise FrameError("its frame has a damaged header") from None
    if parameters.content_size != length:
        raise FrameError(f"its frame does not state {length:,} bytes of content")
    if parameters.dict_id:
        raise FrameError("its frame needs a dictionary")
    if parameters.window_size > MAX_WINDOW:
        window = f"{parameters.window_size:,}"
        raise FrameError(f"its frame has a window of {window} bytes, more than {MAX_WINDOW:,}")
    return header_length, bool(parameters.has_checksum)


class FrameStream:
    """The content of one frame, decoded piece by piece in little memory.

    `read_at` gives the stored bytes. Raises FrameError, now or in `read_into`, and its errors.
    """

    def __init__(self, read_at: ReadAt, stored_length: int, length: int) -> None:
        check(read_at, stored_length, length)
        self._read_at = read_at
        self._position = 0
        self._stored_length = stored_length
        self._left = length
        self._decoded = ZstdDecompressor(max_window_size=MAX_WINDOW).stream_reader(
            self,  # type: ignore[arg-type]  # it needs nothing but `read`
            closefd=False,
        )

    def read(self, length: int) -> bytes:
        """Return the next stored bytes; for the decoder."""
        length = min(length, self._stored_length - self._position)
        data = bytes(self._read_at(self._position, length)) if length else b""
        self._position += length
        return data

    def read_into(self, view: memoryview) -> None:
        """Fill `view` with the next bytes of the content; its end comes only if all is sound."""
        self._left -= len(view)
        assert self._left >= 0, "more than the content"
        _fill(self._decoded, view, is_end=not self._left)

    def pieces(self, length: int) -> Iterator[memoryview]:
        """Yield the rest of the content in pieces of up to `length` bytes, in one buffer."""
        buffer = memoryview(bytearray(min(length, self._left)))
        while self._left:
            piece = buffer[: self._left]
            self.read_into(piece)
            yield piece


def _fill(decoded: ZstdDecompressionReader, view: memoryview, *, is_end: bool = True) -> None:
    """Fill `view` with decoded bytes; with `is_end`, the frame has to end there."""
    try:
        while view:
            length = decoded.readinto(view)
            if not length:
                raise FrameError("its frame has less content than it states")
            view = view[length:]
        if is_end and decoded.readinto(bytearray(1)):
            raise FrameError("its frame has more content than it states")
    except ZstdError as error:
        raise FrameError(
            f"is damaged ({str(error).removeprefix('zstd decompress error: ')})"
        ) from None
