"""Parts that zstd stores are decoded, and refused at opening by a reader without zstd."""

import shutil
from pathlib import Path

import pytest

from conformance import make_packs
from tests.support.c_compiler import HAS_ZSTD
from tests.support.c_readers import c_says, python_says
from tests.support.pack_draft import Draft, record, with_codecs

needs_zstd = pytest.mark.skipif(not HAS_ZSTD, reason="there is no zstd.h here")
OTHER_LENGTH = "one that states another length, or none"
# What is found in the conformance packs; empty where these are words of zstd's own.
BAD_FRAMES = {
    "frame": "none",
    "skippable-frame-first": "none",
    "after-the-frame": "more after it",
    "two-frames": "more after it",
    "length": OTHER_LENGTH,
    "no-size": OTHER_LENGTH,
    "reserved-bit": OTHER_LENGTH,
    "window": "a window of more than 64 MiB",
    "cut": "",
    "dictionary": "",
    "checksum": "",
}


@needs_zstd
def test_what_is_not_one_frame_of_the_part_is_named(program: Path) -> None:
    paths = [make_packs.FOLDER / f"broken-zstd-{name}" for name in BAD_FRAMES]
    verdicts = c_says(program, "list", paths)
    for (name, frame), verdict in zip(BAD_FRAMES.items(), verdicts, strict=True):
        words = f"expected one frame of zstd that holds 512 bytes, found {frame}"
        start = f"DAMAGED experts-00000.bin: ffn_gate_exps.weight at 0: {words}"
        assert verdict.refusal.startswith(start), (name, verdict.refusal)
        assert not verdict.refusal.endswith(" "), name


@needs_zstd
def test_the_digest_is_that_of_decoded_bytes(tmp_path: Path, program: Path) -> None:
    path = Path(shutil.copytree(make_packs.FOLDER / "zstd", tmp_path / "pack"))
    draft = Draft(path)
    right = draft.get("part", 0).digest
    assert draft.get("part", 0).codec
    draft.set("part", 0, digest=right ^ 1)
    draft.save()
    (verdict,) = c_says(program, "list", [path])
    assert verdict.refusal.startswith("DIGEST experts-00000.bin: ffn_gate_exps.weight at 0")
    assert verdict.refusal.endswith(f"found xxh3:{right:016x}")


def test_a_reader_without_zstd_refuses_such_packs_at_opening(
    tiny: Path, tmp_path: Path, program_without_zstd: Path
) -> None:
    draft = Draft(Path(shutil.copytree(tiny, tmp_path / "pack")))
    with_codecs()(draft)
    record("part", 0, codec=1, stored_length=31)(draft)
    draft.save()
    (verdict,) = c_says(program_without_zstd, "check", [draft.path])
    words = "so compile this reader with -DMOEPACK_ZSTD and -lzstd"
    assert verdict.refusal == f"FEATURE index.bin: codec 0: needs the codec 'zstd', {words}"


def test_a_codec_of_others_is_refused_by_name(
    tiny: Path, tmp_path: Path, program_without_zstd: Path
) -> None:
    draft = Draft(Path(shutil.copytree(tiny, tmp_path / "pack")))
    with_codecs(b"org.example.packer")(draft)
    draft.save()
    (verdict,) = c_says(program_without_zstd, "check", [draft.path])
    words = "codec 0: needs the codec 'org.example.packer', which this reader does not know"
    assert verdict.refusal == f"FEATURE index.bin: {words}"
    assert words in python_says(draft.path).refusal
