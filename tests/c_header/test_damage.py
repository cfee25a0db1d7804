"""C and Python agree on damaged indexes, whatever is damaged, and a changed bit is noticed."""

import struct
from pathlib import Path

import pytest

from moepack.common import digest
from moepack.common.errors import PackError
from moepack.pack.format import manifest
from moepack.pack.format.index import Index
from tests.support.amounts import amounts
from tests.support.c_readers import Verdict, c_says, python_says
from tests.support.hostile_input import mutate, random_edits
from tests.support.pack_draft import Draft

MANIFEST = '{"index": {"name": "index.bin"}}'
"""All that the C reader takes from a manifest."""


def write_pack(path: Path, index: bytes, tiny: Path) -> Path:
    """Write an index with its digest made right, a manifest that fits it, and the data files."""
    if len(index) >= 8:
        index = index[:-8] + struct.pack("<Q", digest.xxh3(index[:-8]))
    described = manifest.decode((tiny / "manifest.json").read_bytes(), "")
    try:
        decoded = Index(index, "")
        described = described._replace(
            files=tuple(manifest.FileEntry(*file[:2]) for file in decoded.files),
            is_whole=decoded.is_whole,
        )
    except PackError:
        pass  # then no manifest is looked at
    path.mkdir()
    (path / "index.bin").write_bytes(index)
    for file in tiny.iterdir():
        if file.name not in ("index.bin", manifest.NAME):
            (path / file.name).symlink_to(file)
    described = described._replace(index_entry=manifest.describe_index(index))
    (path / "manifest.json").write_bytes(manifest.encode(described))
    return path


def assert_agreement(
    indexes: list[bytes], tiny: Path, folder: Path, program: Path
) -> list[Verdict]:
    """Feed indexes, with digests made right, to C and to Python: one verdict, equal lookups."""
    paths = [write_pack(folder / str(n), data, tiny) for n, data in enumerate(indexes)]
    verdicts = c_says(program, "check", paths)
    for path, verdict in zip(paths, verdicts, strict=True):
        expected = python_says(path)
        assert verdict.agrees(expected), (path, verdict.refusal, expected.refusal)
    return verdicts


@pytest.mark.parametrize("share", amounts(29, 1))
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


@pytest.mark.parametrize("in_header", [False, True])
def test_c_and_python_agree_on_random_damage(
    in_header: bool, either: Path, tmp_path: Path, program: Path
) -> None:
    """Anywhere, or in the header and the directory, so that what follows stays where it was."""
    index = (either / "index.bin").read_bytes()
    end = Draft(either).at("file", 0) if in_header else len(index)
    damaged = [mutate(index[:end], random_edits(seed, end)) for seed in range(100)]
    if in_header:
        damaged = [data[:end].ljust(end, b"\0") + index[end:] for data in damaged]
    assert_agreement(damaged, either, tmp_path, program)


@pytest.mark.parametrize("share", amounts(11, 1))
def test_an_index_cut_at_any_byte_is_refused(
    share: int, tiny: Path, tmp_path: Path, program: Path
) -> None:
    """As it is, and with the header and the digest made to fit."""
    index = (tiny / "index.bin").read_bytes()
    at = 16  # of the header's index_length
    paths = []
    for length in range(0, len(index), share):
        shortened = bytearray(index[:length])
        if length >= at + 8:
            shortened[at : at + 8] = struct.pack("<Q", length)
        if length % 8 == 0:
            paths.append(write_pack(tmp_path / f"{length}-stated", bytes(shortened), tiny))
        path = tmp_path / str(length)
        path.mkdir()
        (path / "index.bin").write_bytes(index[:length])
        (path / "manifest.json").write_text(MANIFEST)
        paths.append(path)
    for path, verdict in zip(paths, c_says(program, "check", paths), strict=True):
        assert verdict.refusal, path


@pytest.mark.parametrize("share", amounts(5, 1))
def test_a_flipped_bit_is_noticed_by_the_digest(
    share: int, tiny: Path, tmp_path: Path, program: Path
) -> None:
    index = (tiny / "index.bin").read_bytes()
    paths = []
    for at in range(0, len(index), share):
        paths.append(tmp_path / str(at))
        paths[-1].mkdir()
        damaged = bytearray(index)
        damaged[at] ^= 1 << at % 8
        (paths[-1] / "index.bin").write_bytes(damaged)
        (paths[-1] / "manifest.json").write_text(MANIFEST)
    codes = [verdict.refusal.partition(" ")[0] for verdict in c_says(program, "check", paths)]
    start = next(iter(Draft(tiny).sections.values())).offset
    assert set(codes[: start // share]) == {"VERSION", "FEATURE", "DAMAGED", "DIGEST"}
    # Zeros between the sections are looked at before the digest is.
    assert set(codes[-(-start // share) :]) == {"DIGEST", "DAMAGED"}
