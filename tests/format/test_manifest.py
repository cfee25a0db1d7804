"""The manifest: encode and decode are a pair, and the same values give the same bytes."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moepack import digest
from moepack.errors import PackError
from moepack.format import manifest, records
from moepack.format.manifest import FileEntry, IndexEntry, Manifest
from moepack.format.names import is_plain_name
from moepack.format.source_entry import ShardEntry, SourceEntry
from tests.support.hostile_input import QUICK as QUICKLY

QUICK = settings(QUICKLY, max_examples=30)

NUMBERS = st.integers(0, records.MAX_LENGTH)
LENGTHS = st.integers(1, records.MAX_LENGTH)
DIGESTS = st.integers(0, (1 << 64) - 1)
TEXTS = st.text(st.characters(codec="utf-8"), max_size=20)
SHA256S = st.from_regex(r"[0-9a-f]{64}", fullmatch=True)
FILE_NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,30}", fullmatch=True).filter(is_plain_name)
SHARD_NAMES = TEXTS.filter(lambda name: name not in ("", ".", "..") and not set(name) & set("/\0"))
PROVENANCE: st.SearchStrategy[dict[str, Any]] = st.dictionaries(
    TEXTS, st.none() | TEXTS | NUMBERS | st.lists(NUMBERS, max_size=3), max_size=3
)


@st.composite
def shards(draw: st.DrawFn) -> ShardEntry:
    length = draw(LENGTHS)
    return ShardEntry(
        name=draw(SHARD_NAMES),
        length=length,
        header_length=draw(st.integers(1, length)),
        header_sha256=draw(SHA256S),
        sha256=draw(st.none() | SHA256S),
    )


SOURCES = st.builds(
    SourceEntry,
    architecture=TEXTS,
    name=st.none() | TEXTS,
    experts_used=st.dictionaries(TEXTS, NUMBERS | st.lists(st.none() | NUMBERS, max_size=4)),
    context_length=st.none() | NUMBERS,
    mtp_layers=st.lists(NUMBERS, max_size=3),
    shards=st.lists(shards(), min_size=1, max_size=3, unique_by=lambda shard: shard.name).map(
        tuple
    ),
)


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    index = IndexEntry(
        length=draw(st.integers(1, 3 * manifest.PAGE_LENGTH)),
        digest=draw(DIGESTS),
        page_digests=None,
    )
    if draw(st.booleans()):
        count = -(-index.length // manifest.PAGE_LENGTH)
        index = index._replace(page_digests=tuple(draw(DIGESTS) for _ in range(count)))
    return Manifest(
        tool=draw(TEXTS),
        is_whole=draw(st.booleans()),
        source=draw(SOURCES),
        layout=draw(PROVENANCE),
        hotness=draw(st.none() | PROVENANCE),
        layers=draw(st.none() | st.lists(NUMBERS, max_size=4)),
        index_entry=index,
        files=tuple(FileEntry(draw(FILE_NAMES), draw(LENGTHS)) for _ in range(draw(NUMBERS) % 4)),
    )


@QUICK
@given(manifests())
def test_what_is_encoded_is_decoded(value: Manifest) -> None:
    data = manifest.encode(value)
    assert manifest.decode(data, "manifest.json") == value
    assert manifest.encode(value) == data


@QUICK
@given(manifests())
def test_the_digest_is_that_of_all_bytes_before_its_key(value: Manifest) -> None:
    data = manifest.encode(value)
    assert json.loads(data)["manifest_digest"] == digest.to_text(digest.of(data[:-49]))


@QUICK
@given(manifests(), st.data())
def test_a_changed_byte_is_noticed_or_refused(value: Manifest, data: st.DataObject) -> None:
    text = bytearray(manifest.encode(value))
    at = data.draw(st.integers(0, len(text) - 1))
    text[at] ^= 1 << data.draw(st.integers(0, 7))
    assert not is_sound(bytes(text))


def is_sound(data: bytes) -> bool:
    try:
        return manifest.decode(data, "manifest.json").digest_matches
    except PackError:
        return False


def test_an_index_is_described_by_its_pages_too() -> None:
    index = bytes(range(256)) * 300
    entry = manifest.describe_index(index)
    assert entry.length == 76_800
    assert entry.digest == digest.of(index[:-8])
    assert entry.page_digests == (digest.of(index[:65_536]), digest.of(index[65_536:]))


def test_experts_used_are_known_by_family_and_layer() -> None:
    source = SourceEntry("m", None, {"ffn_exps": 2, "ffn_chexps": [None, 1]}, None, [], ())
    assert source.experts_used_in("ffn_exps", 7) == 2
    assert [source.experts_used_in("ffn_chexps", layer) for layer in range(3)] == [None, 1, None]
    assert source.experts_used_in("attn_v_exps", 0) is None


def test_what_the_limits_allow_fits_into_a_manifest() -> None:
    """Shards and files, as many as there may be, with the longest names; pages of the index."""
    shards = tuple(
        ShardEntry(f"{number:05}" + "ä" * 125, 1 << 62, 1 << 40, "0" * 64, "f" * 64)
        for number in range(records.MAX_SHARDS)
    )
    files = tuple(
        FileEntry(f"{number:05}" + "x" * 250, 1 << 62) for number in range(records.MAX_FILES)
    )
    pages = tuple(range(records.MAX_INDEX_LENGTH // manifest.PAGE_LENGTH))
    described = Manifest(
        tool="test",
        is_whole=True,
        source=SourceEntry("a", "b", {"ffn_exps": [8] * 1000}, 1 << 20, [], shards),
        layout={},
        hotness=None,
        layers=None,
        index_entry=IndexEntry(records.MAX_INDEX_LENGTH, 5, pages, "i" * 255),
        files=files,
    )
    data = manifest.encode(described)
    assert len(data) <= manifest.MAX_LENGTH
    assert manifest.decode(data, "manifest.json") == described


def small(**source: Any) -> Manifest:
    """Return a manifest of one shard, with other keys of its source."""
    shard = ShardEntry("m.gguf", 9, 8, "0" * 64)
    held: dict[str, Any] = {"context_length": None, "mtp_layers": [], "shards": (shard,)}
    return Manifest(
        tool="test",
        is_whole=True,
        source=SourceEntry("a", None, {}, **(held | source)),
        layout={},
        hotness=None,
        layers=None,
        index_entry=IndexEntry(64, 5, None),
        files=(),
    )


def test_a_model_has_up_to_4096_shards() -> None:
    shards = tuple(ShardEntry(str(number), 9, 8, "0" * 64) for number in range(4097))
    described = small(shards=shards[:-1])
    assert manifest.decode(manifest.encode(described), "manifest.json") == described
    with pytest.raises(PackError, match=r"source\.shards: out of bounds, expected 1 to 4,096"):
        manifest.decode(manifest.encode(small(shards=shards)), "manifest.json")


def test_a_context_and_the_numbers_of_layers_begin_at_0_and_end_at_2_to_the_63() -> None:
    for number in (0, (1 << 63) - 1):
        described = small(context_length=number, mtp_layers=[number])
        described = described._replace(layers=[number])
        assert manifest.decode(manifest.encode(described), "manifest.json") == described
