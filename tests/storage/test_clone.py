"""Sharing ranges of files instead of copying them, on file systems that can and that cannot."""

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

import moepack
from moepack.common.errors import PackError
from moepack.pack.engines.checking import verify_export
from moepack.packing.pack_model import pack_model
from moepack.packing.restore import restore
from moepack.storage.blocks import can_clone, clone_range
from moepack.storage.extents import BLOCK
from tests.support.file_systems import mounted, shared_length
from tests.support.gguf_builder import moe
from tests.support.models import flip
from tests.support.packs import pieces

SHARING = ("xfs", "btrfs")


@pytest.fixture(params=SHARING)
def sharing(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """Mount a file system that can share ranges."""
    with mounted(request.param, tmp_path / request.param) as folder:
        yield folder


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model of 13 MiB with tensors on pages."""
    builder = moe((0, 1), 16, ne=(512, 256)).put("general.alignment", "u32", BLOCK)
    builder.alignment = BLOCK
    return builder.write(tmp_path_factory.mktemp("source") / "model.gguf")


@pytest.fixture(scope="module")
def exported(source: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Return what is exported where nothing can be shared."""
    folder = tmp_path_factory.mktemp("exported")
    pack_model(source, folder / "pack")
    moepack.export("gguf", folder / "pack", folder / "model.gguf")
    return (folder / "model.gguf").read_bytes()


def holds(path: Path, data: bytes) -> bool:
    """Return whether a file has just these bytes; pytest would compare them for minutes."""
    return path.read_bytes() == data


def test_a_range_is_shared_and_stays_apart(sharing: Path) -> None:
    data = random.Random(1).randbytes(8 * BLOCK)
    (sharing / "a").write_bytes(data)
    with open(sharing / "a", "rb") as source, open(sharing / "b", "w+b") as target:
        assert clone_range(source.fileno(), BLOCK, 3 * BLOCK, target.fileno(), 2 * BLOCK)
    assert (sharing / "b").read_bytes() == bytes(2 * BLOCK) + data[BLOCK : 4 * BLOCK]
    assert shared_length(sharing / "b") == 3 * BLOCK
    flip(sharing / "b", 2 * BLOCK)
    assert (sharing / "a").read_bytes() == data


def test_it_is_known_before_whether_files_can_share(sharing: Path, tmp_path: Path) -> None:
    (sharing / "a").write_bytes(bytes(BLOCK))
    before = os.listdir(sharing)
    assert can_clone(sharing / "a", sharing)
    assert not can_clone(sharing / "a", tmp_path)
    assert not can_clone(sharing / "missing", sharing)
    assert not can_clone(sharing / "a", sharing / "missing")
    assert os.listdir(sharing) == before


def test_an_export_shares_the_packs_ranges(sharing: Path, source: Path, exported: bytes) -> None:
    pack_model(source, sharing / "pack")
    done = moepack.export("gguf", sharing / "pack", sharing / "model.gguf")
    assert holds(sharing / "model.gguf", exported)
    assert done.cloned_length > 0.99 * done.length
    assert shared_length(sharing / "model.gguf") >= done.cloned_length


def test_a_damaged_part_is_not_restored_and_found_in_an_export(sharing: Path, source: Path) -> None:
    """An export that shares all of a pack takes no time, since it reads nothing of it."""
    pack_model(source, sharing / "pack")
    parts = [(path, piece) for _, path, piece in pieces(sharing / "pack") if piece.length > BLOCK]
    for path, piece in (parts[1], parts[-2]):
        flip(path, piece.input_offset + piece.length - 1)
        with pytest.raises(PackError, match="the bytes do not have the digest") as raised:
            restore(sharing / "pack", sharing / "restored", threads=1)
        assert raised.value.place == f"{piece.label} at byte {piece.input_offset:,}"
        assert os.listdir(sharing / "restored") == [f"{source.name}.partial"]
        (sharing / "restored" / f"{source.name}.partial").unlink()
        done = moepack.export("gguf", sharing / "pack", sharing / "model.gguf", force=True)
        unread_length = done.digests.known_length - done.digests.compared_length
        assert unread_length == done.cloned_length > 0
        report = verify_export("gguf", sharing / "model.gguf", source=source)
        assert [finding.kind for finding in report.findings] == ["bytes"]
        flip(path, piece.input_offset + piece.length - 1)
