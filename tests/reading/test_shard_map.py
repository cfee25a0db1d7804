"""Where each shard's bytes lie in a pack, and what is wrong with an index that says nonsense."""

from pathlib import Path

import pytest

import moepack
from moepack.errors import PackError
from moepack.reading.shard_map import map_shards
from tests.support.models import REAL_MODELS, shards_of
from tests.support.packs import edit_shards


@pytest.mark.parametrize("model", REAL_MODELS)
def test_pieces_put_together_are_the_shards(model: str, packs: dict[str, Path]) -> None:
    with moepack.open(packs[model]) as pack:
        held = [path.read_bytes() for path in pack.file_paths]
        maps = map_shards(pack)
    assert [shard.name for shard in maps] == [Path(path).name for path in shards_of(model)]
    for shard, path in zip(maps, shards_of(model), strict=True):
        data = bytearray(shard.length)
        for piece in shard.pieces:
            part = held[piece.file][piece.offset : piece.offset + piece.length]
            data[piece.shard_offset : piece.end] = part
        assert bytes(data) == Path(path).read_bytes()
        offsets = [piece.shard_offset for piece in shard.pieces]
        assert offsets == sorted(offsets)


def test_a_shard_that_is_shorter_than_its_pieces_is_refused(pack_copy: Path) -> None:
    edit_shards(
        pack_copy,
        lambda n, shard: shard._replace(length=shard.length - 64) if n == 1 else shard,
    )
    with moepack.open(pack_copy) as pack, pytest.raises(PackError) as raised:
        map_shards(pack)
    assert raised.value.problem == "ends past its shard"


def test_pieces_that_overlap_are_refused(pack_copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with moepack.open(pack_copy) as pack:
        tensors = list(pack.index.tensors())
        moved = tensors[3]._replace(shard_offset=tensors[3].shard_offset - 32)
        monkeypatch.setattr(pack.index, "tensors", lambda: iter([*tensors[:3], moved]))
        with pytest.raises(PackError, match="overlaps another"):
            map_shards(pack)


def test_a_shard_that_the_manifest_does_not_name_is_refused(
    pack_copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with moepack.open(pack_copy) as pack:
        moved = next(pack.index.tensors())._replace(shard=6)
        monkeypatch.setattr(pack.index, "tensors", lambda: iter([moved]))
        with pytest.raises(PackError, match="a shard that the manifest does not name") as raised:
            map_shards(pack)
        assert (raised.value.expected, raised.value.found) == ("< 6", "shard 6")
