"""C and Python agree on damaged indexes, whatever is damaged, and a changed bit is noticed."""

import struct
from pathlib import Path

import pytest

from moepack import digest
from moepack.errors import PackError
from moepack.format import manifest
from moepack.format.index import Index
from tests.support.amounts import amounts
from tests.support.c_readers import Verdict, c_says, python_says
from tests.support.hostile_input import mutate, random_edits
from tests.support.pack_draft import Draft

MANIFEST = '{"index": {"name": "index.bin"}}'
"""All that the C reader takes from a manifest."""


def write_pack(path: Path, index: bytes, small: Path) -> Path:
    """Write an index with its digest made right, a manifest that fits it, and the data files."""
    if len(index) >= 8:
        index = index[:-8] + struct.pack("<Q", digest.of(index[:-8]))
    held = manifest.decode((small / "manifest.json").read_bytes(), "")
    try:
        decoded = Index(index, "")
        held = held._replace(
            files=tuple(manifest.FileEntry(*file[:2]) for file in decoded.files),
            is_whole=decoded.is_whole,
        )
    except PackError:
        pass  # then no manifest is looked at
    path.mkdir()
    (path / "index.bin").write_bytes(index)
    for file in small.iterdir():
        if file.name not in ("index.bin", manifest.NAME):
            (path / file.name).symlink_to(file)
    described = held._replace(index_entry=manifest.describe_index(index))
    (path / "manifest.json").write_bytes(manifest.encode(described))
    return path


def assert_agreement(
    indexes: list[bytes], small: Path, folder: Path, program: Path
) -> list[Verdict]:
    """Feed indexes, with digests made right, to C and to Python: one verdict, equal lookups."""
    paths = [write_pack(folder / str(n), data, small) for n, data in enumerate(indexes)]
    verdicts = c_says(program, "check", paths)
    for path, verdict in zip(paths, verdicts, strict=True):
        expected = python_says(path)
        assert verdict.agrees(expected), (path, verdict.refusal, expected.refusal)
    return verdicts


@pytest.mark.parametrize("share", amounts(5, 1))
def test_c_and_python_agree_on_a_bit_flipped_in_any_byte(
    share: int, either: Path, tmp_path: Path, program: Path
) -> None:
    """In one byte of `share`: where that is odd, all bytes of a record's words get their turn."""
    index = (either / "index.bin").read_bytes()
    flipped = []
    for at in range(0, len(index) - 8, share):
        for bit in {at % 8, 0}:
            damaged = bytearray(index)
            damaged[at] ^= 1 << bit
            flipped.append(bytes(damaged))
    verdicts = assert_agreement(flipped, either, tmp_path, program)
    refused = sum(bool(verdict.refusal) for verdict in verdicts)
    assert 0.4 < refused / len(verdicts) < 1


def test_c_and_python_agree_on_random_damage(either: Path, tmp_path: Path, program: Path) -> None:
    index = (either / "index.bin").read_bytes()
    damaged = [mutate(index, random_edits(seed, len(index))) for seed in range(600)]
    assert_agreement(damaged, either, tmp_path, program)


def test_c_and_python_agree_on_damage_to_header_and_directory(
    either: Path, tmp_path: Path, program: Path
) -> None:
    index = (either / "index.bin").read_bytes()
    end = Draft(either).at("file", 0)
    damaged = [
        mutate(index[:end], random_edits(seed, end))[:end].ljust(end, b"\0") + index[end:]
        for seed in range(600)
    ]
    assert_agreement(damaged, either, tmp_path, program)


def test_an_index_cut_at_any_byte_is_refused(small: Path, tmp_path: Path, program: Path) -> None:
    """As it is, and with the header and the digest made to fit."""
    index = (small / "index.bin").read_bytes()
    at = 16  # of the header's index_length
    paths = []
    for length in range(len(index)):
        stated = bytearray(index[:length])
        if length >= at + 8:
            stated[at : at + 8] = struct.pack("<Q", length)
        if length % 8 == 0:
            paths.append(write_pack(tmp_path / f"{length}-stated", bytes(stated), small))
        path = tmp_path / str(length)
        path.mkdir()
        (path / "index.bin").write_bytes(index[:length])
        (path / "manifest.json").write_text(MANIFEST)
        paths.append(path)
    for path, verdict in zip(paths, c_says(program, "check", paths), strict=True):
        assert verdict.refusal, path


def test_a_flipped_bit_is_noticed_by_the_digest(small: Path, tmp_path: Path, program: Path) -> None:
    index = (small / "index.bin").read_bytes()
    paths = []
    for at in range(len(index)):
        paths.append(tmp_path / str(at))
        paths[-1].mkdir()
        damaged = bytearray(index)
        damaged[at] ^= 1 << at % 8
        (paths[-1] / "index.bin").write_bytes(damaged)
        (paths[-1] / "manifest.json").write_text(MANIFEST)
    codes = [verdict.refusal.partition(" ")[0] for verdict in c_says(program, "check", paths)]
    held = Draft(small).sections.values()
    start = next(iter(held)).offset
    assert set(codes[:start]) == {"VERSION", "FEATURE", "DAMAGED", "DIGEST"}
    assert set(codes[start:]) == {"DIGEST", "DAMAGED"}
    padding = (
        len(index)
        - 8
        - start
        - sum(section.record_count * section.record_length for section in held)
    )
    assert codes[start:].count("DAMAGED") == padding
