"""Frames of Zstandard: exactly one, of exactly the length that is asked for, or an error."""

import random
import re
from collections.abc import Callable

import pytest
import zstandard

from moepack.storage import frames
from moepack.storage.extents import Extent
from moepack.storage.frames import FrameError

DATA = random.Random(5).randbytes(3000) + b"again" * 1000 + bytes(200_000) + b"the end"


def decoded(frame: bytes, length: int) -> bytes:
    """Decode a frame in one go."""
    target = bytearray(length)
    frames.decompress_into(memoryview(frame), memoryview(target))
    return bytes(target)


def streamed(frame: bytes, length: int, piece_length: int = 997) -> bytes:
    """Decode a frame piece by piece."""
    stream = frames.FrameStream(lambda at, count: frame[at : at + count], len(frame), length)
    return b"".join(map(bytes, stream.pieces(piece_length)))


Way = Callable[[bytes, int], bytes]
WAYS: list[Way] = [decoded, streamed]
each_way = pytest.mark.parametrize("way", WAYS)


@each_way
@pytest.mark.parametrize("level", [1, 3, 9, 19])
@pytest.mark.parametrize("length", [1, 5, 128 << 10, len(DATA)])
def test_what_was_compressed_comes_back(way: Way, level: int, length: int) -> None:
    frame = frames.compress(DATA[:length], level)
    assert way(frame, length) == DATA[:length]


@each_way
def test_frames_of_other_writers_are_decoded(way: Way) -> None:
    """With a checksum, of many blocks that were flushed one by one, of a long window."""
    with_checksum = zstandard.ZstdCompressor(write_checksum=True).compress(DATA)
    assert way(with_checksum, len(DATA)) == DATA
    writer = zstandard.ZstdCompressor().compressobj(size=len(DATA))
    pieces = []
    for start in range(0, len(DATA), 7001):
        pieces += [writer.compress(DATA[start : start + 7001])]
        pieces += [writer.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)]
    assert way(b"".join(pieces) + writer.flush(), len(DATA)) == DATA
    far = zstandard.ZstdCompressionParameters(window_log=28, enable_ldm=True)
    assert way(zstandard.ZstdCompressor(compression_params=far).compress(DATA), len(DATA)) == DATA


def of_window(descriptor: int) -> bytes:
    """Make a frame by hand, of 4,096 times a byte, with a window of its own."""
    head = b"\x28\xb5\x2f\xfd\x80" + bytes([descriptor]) + (4096).to_bytes(4, "little")
    return head + (4096 << 3 | 1 << 1 | 1).to_bytes(3, "little") + b"x"


@each_way
def test_a_window_of_up_to_64_mib_is_allowed(way: Way) -> None:
    assert way(of_window(16 << 3), 4096) == b"x" * 4096
    with pytest.raises(FrameError, match="has a window of 75,497,472 bytes, more than 67,108,864"):
        way(of_window(16 << 3 | 1), 4096)


def test_the_window_of_a_single_segment_is_its_content() -> None:
    head = b"\x28\xb5\x2f\xfd\xa0"
    block = (3).to_bytes(3, "little") + b"x"
    for length, problem in ((1 << 26, "cut short"), ((1 << 26) + 1, "has a window of 67,108,865")):
        data = head + length.to_bytes(4, "little") + block[:2]
        with pytest.raises(FrameError, match=problem):
            checked(data, length)


def checked(data: bytes, length: int) -> None:
    frames.check(lambda at, count: data[at : at + count], len(data), length)


def without_size() -> bytes:
    return zstandard.ZstdCompressor(write_content_size=False).compress(DATA)


def with_dictionary() -> bytes:
    samples: list[bytes | bytearray | memoryview] = [
        random.Random(n).randbytes(40) + b"the same words" * 20 for n in range(200)
    ]
    dictionary = zstandard.train_dictionary(4096, samples)
    return zstandard.ZstdCompressor(dict_data=dictionary).compress(DATA)


def of_reserved_block(frame: bytes) -> bytes:
    at = zstandard.frame_header_size(frame)
    return frame[:at] + bytes([frame[at] | 0b110]) + frame[at + 1 :]


FRAME = frames.compress(DATA, 3)
SKIPPABLE = b"\x50\x2a\x4d\x18\x04\x00\x00\x00abcd"
BROKEN = {
    "nothing": (b"", "is none of Zstandard"),
    "something else": (b"GGUF" + FRAME[4:], "is none of Zstandard"),
    "its magic alone": (FRAME[:4], "has a damaged header"),
    "cut in its header": (FRAME[:7], "has a damaged header"),
    "cut in a block": (FRAME[:1000], "is cut short"),
    "cut by a byte": (FRAME[:-1], "is cut short"),
    "a byte more": (FRAME + b"\0", "ends 1 bytes early"),
    "two frames": (FRAME + FRAME, f"ends {len(FRAME):,} bytes early"),
    "a skippable frame before it": (SKIPPABLE + FRAME, "is none of Zstandard"),
    "a skippable frame after it": (FRAME + SKIPPABLE, "ends 12 bytes early"),
    "less content": (frames.compress(DATA[:-1], 3), "does not state"),
    "more content": (frames.compress(DATA + b"x", 3), "does not state"),
    "no length length": (without_size(), "does not state"),
    "a dictionary": (with_dictionary(), "needs a dictionary"),
    "a reserved block": (of_reserved_block(FRAME), "has a block of no known type"),
}


@each_way
@pytest.mark.parametrize("what", BROKEN)
def test_what_is_no_such_frame_is_refused(way: Way, what: str) -> None:
    frame, problem = BROKEN[what]
    with pytest.raises(FrameError, match=re.escape(f"its frame {problem}")):
        way(frame, len(DATA))


def raw_frame(length: int, *blocks: bytes) -> bytes:
    """Make a frame by hand, of raw blocks, which states `length` bytes."""
    head = b"\x28\xb5\x2f\xfd" + bytes([0b1010_0000]) + length.to_bytes(4, "little")
    for number, block in enumerate(blocks):
        is_last = number == len(blocks) - 1
        head += (len(block) << 3 | is_last).to_bytes(3, "little") + block
    return head


@each_way
def test_a_frame_that_states_another_length_than_it_has_is_refused(
    way: Way,
) -> None:
    assert way(raw_frame(6, b"abc", b"def"), 6) == b"abcdef"
    for length in (5, 7, 3):
        with pytest.raises(FrameError):
            way(raw_frame(length, b"abc", b"def"), length)
    with pytest.raises(FrameError):
        way(raw_frame(3, b"abc", b"", b"d"), 3)


@pytest.mark.parametrize("piece_length", [1, 2, 3])
def test_the_last_piece_is_not_given_before_the_frame_has_ended(piece_length: int) -> None:
    assert streamed(raw_frame(3, b"ab", b"c", b""), 3, piece_length) == b"abc"
    with pytest.raises(FrameError):
        streamed(raw_frame(3, b"ab", b"c", b"d"), 3, piece_length)


@each_way
def test_more_content_behind_what_is_read_at_once_is_refused(
    way: Way,
) -> None:
    """All of the stated length is decoded before the decoder asks for the surplus block."""
    first = b"a" * 100_000
    head_length = len(raw_frame(0, first, b""))
    second = b"b" * (zstandard.DECOMPRESSION_RECOMMENDED_INPUT_SIZE - head_length)
    length = len(first + second)
    assert way(raw_frame(length, first, second, b""), length) == first + second
    with pytest.raises(FrameError):
        way(raw_frame(length, first, second, b"d"), length)
    with pytest.raises(FrameError):
        streamed(raw_frame(length, first, second, b"d"), length, length)


def test_what_lies_in_a_frame_is_not_shared_with_what_it_is_decoded_to() -> None:
    extent = Extent(0, 8192, 0, 4096)
    assert extent.is_blocks
    assert not extent._replace(frame_length=4096).is_blocks


def test_a_bomb_takes_no_more_room_than_was_given() -> None:
    """A megabyte of blocks, each of which repeats a byte 128 KiB times, states 3 bytes."""
    block = (128 << 10 << 3 | 0b010).to_bytes(3, "little") + b"x"
    last = (128 << 10 << 3 | 0b011).to_bytes(3, "little") + b"x"
    bomb = raw_frame(3) + block * 250_000 + last
    for way in WAYS:
        with pytest.raises(FrameError):
            way(bomb, 3)
