"""Files that others compressed: joined streams, padding between them, cuts and damage."""

import gzip
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

from conformance import make_traces
from moepack.common.errors import TraceError
from moepack.traces import file
from moepack.traces.compressed import TraceStream

TEXT = b"0,1,2\n" * 20_000
HALVES = (TEXT[: len(TEXT) // 2], TEXT[len(TEXT) // 2 :])
COMPRESSORS = (gzip.compress, zstandard.compress)
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


@pytest.mark.parametrize("is_record", [False, True])
@pytest.mark.long
def test_a_gibibyte_of_zeros_is_never_in_memory_at_once(is_record: bool, tmp_path: Path) -> None:
    packer, path = zstandard.ZstdCompressor().compressobj(), tmp_path / "trace"
    packed = b"".join(packer.compress(bytes(1 << 20)) for _ in range(1 << 10)) + packer.flush()
    path.write_bytes(make_traces.record(2, b"abc", stored=packed) if is_record else packed)
    tracemalloc.start()
    try:
        with TraceStream(str(path)) as stream:
            if is_record:
                with pytest.raises(TraceError, match="another length, expected 3, found more"):
                    file.next_record(stream)
            else:
                assert stream.read_whole(1000) == bytes(1000)
        assert tracemalloc.get_traced_memory()[1] < 40 << 20
    finally:
        tracemalloc.stop()
