"""One rule, one finding, one test: each breaks just that rule in a pack that is sound otherwise."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from moepack.common import digest
from moepack.pack.verifying.verifier import verify
from moepack.packing.shard_index import index_model
from tests.support.gguf_builder import F32, moe, split, write_shards
from tests.support.models import pack_model
from tests.support.pack_draft import COUNTS, Draft, move_part, record, stated, strong_digests


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build two layers of two experts of three parts of 32 bytes, in three shards, and pack them.

    `pack` has the hotness of all blobs, `lain` is an index over the shards with all digests.
    """
    folder = tmp_path_factory.mktemp("rules")
    builder = moe((0, 1), 2, ne=(4, 2), type_id=F32, block=(1, 4))
    paths = write_shards(split(builder, 5), folder / "model")
    pack_model(paths, folder / "pack", counts=COUNTS)
    index_model(paths, folder / "lain", digests=True)
    return folder


@pytest.fixture
def draft(model: Path, tmp_path: Path) -> Draft:
    return Draft(Path(shutil.copytree(model / "pack", tmp_path / "pack")))


class Rule(NamedTuple):
    """One broken rule: the change that breaks it, the kind of its finding and words of that."""

    name: str
    breaks: Callable[[Draft], object]
    kind: str
    words: str


def overlapping_parts(draft: Draft) -> None:
    """Let a part begin with the last bytes of the one before it, which is no weight."""
    name = draft.get("part_kind", 1).name
    draft.set("part_kind", 1, name=name.replace(b"weight", b"bias\0\0"))
    move_part(draft, 1, draft.get("part", 0).offset + 16 - draft.get("part", 1).offset)
    draft.set("part", 0, digest=digest.xxh3(draft.read(draft.get("part", 0))))


def outside(draft: Draft) -> None:
    """Put a part of expert 0 into the padding of expert 1's blob."""
    blob, other = draft.get("blob", 0), draft.get("blob", 1)
    move_part(draft, 0, other.offset + 256 - blob.offset)


def tensor_over_blob(draft: Draft) -> None:
    """Put a norm where a part begins."""
    tensor, part = draft.get("tensor", 1), draft.get("part", 0)
    draft.write(tensor.file, tensor.offset, bytes(tensor.length))
    actual = digest.xxh3(draft.read(part)[: tensor.length])
    draft.set("tensor", 1, offset=part.offset, file=part.file, digest=actual)


def same_origin(draft: Draft) -> None:
    other = draft.get("tensor", 1)
    draft.set("tensor", 2, shard=other.shard, shard_offset=other.shard_offset)


def beyond_its_shard(draft: Draft) -> None:
    tensor = draft.get("tensor", 0)
    length = draft.body["source"]["shards"][tensor.shard]["length"]
    draft.set("tensor", 0, shard_offset=length - tensor.length + 1)


def no_header(draft: Draft) -> None:
    header = draft.get("shard_bytes", 1)
    end = header.offset + header.length - 1
    actual = digest.xxh3(draft.read(header)[:-1])
    draft.set("shard_bytes", 1, shard_offset=1, length=header.length - 1, digest=actual)
    draft.write(header.file, end, b"\0")


def header_sha256(draft: Draft) -> None:
    draft.body["source"]["shards"][1]["header_sha256"] = "0" * 64


RULES = [
    Rule("parts overlap", overlapping_parts, "record", "overlaps the part before it"),
    Rule("a part outside its blob", outside, "record", "lies outside its blob"),
    Rule("a tensor in a blob", tensor_over_blob, "record", "the tensor overlaps a blob"),
    Rule("a tensor too long", record("tensor", 0, ne1=9), "record", "is 144 bytes long"),
    Rule("padding after a blob", lambda e: e.lengthen(0, bytes(4095) + b"x"), "padding", "0x78"),
    Rule("a shard that is not listed", record("tensor", 0, shard=3), "origin", "lists 2"),
    Rule("an origin past its shard", beyond_its_shard, "origin", "bytes long"),
    Rule("two of one origin", same_origin, "origin", "as a tensor did"),
    Rule("a shard without its header", no_header, "missing", "its header, bytes 0 to"),
    Rule("a header's SHA-256", header_sha256, "manifest", "the SHA-256 of this header is"),
    Rule("not whole", stated(whole=False), "manifest", "it says that the pack is not whole"),
    Rule("layers", stated(layers=[0], whole=False), "manifest", "it lists layers 0"),
    Rule(
        "a count that is not whole",
        stated(hotness={"measured_blob_count": 4.0}),
        "manifest",
        "hotness.measured_blob_count is 4.0, the index has 4",
    ),
    Rule("fewer files", lambda e: e.body["files"].pop(), "manifest", "it lists 2 files"),
]
"""Rules that are in no table of `broken_packs`."""


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_each_broken_rule_is_one_finding(rule: Rule, draft: Draft) -> None:
    rule.breaks(draft)
    if rule.kind == "manifest":
        draft.save_manifest()
    else:
        draft.save()
    report = verify(draft.path)
    assert (report.passed, bool(report.headline)) == (False, True)
    (finding,) = report.findings
    assert finding.kind == rule.kind
    assert rule.words in finding.message


def test_a_type_that_the_packer_did_not_know_is_not_held_against_the_table(draft: Draft) -> None:
    """Even if the verifier knows a type of its number."""
    draft.set("part_kind", 0, flags=1, type_name=b"type-0", interleaved_row_count=0, ne1=3)
    draft.set("tensor", 0, flags=1, type_name=b"type-0", ne1=9)
    draft.save()
    assert verify(draft.path).passed


def test_types_that_the_verifier_does_not_know_pass(draft: Draft) -> None:
    draft.set("part_kind", 0, type_id=999, type_name=b"type-999", ne0=7)
    draft.set("tensor", 1, type_id=998, type_name=b"type-998", ne0=7)
    draft.save()
    assert verify(draft.path).passed


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"type_id": 36, "type_name": b"I2_S"}, "no part is of this type"),
        ({"type_id": 230, "type_name": b"BF16_R16"}, "stores 16 rows as one unit"),
        (
            {"type_id": 230, "type_name": b"BF16_R16", "interleaved_row_count": 16, "ne0": 8},
            "2 rows of BF16_R16, which stores 16 as one unit",
        ),
        ({"type_id": 158, "type_name": b"IQ1_KT", "ne0": 256}, "is 120 bytes long"),
    ],
)
def test_types_of_forks_are_checked_as_all_others(
    changes: dict[str, Any], words: str, draft: Draft
) -> None:
    draft.set("part_kind", 0, **changes)
    draft.save()
    assert words in " ".join(finding.message for finding in verify(draft.path).findings)


@pytest.mark.parametrize("shard", [0, 2])
def test_an_origin_of_other_bytes_that_is_wrong_is_found_in_the_index(
    shard: int, draft: Draft
) -> None:
    """They are part of no tensor that a finding could name."""
    draft.set("shard_bytes", 1, shard=shard)
    draft.save()
    origins = [one for one in verify(draft.path).findings if one.kind == "origin"]
    assert ("index.bin", None) in {(one.file, one.tensor) for one in origins}


def test_the_largest_hotness_is_one(draft: Draft) -> None:
    draft.set("blob", draft.index[draft.sections["ranks"].offset], hotness=(1 << 63) - 1)
    draft.save()
    assert verify(draft.path).passed


def test_a_shard_that_is_longer_in_the_manifest_is_one_finding(model: Path, tmp_path: Path) -> None:
    lain = Draft(Path(shutil.copytree(model / "lain", tmp_path / "lain")))
    lain.body["source"]["shards"][1]["length"] += 32
    lain.save()
    (finding,) = verify(lain.path).findings
    assert (finding.kind, finding.file) == ("manifest", "manifest.json")


def test_alignments_mean_nothing_in_a_file_that_is_a_shard(model: Path, tmp_path: Path) -> None:
    lain = Draft(Path(shutil.copytree(model / "lain", tmp_path / "lain")))
    lain.set("header", blob_alignment=4096, part_alignment=4096, tensor_alignment=4096)
    lain.save()
    assert verify(lain.path).passed


def test_strong_digests_are_checked_where_there_are_no_others(model: Path, tmp_path: Path) -> None:
    paths = sorted((model / "model").iterdir())
    index_model(paths, tmp_path / "lain")
    lain = Draft(tmp_path / "lain")
    strong_digests()(lain)
    lain.save()
    assert verify(lain.path).passed
    at = lain.sections["strong_digests"].offset
    lain.index[at + 32] ^= 1
    lain.save()
    (finding,) = verify(lain.path).findings
    assert (finding.kind, finding.layer, finding.expert) == ("digest", 0, 0)
    assert "its SHA-256 is" in finding.message
