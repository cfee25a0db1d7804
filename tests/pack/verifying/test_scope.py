"""A part of a pack is verified when asked, and nothing is claimed of the rest."""

import shutil
from pathlib import Path
from typing import Any

import pytest

import moepack
from moepack.common.errors import RequestError
from moepack.pack.verifying.verifier import verify
from moepack.packing.shard_index import index_model
from moepack.report import verification_text
from tests.support.gguf_builder import moe, split, write_shards
from tests.support.models import flip, pack_model
from tests.support.pack_draft import Draft

BLOBS, TENSORS = 5 * 20, 7


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build five layers of 20 experts in `model` and pack them beside into `pack`."""
    folder = tmp_path_factory.mktemp("scope")
    paths = write_shards(split(moe((0, 1, 2, 3, 4), 20), 6), folder / "model")
    pack_model(paths, folder / "pack", sha256=True)
    return folder


@pytest.fixture
def pack(model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model / "pack", tmp_path / "pack"))


def test_a_layer_is_verified_alone(model: Path, pack: Path) -> None:
    report = verify(pack, model / "model", layers="1,3")
    assert report.passed is None
    assert report.checked_layers == (1, 3)
    assert (report.checked_blob_count, report.checked_tensor_count) == (40, 2)
    with moepack.open(pack) as opened:
        lengths = [opened.locate(layer, n).length for layer in (1, 3) for n in range(20)]
        norms = [
            tensor.length for tensor in opened.dense() if tensor.name[:5] in ("blk.1", "blk.3")
        ]
        slices = [kind.length * 20 for layer in (1, 3) for kind in opened.parts(layer)]
        headers = [shard.header_length for shard in opened.manifest.source.shards]
    assert report.read_length == sum(lengths) + sum(norms) + sum(headers)
    assert report.compared_length == sum(slices) + sum(norms) + sum(headers)
    assert "layers 0,2,4" in report.not_looked_at
    assert "60 of 100 blobs" in report.not_looked_at
    assert "padding between blobs and tensors" in report.not_looked_at


@pytest.mark.parametrize(("layer", "is_found"), [(1, True), (2, False)])
def test_damage_is_found_where_it_is_looked_for(layer: int, is_found: bool, pack: Path) -> None:
    with moepack.open(pack) as opened:
        part = opened.locate(layer, 7, "down")
    flip(part.path, part.offset)
    report = verify(pack, layers=[1])
    assert bool(report.findings) == is_found
    assert report.passed is (False if is_found else None)


@pytest.mark.parametrize("options", [{"layers": [1]}, {"layers": "0-3"}])
def test_headers_are_looked_at_whatever_is_chosen(options: Any, pack: Path) -> None:
    assert not any("header" in words for words in verify(pack, **options).not_looked_at)
    flip(pack / "dense.bin", Draft(pack).get("shard_bytes", 2).offset + 9)
    (finding,) = verify(pack, **options).findings
    assert (finding.kind, finding.file) == ("digest", "dense.bin")


COUNT = 10


@pytest.mark.parametrize("layers", [None, "1,3"])
def test_parts_have_like_lengths_and_look_at_everything_once(
    layers: str | None, model: Path, pack: Path
) -> None:
    whole = verify(pack, model / "model", layers=layers)
    parts = [
        verify(pack, model / "model", layers=layers, part=(number, COUNT))
        for number in range(1, COUNT + 1)
    ]
    assert [one.passed for one in parts] == [None] * COUNT
    for field in ("read_length", "compared_length", "checked_blob_count", "checked_tensor_count"):
        assert sum(getattr(one, field) for one in parts) == getattr(whole, field), field
    with moepack.open(pack) as opened:
        longest = max(opened.locate(layer, 0).length for layer in opened.layers)
    lengths = [one.read_length for one in parts]
    assert max(lengths) - min(lengths) <= 2 * longest
    again = verify(pack, model / "model", layers=layers, part=f"3/{COUNT}")
    assert again == parts[2]


def test_every_byte_is_in_one_part(pack: Path) -> None:
    """Of parts, tensors, headers and padding: of each kind some are changed, one at a time."""
    draft = Draft(pack)
    header = draft.get("shard_bytes", 2)
    offsets = [(pack / "dense.bin", header.offset), (pack / "dense.bin", header.offset + 9)]
    for path in sorted(pack.glob("experts-*.bin")):
        length = path.stat().st_size
        offsets += [(path, at) for at in (0, length // 3, length // 2, length - 1)]
    for path, offset in offsets:
        flip(path, offset)
        reports = [verify(pack, part=(number, 4)) for number in range(1, 5)]
        assert sum(bool(one.findings) for one in reports) == 1, (path, offset)
        assert all(one.passed is None for one in reports if not one.findings)
        flip(path, offset)


def test_a_part_says_which_it_is_and_calls_nothing_sound(model: Path, pack: Path) -> None:
    report = verify(pack, model / "model", part="3/10")
    assert report.not_looked_at[0] == "parts 1-2,4-10 of 10"
    assert 0 < report.read_length < report.data_length / 5
    text = verification_text.report(report)
    assert "no fault in the checked parts" in text
    assert not {"sound", "whole", "passed"} & set(text.replace(".", " ").split())
    assert verify(pack, part="1/1").passed


@pytest.mark.parametrize(
    ("layers", "words"), [("7", "no experts in layer 7"), ("x", "not a list"), ([], "no layers")]
)
def test_layers_that_the_pack_does_not_hold_are_refused(
    layers: Any, words: str, pack: Path
) -> None:
    with pytest.raises(RequestError, match=words):
        verify(pack, layers=layers)


def test_the_sha256_of_shards_is_compared_when_asked(model: Path, pack: Path) -> None:
    report = verify(pack, model / "model", sha256=True)
    assert report.passed
    assert verification_text.report(report).endswith(", SHA-256 of 4 shards right")
    assert verify(pack, model / "model").sha256_count is None
    with pytest.raises(RequestError, match="needs a source to read"):
        verify(pack, sha256=True)
    draft = Draft(pack)
    draft.body["source"]["shards"][1]["sha256"] = "0" * 64
    draft.save_manifest()
    assert verify(pack, model / "model").passed
    report = verify(pack, model / "model", sha256=True)
    (finding,) = report.findings
    assert report.sha256_count == 3
    assert finding.kind == "source"
    assert finding.message.startswith("its SHA-256 is ")
    assert "by their SHA-256" in (report.headline or "")
    for shard in draft.body["source"]["shards"]:
        shard["sha256"] = None
    draft.save_manifest()
    report = verify(pack, model / "model", sha256=True)
    assert report.passed is None
    assert report.not_looked_at == ("the SHA-256 of shards for which the manifest states none",)


@pytest.fixture
def lain(model: Path, tmp_path: Path) -> Path:
    """Lay an index over a copy of the shards, which a test may damage."""
    shutil.copytree(model / "model", tmp_path / "model")
    index_model(tmp_path / "model", tmp_path / "lain")
    return tmp_path / "lain"


def test_an_index_over_shards_without_digests_claims_nothing_of_their_bytes(lain: Path) -> None:
    report = verify(lain)
    assert report.passed is None
    assert (report.checked_blob_count, report.checked_tensor_count) == (0, 0)
    (left_out,) = report.not_looked_at
    assert left_out.startswith("the bytes of 107 blobs and tensors")


def test_the_very_shards_of_an_index_prove_where_their_parts_lie_alone(lain: Path) -> None:
    """No bytes were copied, so there is nothing to compare them with."""
    report = verify(lain, lain.parent / "model")
    assert report.passed is None
    assert (report.checked_blob_count, report.checked_tensor_count) == (0, 0)
    (left_out,) = report.not_looked_at
    assert left_out.startswith("the bytes of 107 blobs and tensors: the index links to these very")
    with_digests = lain.parent / "with digests"
    index_model(lain.parent / "model", with_digests, digests=True)
    assert verify(with_digests, lain.parent / "model").passed
    draft = Draft(lain)
    first = draft.get("part", 0)
    draft.set("part", 0, offset=first.offset + 4)
    draft.save()
    findings = verify(lain, lain.parent / "model").findings
    assert {finding.kind for finding in findings} == {"origin", "record"}


def test_an_index_over_shards_is_compared_with_others(model: Path, lain: Path) -> None:
    report = verify(lain, model / "model")
    assert report.passed
    length = sum(path.stat().st_size for path in (model / "model").iterdir())
    assert report.compared_length == length
    with moepack.open(lain) as opened:
        part = opened.locate(3, 7, "up")
    flip(part.path.resolve(), part.offset + 5)
    (finding,) = verify(lain, model / "model").findings
    assert (finding.kind, finding.layer, finding.expert) == ("bytes", 3, 7)


def test_an_index_over_shards_has_no_padding_between_blobs(lain: Path) -> None:
    assert "padding between tensors" in verify(lain, layers="1").not_looked_at


@pytest.mark.parametrize("change", ["cut", "missing"])
def test_a_shard_of_an_index_that_is_not_there_is_a_finding(change: str, lain: Path) -> None:
    shard = (lain / "shard-00002-of-00004.gguf").resolve()
    data = shard.read_bytes()
    shard.unlink()
    if change == "cut":
        shard.write_bytes(data[:-100])
    (finding,) = verify(lain).findings
    assert (finding.kind, finding.file) == ("file", "shard-00002-of-00004.gguf")
