"""Parts that zstd stores are decoded, and refused at opening by a reader without zstd."""

import random
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard

from moepack import digest
from tests.support.c_compiler import HAS_ZSTD, SANITIZERS, ZSTD, compiled
from tests.support.c_readers import c_says, python_says
from tests.support.gguf_builder import F32, moe
from tests.support.models import pack_model
from tests.support.pack_draft import Draft, record, with_codecs

needs_zstd = pytest.mark.skipif(not HAS_ZSTD, reason="there is no zstd.h here")
EXAMPLE = Path(__file__).parents[2] / "examples" / "routed_experts.c"
LENGTH = 16384
"""Of a part, in bytes."""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pack one layer of two experts, each of three parts of 16 KiB; read-only."""
    folder = tmp_path_factory.mktemp("large")
    model = moe((0,), 2, ne=(64, 64), type_id=F32, block=(1, 4)).write(folder / "m.gguf")
    pack_model([model], folder / "pack")
    return folder / "pack"


def plain(number: int) -> bytes:
    """Return the bytes of a part, which can be made shorter."""
    return random.Random(number).randbytes(64) * (LENGTH // 64)


def store(path: Path, frames: dict[int, bytes], *, stated: bytes = b"zstd") -> Path:
    """Store parts of a pack in these bytes, as if they were frames that hold `plain` bytes."""
    draft = Draft(path)
    with_codecs(stated, count=draft.sections["parts"].record_count)(draft)
    data_path = path / draft.body["files"][0]["name"]
    data = bytearray(data_path.read_bytes())
    for number, frame in frames.items():
        offset = draft.get("part", number).offset
        data[offset : offset + LENGTH] = frame.ljust(LENGTH, b"\0")
        held = {"codec": 1, "stored_length": len(frame), "digest": digest.of(plain(number))}
        draft.set("part", number, **held)
    data_path.write_bytes(data)
    draft.save()
    return path


def copied(large: Path, path: Path) -> Path:
    return Path(shutil.copytree(large, path))


@needs_zstd
def test_parts_that_zstd_stores_are_decoded(large: Path, tmp_path: Path, program: Path) -> None:
    frames = {
        0: frame_of(plain(0)),
        2: frame_of(plain(2), 19),
        3: frame_of(plain(3), has_checksum=True),
        5: frame_of(plain(5), -5),
    }
    path = store(copied(large, tmp_path / "pack"), frames)
    (listed,) = c_says(program, "list", [path])
    assert listed == python_says(path, reads=True)
    assert listed.refusal == ""
    parts = [line.split() for line in listed.found if line.startswith("part ")]
    read = [line.split()[1] for line in listed.found if line.startswith("bytes ")]
    for number, part in enumerate(parts):
        if number in frames:
            assert part[-6:-3] == [str(len(frames[number])), str(LENGTH), "zstd"]
            assert read[number] == f"{digest.of(plain(number)):016x}"
        else:
            assert part[-6:-3] == [str(LENGTH), str(LENGTH), "None"]
            assert read[number] == part[-3]
    assert len(parts) == 6


@needs_zstd
def test_a_model_that_was_packed_with_zstd_is_the_same_in_c_and_python(
    tmp_path: Path, program: Path
) -> None:
    builder = moe((0, 1), 3, ne=(256, 64))
    for spec in builder.tensors:
        if "down" in spec.name:  # random bytes are stored as they are
            spec.data = (spec.data[:48] * len(spec.data))[: len(spec.data)]
    pack_model([builder.write(tmp_path / "m.gguf")], tmp_path / "pack", codec="zstd")
    (listed,) = c_says(program, "list", [tmp_path / "pack"])
    assert listed == python_says(tmp_path / "pack", reads=True)
    codecs = {line.split()[-4] for line in listed.found if line.startswith("part ")}
    assert codecs == {"zstd", "None"}


def frame_of(
    data: bytes, level: int = 3, *, states_size: bool = True, has_checksum: bool = False
) -> bytes:
    """Return one frame of zstd."""
    return zstandard.ZstdCompressor(
        level=level, write_content_size=states_size, write_checksum=has_checksum
    ).compress(data)


def unstated(data: bytes) -> bytes:
    """Return a frame that does not state how much it holds."""
    return frame_of(data, states_size=False)


def with_a_dictionary(data: bytes) -> bytes:
    """Return a frame that needs a dictionary, and states which."""
    samples = (random.Random(n).randbytes(16) * 8 for n in range(200))
    dictionary = zstandard.train_dictionary(4096, list[Any](samples))
    frame = zstandard.ZstdCompressor(dict_data=dictionary).compress(data)
    assert zstandard.get_frame_parameters(frame).dict_id
    return frame


def damaged(data: bytes) -> bytes:
    """Return a frame with a bit flipped that its own checksum finds."""
    frame = bytearray(frame_of(data, has_checksum=True))
    frame[-1] ^= 1
    return bytes(frame)


def repeated(descriptor: int, length: int = LENGTH) -> bytes:
    """Return a frame of zeros, with a window of its own."""
    head = b"\x28\xb5\x2f\xfd\x80" + bytes([descriptor]) + length.to_bytes(4, "little")
    return head + (length << 3 | 3).to_bytes(3, "little") + b"\0"


SKIPPED = b"\x50\x2a\x4d\x18\x04\0\0\0skip"
"""A frame that every reader of zstd passes over."""
# What is stored, and what is said of it; empty where these are words of zstd's own.
BAD_FRAMES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "no frame": (lambda data: data[:100], "none"),
    "three bytes": (lambda data: frame_of(data)[:3], "none"),
    "a frame that is skipped": (lambda data: SKIPPED, "none"),
    "one before it": (lambda data: SKIPPED + frame_of(data), "none"),
    "one after it": (lambda data: frame_of(data) + SKIPPED, "more after it"),
    "a zero after it": (lambda data: frame_of(data) + b"\0", "more after it"),
    "two frames": (
        lambda data: frame_of(data) + frame_of(b""),
        "more after it",
    ),
    "two halves": (
        lambda data: frame_of(data[:8192]) + frame_of(data[8192:]),
        "one that states another length, or none",
    ),
    "no length": (unstated, "one that states another length, or none"),
    "a byte less": (lambda data: frame_of(data[1:]), "one that states another length, or"),
    "a byte more": (lambda data: frame_of(data + b"x"), "one that states another length, or"),
    "cut short": (lambda data: frame_of(data)[:-1], ""),
    "a dictionary": (with_a_dictionary, ""),
    "a window of 72 MiB": (lambda data: repeated(0x81), "a window of more than 64 MiB"),
    "a checksum of other bytes": (damaged, ""),
}


@needs_zstd
def test_what_is_not_one_frame_of_the_part_is_refused(
    large: Path, tmp_path: Path, program: Path
) -> None:
    paths = [
        store(copied(large, tmp_path / str(number)), {4: make(plain(4))})
        for number, (make, _) in enumerate(BAD_FRAMES.values())
    ]
    verdicts = c_says(program, "list", paths)
    for (name, (_, found)), path, verdict in zip(BAD_FRAMES.items(), paths, verdicts, strict=True):
        at = Draft(path).get("part", 4).offset
        words = f"expected one frame of zstd that holds {LENGTH} bytes, found {found}"
        start = f"DAMAGED experts-00000.bin: ffn_up_exps.weight at {at}: {words}"
        assert verdict.refusal.startswith(start), (name, verdict.refusal)
        assert not verdict.refusal.endswith(" "), name
        assert python_says(path).refusal == "", name


@needs_zstd
def test_the_digest_is_that_of_decoded_bytes(large: Path, tmp_path: Path, program: Path) -> None:
    path = store(copied(large, tmp_path / "pack"), {1: frame_of(plain(4))})
    (verdict,) = c_says(program, "list", [path])
    assert verdict.refusal.startswith("DIGEST experts-00000.bin: ffn_up_exps.weight at ")
    assert verdict.refusal.endswith(f"found xxh3:{digest.of(plain(4)):016x}")


@needs_zstd
def test_the_example_reads_parts_that_zstd_stores(large: Path, tmp_path: Path) -> None:
    path = store(copied(large, tmp_path / "pack"), {1: frame_of(plain(1))})
    target = tmp_path / "x"
    run = compiled("cc", "-std=gnu99", "-Wno-pedantic", *SANITIZERS, *ZSTD, EXAMPLE, "-o", target)
    assert run.returncode == 0, run.stderr
    run = subprocess.run([target, path, "0", "0"], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout.count(": F32, 16384 bytes, sound\n") == 3


@needs_zstd
@pytest.mark.parametrize("compiler", ["gcc", "clang", "g++", "clang++"])
def test_the_header_compiles_with_zstd(compiler: str, tmp_path: Path) -> None:
    standard = ("-x", "c++", "-std=c++17") if "+" in compiler else ("-x", "c", "-std=c99")
    source = tmp_path / "one.c"
    source.write_text('#define MOEPACK_IMPLEMENTATION\n#include "moepack.h"\nint main(void) {}\n')
    run = compiled(compiler, "-O2", *standard, *ZSTD, source, "-o", tmp_path / "program")
    assert (run.returncode, run.stderr) == (0, "")


def test_a_reader_without_zstd_refuses_such_packs_at_opening(
    small: Path, tmp_path: Path, program_without_zstd: Path
) -> None:
    path = copied(small, tmp_path / "pack")
    draft = Draft(path)
    with_codecs()(draft)
    record("part", 0, codec=1, stored_length=31)(draft)
    draft.save()
    (verdict,) = c_says(program_without_zstd, "check", [path])
    words = "so compile this reader with -DMOEPACK_ZSTD and -lzstd"
    assert verdict.refusal == f"FEATURE index.bin: codec 0: needs the codec 'zstd', {words}"


def test_a_codec_of_others_is_refused_by_name(
    small: Path, tmp_path: Path, program_without_zstd: Path
) -> None:
    path = copied(small, tmp_path / "pack")
    draft = Draft(path)
    with_codecs(b"org.example.packer")(draft)
    draft.save()
    (verdict,) = c_says(program_without_zstd, "check", [path])
    words = "codec 0: needs the codec 'org.example.packer', which this reader does not know"
    assert verdict.refusal == f"FEATURE index.bin: {words}"
    assert words in python_says(path).refusal
