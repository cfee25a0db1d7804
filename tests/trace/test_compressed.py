"""Files that others compressed: joined streams, what may stand between them, and what is cut."""

import bz2
import gzip
import lzma
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

from moepack.errors import TraceError
from moepack.trace.compressed import TraceStream

TEXT = b"0,1,2\n" * 20_000
HALVES = (TEXT[: len(TEXT) // 2], TEXT[len(TEXT) // 2 :])
COMPRESSORS = (gzip.compress, zstandard.compress, lzma.compress, bz2.compress)
SKIPPABLE = bytes.fromhex("552a4d18") + struct.pack("<I", 5) + b"aside"


def read(path: Path, data: bytes) -> bytes:
    path.write_bytes(data)
    with TraceStream(str(path)) as stream:
        return stream.read_whole(1 << 30)


def refused(path: Path, data: bytes) -> TraceError:
    with pytest.raises(TraceError, match="cannot be unpacked") as caught:
        read(path, data)
    return caught.value


@pytest.mark.parametrize("compress", COMPRESSORS)
def test_joined_streams_are_one_file(compress: Callable[[bytes], bytes], tmp_path: Path) -> None:
    first, second = map(compress, HALVES)
    empty = compress(b"")
    assert read(tmp_path / "trace", first + empty + empty + second + empty) == TEXT


def test_skippable_frames_of_zstd_are_passed_over(tmp_path: Path) -> None:
    first, second = map(zstandard.compress, HALVES)
    assert read(tmp_path / "trace", first + SKIPPABLE + SKIPPABLE + second + SKIPPABLE) == TEXT


@pytest.mark.parametrize("rest", [b"\0", b"\0" * 20, b"and more", SKIPPABLE[:-1], b"\x28\xb5"])
def test_what_is_no_frame_behind_zstd_frames_is_refused(rest: bytes, tmp_path: Path) -> None:
    error = refused(tmp_path / "trace", zstandard.compress(TEXT) + rest)
    assert "cut short or damaged" in str(error.hint)


def test_every_cut_of_a_compressed_file_is_noticed(tmp_path: Path) -> None:
    for compress in COMPRESSORS:
        data = compress(b"layer 1 expert 2\n")
        for length in range(6, len(data)):
            assert "cut short" in str(refused(tmp_path / "trace", data[:length]).hint)


def test_a_window_that_takes_too_much_memory_has_a_hint(tmp_path: Path) -> None:
    for window_log, is_refused in ((27, False), (28, True)):
        parameters = zstandard.ZstdCompressionParameters(window_log=window_log)
        packer = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
        data = packer.compress(TEXT) + packer.flush()
        if is_refused:
            error = refused(tmp_path / "trace", data)
            assert error.hint == "window above 128 MiB: `unzstd --long=31` unpacks it"
        else:
            assert read(tmp_path / "trace", data) == TEXT
