"""One zstd frame, unpacked bit by bit: no more of it is in memory than the caller asked for."""

from zstandard import ZstdDecompressor

_PIECE_LENGTH = 512
"""Of packed bytes that are unpacked at once: they become 16 MiB at most, 128 KiB for 4 bytes."""


class FrameUnpacker:
    """Unpacks one frame; has the methods of `bz2.BZ2Decompressor`.

    `zstandard` has no bound for what a call gives, so it gets its input in small pieces.
    """

    def __init__(self, max_window: int) -> None:
        """Prepare for a frame whose window has `max_window` bytes at most."""
        self._frame = ZstdDecompressor(max_window_size=max_window).decompressobj()
        self._packed = memoryview(b"")
        """Input that was not needed yet."""
        self._unpacked = memoryview(b"")
        """Output that was not asked for yet."""

    @property
    def eof(self) -> bool:
        """Whether the frame has its end, and all of it was given out."""
        return self._frame.eof and not self._unpacked

    @property
    def needs_input(self) -> bool:
        """Whether there is nothing more to give out without more input."""
        return not (self._frame.eof or self._packed or self._unpacked)

    @property
    def unused_data(self) -> bytes:
        """The input after the frame's end."""
        return self._frame.unused_data + bytes(self._packed) if self._frame.eof else b""

    def decompress(self, data: bytes, max_length: int) -> bytes:
        """Unpack more, up to `max_length` bytes; `data` is empty where none is needed.

        Raises zstandard.ZstdError.
        """
        assert not data or self.needs_input
        self._packed = memoryview(data) if data else self._packed
        pieces = []
        while max_length > 0:
            if not self._unpacked:
                if not self._packed or self._frame.eof:
                    break
                piece, self._packed = self._packed[:_PIECE_LENGTH], self._packed[_PIECE_LENGTH:]
                self._unpacked = memoryview(self._frame.decompress(piece))
            pieces.append(self._unpacked[:max_length])
            self._unpacked = self._unpacked[max_length:]
            max_length -= len(pieces[-1])
        return b"".join(pieces)
