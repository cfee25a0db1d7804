"""The conformance packs: the script makes the same ones, and moepack gives the same verdicts."""

import hashlib
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest

import conformance
import moepack
from conformance import make_packs, variants
from moepack.common import digest
from moepack.common.errors import PackError
from moepack.pack.reading.pack import Pack
from moepack.pack.reading.shard_map import map_shards
from tests.support.light_folder import tmp_path
from tests.support.models import digest_of_all, tree

__all__ = ["tmp_path"]

pytestmark = pytest.mark.long

PACKS = make_packs.FOLDER
VERDICTS: list[dict[str, Any]] = json.loads((PACKS / "verdicts.json").read_text())
SOUND = [entry for entry in VERDICTS if entry["verdict"] == "sound"]
OPENING, USE, VERIFICATION = (
    [entry for entry in VERDICTS if entry["verdict"] == verdict]
    for verdict in (variants.OPENING, variants.USE, variants.VERIFICATION)
)


def name_of(entry: dict[str, Any]) -> str:
    return str(entry["pack"])


def test_the_packs_are_what_the_script_makes(tmp_path: Path) -> None:
    make_packs.make(tmp_path)
    assert tree(tmp_path) == tree(PACKS)


# Sound ones.


@pytest.mark.parametrize("entry", SOUND, ids=name_of)
def test_every_expert_is_where_it_should_be_and_reads_right(entry: dict[str, Any]) -> None:
    path = PACKS / entry["pack"]
    with moepack.open(path) as pack, pack.reader(check="always") as reader:
        assert pack.manifest.is_whole == entry["whole"]
        families = [(layer, family) for layer in pack.layers for family in pack.families(layer)]
        counts = [pack.expert_count(layer, family=family) for layer, family in families]
        assert sum(counts) == len(entry["experts"])
        for expert in entry["experts"]:
            at = (expert["layer"], expert["expert"])
            family = expert["family"]
            hotness = pack.hotness(*at, family=family)
            assert (hotness.rank, hotness.hotness) == (expert["rank"], expert["hotness"])
            if expert["blob_length"]:
                assert pack.locate(*at, family=family).length == expert["blob_length"]
            (blob,) = reader.read_many([at], family=family)
            for name, file, offset, length, expected, is_known in expert["parts"]:
                where = pack.locate(*at, name, family=family)
                assert (where.path.name, where.offset, where.length) == (file, offset, length)
                assert where.digest == (digest.from_text(expected) if is_known else None)
                assert digest.to_text(digest.xxh3(blob.part(name))) == expected


@pytest.mark.parametrize("entry", SOUND, ids=name_of)
def test_the_dense_part_is_where_it_should_be(entry: dict[str, Any]) -> None:
    with moepack.open(PACKS / entry["pack"]) as pack, pack.reader(check="always") as reader:
        tensors = {tensor.name: tensor for tensor in pack.dense()}
        assert list(tensors) == [tensor[0] for tensor in entry["dense"]]
        for name, file, offset, length, expected in entry["dense"]:
            tensor = tensors[name]
            assert (tensor.path.name, tensor.offset, tensor.length) == (file, offset, length)
            with reader.read_dense(name) as data:
                assert digest.to_text(digest.xxh3(data)) == expected


@pytest.mark.parametrize("entry", SOUND, ids=name_of)
def test_the_shards_are_put_together_again(entry: dict[str, Any]) -> None:
    with moepack.open(PACKS / entry["pack"]) as pack:
        if not entry["whole"]:
            with pytest.raises(PackError, match="not a whole pack"):
                map_shards(pack)
            return
        assert restored(pack) == [tuple(shard) for shard in entry["shards"]]


def restored(pack: Pack) -> list[tuple[str, int, str]]:
    """Restore the shards; return name, length and SHA-256 of each."""
    with tempfile.TemporaryDirectory() as folder:
        done = moepack.restore(pack.path, folder, threads=1)
        shards = [Path(folder, file.name).read_bytes() for file in done.files]
    return [
        (file.name, len(data), hashlib.sha256(data).hexdigest())
        for file, data in zip(done.files, shards, strict=True)
    ]


@pytest.mark.parametrize("entry", SOUND, ids=name_of)
def test_the_verifier_finds_nothing_in_a_sound_pack(entry: dict[str, Any]) -> None:
    assert moepack.verify(PACKS / entry["pack"], threads=1).findings == ()


# Broken ones.


@pytest.mark.parametrize("entry", OPENING, ids=name_of)
def test_a_reader_refuses_it_at_opening(entry: dict[str, Any]) -> None:
    with pytest.raises(PackError):
        moepack.open(PACKS / entry["pack"])


@pytest.mark.parametrize("entry", USE, ids=name_of)
def test_a_reader_opens_it_and_refuses_what_is_asked_for(entry: dict[str, Any]) -> None:
    """And nothing that comes before it."""
    with moepack.open(PACKS / entry["pack"]) as pack:
        for asked_for, ask in ASK.items():
            if asked_for == entry["asked_for"]:
                with pytest.raises(PackError):
                    ask(pack)
                return
            ask(pack)


@pytest.mark.parametrize("entry", VERIFICATION, ids=name_of)
def test_only_verification_finds_it(entry: dict[str, Any]) -> None:
    with moepack.open(PACKS / entry["pack"]) as pack:
        for ask in ASK.values():
            ask(pack)


SEVERAL = {
    "broken-file-index": "the index as such, and the record in it that was changed",
    "broken-file-trailer": "the trailer, and the page that it is in",
    "broken-file-index-cut": "its length, and its digest",
    "broken-file-index-long": "its length, and its digest",
    "broken-record-a-blob-in-a-shard": "a file's kind concerns all that lies in it",
    "broken-record-a-part-in-another-file": "where it lies, and what lies there",
    "broken-record-a-part-without-a-blob-in-a-data-file": "all parts of both blobs",
    "broken-slice-0-slices-for-two-experts": "both experts",
    "broken-slice-a-shard-beyond": "both experts",
    "broken-cross-another-length-than-in-the-manifest": "the file, and the manifest",
    "broken-cross-a-name-in-the-index-alone": "the file, and the manifest",
    "broken-cross-whole-without-a-dense-part": "the manifest, and the bytes that were dense",
    "broken-restoring-slices-of-no-shard": "both experts",
}
"""Broken packs with several findings for their one broken rule, and the reason."""


@pytest.mark.parametrize("entry", [*OPENING, *USE, *VERIFICATION], ids=name_of)
def test_the_verifier_finds_the_one_rule_that_is_broken(entry: dict[str, Any]) -> None:
    """And nothing else, so that each pack proves that just that is found."""
    try:
        findings = moepack.verify(PACKS / entry["pack"], threads=1).findings
    except PackError:
        return
    if entry["pack"] in SEVERAL:
        assert len(findings) > 1
    else:
        assert len(findings) == 1, list(map(str, findings))


def test_no_pack_ever_changes() -> None:
    """These packs define version 1 of the format; new packs need a new digest."""
    assert digest_of_all(PACKS) == conformance.DIGESTS["packs"]


def ask_for_experts(pack: Pack) -> None:
    with pack.reader(check="always") as reader:
        for layer in pack.layers:
            for family in pack.families(layer):
                for expert in range(pack.expert_count(layer, family=family)):
                    reader.read(layer, expert, family=family).release()
                    for kind in pack.parts(layer, family=family):
                        pack.locate(layer, expert, kind.name)
    pack.hottest(1 << 62)


def ask_for_origins(pack: Pack) -> None:
    for family in pack.index.families:
        for kind in family.part_kinds:
            for expert in range(family.expert_count):
                pack.index.origin(family, kind, expert)


def ask_for_dense(pack: Pack) -> None:
    with pack.reader(check="always") as reader:
        for tensor in pack.dense():
            reader.read_dense(tensor.name).release()


ASK = {
    "experts": ask_for_experts,
    "origins": ask_for_origins,
    "dense": ask_for_dense,
    "restoring": restored,
}
