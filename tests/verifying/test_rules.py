"""One rule, one finding, one test: each breaks just that rule in a pack that is sound otherwise."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from moepack import digest
from moepack.packing.shard_index import index_model
from moepack.verifying.verifier import verify
from tests.support.gguf_builder import F32, moe, split, write_shards
from tests.support.models import flip, pack_model
from tests.support.pack_draft import COUNTS, Draft, record, set_rank, strong_digests


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build two layers of two experts of three parts of 32 bytes, in three shards, and pack them.

    `pack` has the hotness of all blobs, `lain` is an index over the shards with all digests.
    """
    folder = tmp_path_factory.mktemp("rules")
    (folder / "model").mkdir()
    builder = moe((0, 1), 2, ne=(4, 2), type_id=F32, block=(1, 4))
    paths = write_shards(split(builder, 5), folder / "model")
    pack_model(paths, folder / "pack", counts=COUNTS)
    index_model(paths, folder / "lain", digests=True)
    return folder


@pytest.fixture
def draft(model: Path, tmp_path: Path) -> Draft:
    return Draft(Path(shutil.copytree(model / "pack", tmp_path / "pack")))


class Rule(NamedTuple):
    """One broken rule: how, and the kind of the one finding and words of it."""

    name: str
    breaks: Callable[[Draft], object]
    kind: str
    words: str


def stated(**keys: Any) -> Callable[[Draft], None]:
    """Change keys of the manifest, `a__b` for `b` in `a`."""

    def change(draft: Draft) -> None:
        for name, value in keys.items():
            *outer, key = name.split("__")
            body = draft.body
            for step in outer:
                body = body[step]
            assert body.get(key) != value
            body[key] = value

    return change


def overlapping_blobs(draft: Draft) -> None:
    """Put expert 0 where expert 1 lies, parts, digests and all, and zeros where it was."""
    old = draft.get("blob", 0)
    draft.set("blob", 0, offset=draft.get("blob", 1).offset)
    for number in range(3):
        other = draft.get("part", 3 + number)
        draft.set("part", number, offset=other.offset, digest=other.digest)
    zero(draft, 0, old.offset, old.length)


def zero(draft: Draft, file: int, offset: int, length: int) -> None:
    with open(draft.path / draft.body["files"][file]["name"], "r+b") as held:
        held.seek(offset)
        held.write(bytes(length))


def move_part(draft: Draft, number: int, step: int) -> None:
    """Move a part with its bytes, and leave zeros where it was."""
    part = draft.get("part", number)
    path = draft.path / draft.body["files"][part.file]["name"]
    data = bytearray(path.read_bytes())
    held = bytes(data[part.offset : part.offset + part.stored_length])
    data[part.offset : part.offset + part.stored_length] = bytes(len(held))
    start = part.offset + step
    data[start : start + len(held)] = held
    path.write_bytes(data)
    draft.set("part", number, offset=start)


def swapped_parts(draft: Draft) -> None:
    """Let two parts of a blob change their places, so that they are not in their order."""
    first, second = draft.get("part", 0), draft.get("part", 1)
    draft.set("part", 0, offset=second.offset, digest=second.digest)
    draft.set("part", 1, offset=first.offset, digest=first.digest)


def overlapping_parts(draft: Draft) -> None:
    """Let a part begin with the last bytes of the one before it, which is no weight."""
    name = draft.get("part_kind", 1).name
    draft.set("part_kind", 1, name=name.replace(b"weight", b"bias\0\0"))
    first = draft.get("part", 0)
    move_part(draft, 1, first.offset + 16 - draft.get("part", 1).offset)
    resign(draft, 0)
    resign(draft, 1)


def resign(draft: Draft, number: int) -> None:
    """State the digest of the bytes that lie where a part is."""
    part = draft.get("part", number)
    data = (draft.path / draft.body["files"][part.file]["name"]).read_bytes()
    known = digest.of(data[part.offset : part.offset + part.stored_length])
    if known != part.digest:
        draft.set("part", number, digest=known)


def outside(draft: Draft) -> None:
    """Put a part of expert 0 into the padding of expert 1's blob."""
    blob, other = draft.get("blob", 0), draft.get("blob", 1)
    move_part(draft, 0, other.offset + 256 - blob.offset)


def tensor_over_tensor(draft: Draft) -> None:
    """Put a norm over the first row of the embedding."""
    over, under = draft.get("tensor", 1), draft.get("tensor", 0)
    assert over.length <= under.length
    zero(draft, over.file, over.offset, over.length)
    data = (draft.path / "dense.bin").read_bytes()
    known = digest.of(data[under.offset : under.offset + over.length])
    draft.set("tensor", 1, offset=under.offset, digest=known)


def tensor_over_blob(draft: Draft) -> None:
    """Put a norm where a part begins."""
    tensor, part = draft.get("tensor", 1), draft.get("part", 0)
    zero(draft, tensor.file, tensor.offset, tensor.length)
    data = (draft.path / draft.body["files"][part.file]["name"]).read_bytes()
    known = digest.of(data[part.offset : part.offset + tensor.length])
    draft.set("tensor", 1, offset=part.offset, file=part.file, digest=known)


def unaligned(section: str) -> Callable[[Draft], None]:
    """Move something in dense.bin by 64 bytes, and let it be zeros."""

    def change(draft: Draft) -> None:
        held = draft.get(section, 0)
        zero(draft, held.file, held.offset, held.length)
        draft.set(section, 0, offset=held.offset + 64, digest=digest.of(bytes(held.length)))

    return change


def renamed_tensor(draft: Draft) -> None:
    draft.set("tensor", 1, name=draft.get("tensor", 0).name)


def same_origin(draft: Draft) -> None:
    held = draft.get("tensor", 1)
    draft.set("tensor", 2, shard=held.shard, shard_offset=held.shard_offset)


def beyond_its_shard(draft: Draft) -> None:
    held = draft.get("tensor", 0)
    length = draft.body["source"]["shards"][held.shard]["length"]
    draft.set("tensor", 0, shard_offset=length - held.length + 1)


def no_header(draft: Draft) -> None:
    held = draft.get("shard_bytes", 1)
    draft.set("shard_bytes", 1, shard_offset=1, length=held.length - 1, offset=held.offset)
    data = (draft.path / "dense.bin").read_bytes()
    known = digest.of(data[held.offset : held.offset + held.length - 1])
    draft.set("shard_bytes", 1, digest=known)
    end = held.offset + held.length - 1
    zero(draft, held.file, end, 1)


def dirty(name: str, offset: int) -> Callable[[Draft], None]:
    return lambda draft: flip(draft.path / name, offset)


def wrong_page(draft: Draft) -> None:
    draft.body["index"]["pages"]["digests"][0] = digest.to_text(1)


def part_bytes(draft: Draft) -> None:
    part = draft.get("part", 4)
    flip(draft.path / draft.body["files"][part.file]["name"], part.offset + 31)


def tensor_bytes(draft: Draft) -> None:
    tensor = draft.get("tensor", 2)
    flip(draft.path / "dense.bin", tensor.offset + tensor.length - 1)


def header_bytes(draft: Draft) -> None:
    flip(draft.path / "dense.bin", draft.get("shard_bytes", 2).offset)


def header_sha256(draft: Draft) -> None:
    draft.body["source"]["shards"][1]["header_sha256"] = "0" * 64


RULES = [
    Rule("blobs overlap", overlapping_blobs, "record", "the blob overlaps another"),
    Rule("parts overlap", overlapping_parts, "record", "overlaps the part before it"),
    Rule("parts out of order", swapped_parts, "record", "stands before the part before it"),
    Rule("a part outside its blob", outside, "record", "lies outside its blob"),
    Rule("a weight unaligned", lambda e: move_part(e, 2, 512), "record", "not aligned to 4,096"),
    Rule("tensors overlap", tensor_over_tensor, "record", "the tensor overlaps another"),
    Rule("a tensor in a blob", tensor_over_blob, "record", "the tensor overlaps a blob"),
    Rule("a header unaligned", unaligned("shard_bytes"), "record", "offset not aligned"),
    Rule("two tensors of one name", renamed_tensor, "record", "two tensors have this name"),
    Rule("a tensor unaligned", unaligned("tensor"), "record", "offset not aligned"),
    Rule("a file of blobs, its end", lambda e: e.lengthen(0, bytes(64)), "record", "its length is"),
    Rule("a file of tensors, its end", lambda e: e.lengthen(2, bytes(64)), "record", "its length"),
    Rule("a part too long for its type", record("part_kind", 0, ne1=3), "record", "48 bytes long"),
    Rule("a type's name", record("part_kind", 0, type_name=b"F16"), "record", "type 0 is F32"),
    Rule("half a block", record("part_kind", 0, type_id=8, type_name=b"Q8_0"), "record", "blocks"),
    Rule("rows", record("part_kind", 0, interleaved_row_count=4), "record", "interleaves no rows"),
    Rule("a tensor too long", record("tensor", 0, ne1=9), "record", "is 144 bytes long"),
    Rule("a rank twice", lambda e: set_rank(e, 1, 1), "rank", "its record says 0"),
    Rule("hotness that rises", record("blob", 3, hotness=100), "rank", "is hotter than"),
    Rule("a part's bytes", part_bytes, "digest", "its digest is"),
    Rule("a tensor's bytes", tensor_bytes, "digest", "its digest is"),
    Rule("a header's bytes", header_bytes, "digest", "its digest is"),
    Rule("a part's digest", record("part", 4, digest=1), "digest", "xxh3:0000000000000001"),
    Rule("padding in a blob", dirty("experts-00000.bin", 4095), "padding", "is 0x01, not zero"),
    Rule("padding after a blob", lambda e: e.lengthen(0, bytes(4095) + b"x"), "padding", "0x78"),
    Rule("padding of tensors", dirty("dense.bin", 4095), "padding", "is 0x01, not zero"),
    Rule("a shard that is not listed", record("tensor", 0, shard=3), "origin", "lists 2"),
    Rule("an origin past its shard", beyond_its_shard, "origin", "bytes long"),
    Rule("two of one origin", same_origin, "origin", "as a tensor did"),
    Rule("a shard without its header", no_header, "missing", "its header, bytes 0 to"),
    Rule("a page of the index", wrong_page, "manifest", "page 0"),
    Rule("a header's SHA-256", header_sha256, "manifest", "the SHA-256 of this header is"),
    Rule("not whole", stated(whole=False), "manifest", "it says that the pack is not whole"),
    Rule("layers", stated(layers=[0], whole=False), "manifest", "it lists layers 0"),
    Rule("layers descending", stated(layers=[1, 0], whole=False), "manifest", "layers 1, 0"),
    Rule("experts used", stated(source__experts_used={"ffn_exps": 3}), "manifest", "uses 3"),
    Rule("measured", stated(hotness__measured_blob_count=3), "manifest", "blob_count is 3"),
    Rule("blobs", stated(hotness__blob_count=5), "manifest", "hotness.blob_count is 5"),
    Rule("no hotness", stated(hotness=None), "manifest", "it knows of no hotness"),
    Rule("files", lambda e: e.body["files"].reverse(), "manifest", "it lists other files"),
    Rule("fewer files", lambda e: e.body["files"].pop(), "manifest", "it lists 2 files"),
]
SEVERAL = {
    "a part too long for its type": {"48 bytes"},
    "experts used": {"in layer 0", "in layer 1"},
    "files": {"file 0", "file 2"},
}
"""Rules that cannot be broken in one place alone, and words of each of the findings."""


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_each_broken_rule_is_one_finding(rule: Rule, draft: Draft) -> None:
    assert verify(draft.path).passed
    rule.breaks(draft)
    if rule.kind in ("manifest", "index"):
        draft.save_manifest()
    else:
        draft.save()
    report = verify(draft.path)
    assert report.passed is False
    assert report.headline
    assert {finding.kind for finding in report.findings} == {rule.kind}, report.findings
    assert any(rule.words in finding.message for finding in report.findings), report.findings
    if rule.name not in SEVERAL:
        assert len(report.findings) == 1, report.findings
    for words in SEVERAL.get(rule.name, ()):
        assert any(words in finding.message for finding in report.findings)


def test_a_type_that_the_packer_did_not_know_is_not_held_against_the_table(draft: Draft) -> None:
    """Though its number is one of those that the verifier knows."""
    draft.set("part_kind", 0, flags=1, type_name=b"type-0", interleaved_row_count=0, ne1=3)
    draft.set("tensor", 0, flags=1, type_name=b"type-0", ne1=9)
    draft.save()
    assert verify(draft.path).passed


@pytest.mark.parametrize("type_id", [0, 999])
@pytest.mark.parametrize("flags", [0, 1])
def test_a_tensor_without_elements_has_no_bytes_whatever_its_type(
    type_id: int, flags: int, draft: Draft
) -> None:
    name = b"F32" if not type_id else b"type-999"
    fields = {"flags": flags} if flags else {}
    fields |= {"type_id": type_id} if type_id else {}
    draft.set("tensor", 1, ne0=0, type_name=name, **fields)
    draft.save()
    (finding,) = verify(draft.path).findings
    assert (finding.kind, finding.tensor) == ("record", "blk.0.attn_norm.weight")
    assert finding.message == "it has no elements, and 16 bytes"


def test_types_that_the_verifier_does_not_know_pass(draft: Draft) -> None:
    draft.set("part_kind", 0, type_id=999, type_name=b"type-999", ne0=7)
    draft.set("tensor", 1, type_id=36, type_name=b"I2_S", ne0=7)
    draft.save()
    assert verify(draft.path).passed


def test_what_lies_in_one_shard_came_from_one(model: Path, tmp_path: Path) -> None:
    lain = Draft(Path(shutil.copytree(model / "lain", tmp_path / "lain")))
    held = lain.get("tensor", 1)
    lain.set("tensor", 1, shard=held.shard + 1)
    lain.save()
    findings = {(f.kind, f.file): f.message for f in verify(lain.path).findings if f.file}
    name = lain.body["files"][held.file]["name"]
    assert "what lies in it came from shards 0-1" in findings["record", name]


def test_a_file_that_is_a_shard_is_as_long_as_that(model: Path, tmp_path: Path) -> None:
    lain = Draft(Path(shutil.copytree(model / "lain", tmp_path / "lain")))
    lain.body["source"]["shards"][1]["length"] += 1
    lain.save_manifest()
    (finding,) = verify(lain.path).findings
    assert finding.kind == "manifest"
    assert "bytes long, the index has it as" in finding.message


def test_alignments_mean_nothing_in_a_file_that_is_a_shard(model: Path, tmp_path: Path) -> None:
    lain = Draft(Path(shutil.copytree(model / "lain", tmp_path / "lain")))
    lain.set("header", blob_alignment=4096, part_alignment=4096, tensor_alignment=4096)
    lain.save()
    assert verify(lain.path).passed


def test_what_lies_in_shards_is_verified_where_digests_are_known(
    model: Path, tmp_path: Path
) -> None:
    lain = Draft(Path(shutil.copytree(model / "lain", tmp_path / "lain")))
    report = verify(lain.path)
    assert report.passed
    assert report.read_length
    part = lain.get("part", 0)
    flip(lain.path / lain.body["files"][part.file]["name"], part.offset)
    (finding,) = verify(lain.path).findings
    assert (finding.kind, finding.layer, finding.expert) == ("digest", 0, 0)


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


def test_a_byte_of_a_shard_that_no_record_covers_is_zero(tmp_path: Path) -> None:
    """Between two records, and behind the last one up to the shard's end."""
    builder = moe((0,), 2, ne=(4, 2), type_id=F32, block=(1, 4))
    shard = builder.write(tmp_path / "m.gguf")
    index_model(shard, tmp_path / "lain", digests=True)
    lain = Draft(tmp_path / "lain")
    tensors = [lain.get("tensor", n) for n in range(lain.sections["tensors"].record_count)]
    ends = sorted(held.shard_offset + held.length for held in tensors)
    assert ends[-1] < shard.stat().st_size
    for at in (ends[1], shard.stat().st_size - 1):
        flip(shard, at)
        (finding,) = verify(lain.path).findings
        assert (finding.kind, finding.offset) == ("padding", at)
        flip(shard, at)
