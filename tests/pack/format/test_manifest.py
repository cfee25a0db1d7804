"""The manifest, up to its limits, and the names of parts, whole and for short."""

import pytest

from moepack.common.errors import PackError
from moepack.pack.format import manifest, records
from moepack.pack.format.manifest import FileEntry, IndexEntry, Manifest
from moepack.pack.format.names import projection, short_name
from moepack.pack.format.source_entry import ShardEntry, SourceEntry


def test_experts_used_are_known_by_family_and_layer() -> None:
    source = SourceEntry("m", None, {"ffn_exps": 2, "ffn_chexps": [None, 1]}, None, [], ())
    assert source.experts_used_in("ffn_exps", 7) == 2
    assert [source.experts_used_in("ffn_chexps", layer) for layer in range(3)] == [None, 1, None]
    assert source.experts_used_in("attn_v_exps", 0) is None


@pytest.mark.long
def test_what_the_limits_allow_fits_into_a_manifest() -> None:
    """Shards and files, as many as there may be, with the longest names; pages of the index."""
    shards = tuple(
        ShardEntry(f"{number:05}" + "ä" * 125, records.MAX_LENGTH, 1 << 40, "0" * 64, "f" * 64)
        for number in range(1, records.MAX_SHARDS)
    )
    shards += (ShardEntry("m", 1, 1, "0" * 64),)
    names = (f"{number:05}" + "x" * 250 for number in range(1, records.MAX_FILES))
    files = (FileEntry("x", 1), *(FileEntry(name, records.MAX_LENGTH) for name in names))
    pages = tuple(range(records.MAX_INDEX_LENGTH // manifest.PAGE_LENGTH))
    described = Manifest(
        tool="test",
        is_whole=True,
        source=SourceEntry("a", "b", {"ffn_exps": [8] * 1000}, 0, [0], shards),
        layout={"name": "layers"},
        hotness={"order": None},
        layers=[0, 7],
        index_entry=IndexEntry(records.MAX_INDEX_LENGTH, 5, pages, "i" * 255),
        files=files,
    )
    data = manifest.encode(described)
    assert len(data) <= manifest.MAX_LENGTH
    assert manifest.decode(data, "manifest.json") == described
    plain = described._replace(index_entry=IndexEntry(1, 5, None, sha256="a" * 64), files=files[:1])
    data = manifest.encode(plain)
    assert manifest.decode(data, "manifest.json") == plain
    longest = data + b" " * (manifest.MAX_LENGTH - len(data))
    assert not manifest.decode(longest, "manifest.json").digest_matches
    shards = (*shards, shards[0]._replace(name="one more"))
    more = described._replace(source=described.source._replace(shards=shards))
    with pytest.raises(PackError, match=r"source\.shards: out of bounds, expected 1 to 4,096"):
        manifest.decode(manifest.encode(more), "manifest.json")


@pytest.mark.parametrize(
    ("part", "short", "matrix"),
    [
        ("ffn_up_exps.weight", "up", "up"),
        ("ffn_gate_up_exps.bias", "gate_up.bias", "gate_up"),
        ("ffn_down_chexps.weight", "down", "down"),
        ("ffn_down_exps.input_scale", "down.input_scale", "down"),
        ("attn_v_exps.weight", "attn_v", "attn_v"),
    ],
)
def test_a_part_has_a_short_name_and_a_projection(part: str, short: str, matrix: str) -> None:
    assert (short_name(part), projection(part)) == (short, matrix)
