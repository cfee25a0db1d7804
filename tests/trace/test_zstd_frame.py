"""Frames of zstd, unpacked bit by bit."""

import random
import tracemalloc
from collections.abc import Iterator

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from moepack.trace.zstd_frame import FrameUnpacker

MAX_WINDOW = 1 << 26


def unpacked(packed: bytes, read_length: int, max_length: int) -> Iterator[bytes]:
    """Unpack a frame as whoever reads a file does, and check each answer."""
    unpacker, rest = FrameUnpacker(MAX_WINDOW), packed
    while not unpacker.eof:
        data = b""
        if unpacker.needs_input:
            assert rest, "it asks for more than there is"
            data, rest = rest[:read_length], rest[read_length:]
        piece = unpacker.decompress(data, max_length)
        assert len(piece) <= max_length
        assert piece or unpacker.needs_input or unpacker.eof, "nothing comes of waiting"
        yield piece
    assert not unpacker.needs_input
    assert unpacker.unused_data + rest == packed[len(packed) - len(TAIL) :]


TAIL = b"something else"


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 9),
    length=st.sampled_from((0, 1, 511, 4000, 300_000)),
    repeat=st.sampled_from((1, 40)),
    read_length=st.integers(1, 2000) | st.just(1 << 20),
    max_length=st.integers(1, 5000) | st.just(1 << 30),
    has_size=st.booleans(),
)
def test_what_was_packed_comes_out_in_any_portions(
    seed: int, length: int, repeat: int, read_length: int, max_length: int, has_size: bool
) -> None:
    data = random.Random(seed).randbytes(length) * repeat
    if len(data) > 1 << 20:
        max_length, read_length = max(max_length, 5000), max(read_length, 2000)
    packer = zstandard.ZstdCompressor(write_content_size=has_size)
    packed = packer.compress(data) + TAIL
    assert b"".join(unpacked(packed, read_length, max_length)) == data


def test_a_frame_that_is_cut_has_no_end() -> None:
    packed = zstandard.compress(b"routers choose experts " * 50)
    for length in range(len(packed)):
        unpacker = FrameUnpacker(MAX_WINDOW)
        unpacker.decompress(packed[:length], 1 << 20)
        assert not unpacker.eof
        assert unpacker.needs_input
        assert unpacker.unused_data == b""


def test_a_gibibyte_of_zeros_is_never_in_memory_at_once() -> None:
    packer = zstandard.ZstdCompressor().compressobj()
    packed = b"".join(packer.compress(bytes(1 << 20)) for _ in range(1 << 10)) + packer.flush()
    assert len(packed) < 40_000
    tracemalloc.start()
    try:
        unpacker = FrameUnpacker(MAX_WINDOW)
        assert unpacker.decompress(packed, 1000) == bytes(1000)
        assert not unpacker.eof
        assert tracemalloc.get_traced_memory()[1] < 40 << 20
    finally:
        tracemalloc.stop()


def test_a_window_beyond_the_bound_is_refused() -> None:
    parameters = zstandard.ZstdCompressionParameters(window_log=27)
    packer = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    packed = packer.compress(b"abc") + packer.flush()
    with pytest.raises(zstandard.ZstdError, match="too much memory"):
        FrameUnpacker(MAX_WINDOW).decompress(packed, 1000)
    assert FrameUnpacker(MAX_WINDOW << 1).decompress(packed, 1000) == b"abc"
