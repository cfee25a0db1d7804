"""Hostile packs: each rule broken alone, giants, damage."""

import contextlib
import json
import os
import shutil
import struct
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import moepack
from conformance import make_packs
from moepack.common.errors import MachineError, PackError, RequestError
from moepack.inspection.describe import describe_pack
from moepack.pack.format import manifest, records, sections
from moepack.pack.format.dense import DenseTensor
from moepack.pack.verifying.verifier import verify
from moepack.report.facts import json_text
from tests.support.amounts import amounts
from tests.support.broken_manifests import BAD_ENTRIES, change
from tests.support.broken_packs import INDEX_RULES
from tests.support.hostile_input import (
    EFFORTS,
    MAX_SECONDS,
    assert_cheap,
    assert_tidy,
    filled,
    mutants,
)
from tests.support.messages import MESSAGES, documented
from tests.support.pack_draft import Draft, Piece, Rule, added, sealed


def look_up_everything(path: Path) -> None:
    """Open a pack and locate all that it says it holds."""
    with moepack.open(path) as pack:
        lengths = [file.length for file in pack.index.files]
        ends = dict(zip(pack.file_paths, lengths, strict=True))
        for layer in pack.layers:
            for family in pack.families(layer):
                for expert in range(pack.expert_count(layer, family=family)):
                    pack.hotness(layer, expert, family=family)
                    with contextlib.suppress(RequestError):  # its parts lie apart
                        blob = pack.locate(layer, expert, family=family)
                        assert blob.offset + blob.length <= ends[blob.path]
                    for kind in pack.parts(layer, family=family):
                        part = pack.locate(layer, expert, kind.name, family=family)
                        assert part.offset + part.length <= ends[part.path]
        for packed in pack.index.families:
            for kind in packed.part_kinds:
                for expert in range(packed.expert_count):
                    assert pack.index.origin(packed, kind, expert)[0] < records.MAX_SHARDS
        records_of_dense: list[DenseTensor | records.ShardBytesRecord] = [*pack.index.tensors()]
        for record in [*records_of_dense, *pack.index.shard_bytes()]:
            assert record.offset + record.length <= lengths[record.file]
            assert record.shard < records.MAX_SHARDS
        pack.hottest(1 << 62)
        pack.dense()
        json_text(describe_pack(pack))


def complaint(path: Path) -> str:
    """Return the verifier's error or findings about a pack; empty without any."""
    try:
        findings = verify(path, threads=1).findings
    except PackError as error:
        assert_tidy(error)
        return str(error)
    for finding in findings:
        assert str(finding).isprintable(), finding
        assert len(str(finding)) <= 2000
    return "\n".join(map(str, findings))


def refused(path: Path) -> PackError:
    with pytest.raises(PackError) as caught:
        look_up_everything(path)
    assert_tidy(caught.value)
    return caught.value


def test_the_tiny_pack_and_an_unchanged_draft_are_sound(tiny: Path, draft: Draft) -> None:
    draft.rebuild(draft.pieces())
    draft.save()
    assert (draft.path / "index.bin").read_bytes() == (tiny / "index.bin").read_bytes()
    assert (draft.path / "manifest.json").read_bytes() == (tiny / "manifest.json").read_bytes()
    look_up_everything(draft.path)
    assert complaint(draft.path) == ""
    counts = {name: section.record_count for name, section in draft.sections.items()}
    assert counts == {
        **{"files": 3, "families": 2, "part_kinds": 6, "blobs": 4, "parts": 12, "ranks": 4},
        **{"tensors": 4, "shard_bytes": 1},
    }


# The index, rule by rule.


@pytest.mark.parametrize(
    "rule",
    [
        pytest.param(rule, id=f"{group}: {rule.name}")
        for group, rules in INDEX_RULES.items()
        for rule in rules
    ],
)
def test_each_rule_of_the_index_is_kept_by_reader_and_verifier(rule: Rule, draft: Draft) -> None:
    rule.breaks(draft)
    draft.save()
    error = refused(draft.path)
    assert documented(error)
    assert (error.place or "").startswith(rule.place)
    assert error.problem == rule.problem
    assert complaint(draft.path)


def test_a_read_names_the_part_whose_record_is_wrong(draft: Draft) -> None:
    draft.set("part", 7, codec=1)
    draft.save()
    with (
        moepack.open(draft.path) as pack,
        pack.reader() as reader,
        pytest.raises(PackError, match=r"part 7 \(ffn_up_exps\.weight\): unknown codec"),
    ):
        reader.read(1, 0)


# What is allowed, now and in versions to come.


@pytest.mark.parametrize("claimed", [1 << 40, (1 << 63) - 4096])
def test_a_blob_that_claims_terabytes_is_not_allocated(claimed: int, draft: Draft) -> None:
    draft.resize(0, claimed)
    draft.set("blob", 0, offset=0, length=claimed)
    draft.save()
    with (
        moepack.open(draft.path) as pack,
        pack.reader() as reader,
        pytest.raises((PackError, MachineError)) as caught,
    ):
        reader.read(0, 0)
    assert_tidy(caught.value)
    assert "bytes long, the index says" in complaint(draft.path)


# The manifest, rule by rule.


def test_each_rule_of_the_manifest_is_kept_by_reader_and_verifier(draft: Draft) -> None:
    """By the messages of the document, all of which are met."""
    path = draft.path / "manifest.json"
    whole = path.read_bytes()
    messages = set()
    for data in (whole[:-11] + b'0000000"\n}\n', b"{", b"[]", bytes(manifest.MAX_LENGTH + 1)):
        path.write_bytes(data)
        messages.add(documented(refused(draft.path)))
    for entry in BAD_ENTRIES:
        draft.body = json.loads(whole)
        change(draft.body, entry)
        draft.save_manifest()
        error = refused(draft.path)
        assert entry.words in str(error), entry.name
        assert complaint(draft.path), entry.name
        messages.add(documented(error))
    assert None not in messages
    assert set(MESSAGES["manifest"]) <= messages


def test_names_with_a_dot_are_others_and_pass(draft: Draft) -> None:
    """Of sections, keys and families; required sections are refused by name."""
    name = "org.example.x"
    added(Piece(name.encode(), b"12345", 5, 0))(draft)
    draft.set("family", 1, name=name.encode())
    index, shard = draft.body["index"], draft.body["source"]["shards"][0]
    for holder in (draft.body, draft.body["layout"], index, index["pages"], shard):
        holder[name] = {name: [name]}
    draft.save()
    look_up_everything(draft.path)
    assert complaint(draft.path) == ""
    with moepack.open(draft.path) as pack, pack.reader() as reader:
        assert pack.families(1) == (name,)
        assert reader.read(1, 0, family=name)
    pieces = draft.pieces()
    draft.rebuild([*pieces[:-1], pieces[-1]._replace(flags=1)])
    draft.save()
    assert f"needs the section '{name}'" in str(refused(draft.path))


@pytest.mark.parametrize("key", ["source", "layout", "hotness"])
@pytest.mark.parametrize("value", [{}, {"shards": 5}, {"blobs": 5}, {"shards": [5, None, []]}])
def test_provenance_may_be_anything_and_is_never_trusted(
    key: str, value: dict[str, Any], draft: Draft, tiny: Path
) -> None:
    draft.body[key] = value
    draft.save_manifest()
    shards = [str(tiny.parent / "m.gguf")]
    try:
        with moepack.open(draft.path) as pack:
            json_text(describe_pack(pack))
        outcome = verify(draft.path, shards, threads=1)
    except PackError as error:
        assert_tidy(error)
        return
    assert key != "source" or not outcome.passed


@pytest.mark.parametrize("value", ["\n\x1b[2J" * 10_000, [1] * 10_000, {"\x1b": 0}])
def test_what_hotness_states_does_not_flood_the_findings(value: Any, draft: Draft) -> None:
    draft.body["hotness"] = {"blob_count": value}
    draft.save_manifest()
    (finding,) = verify(draft.path, threads=1).findings
    assert finding.message.startswith("hotness.blob_count is ")
    assert str(finding).isprintable()
    assert len(str(finding)) < 1000


@pytest.mark.parametrize("step", amounts(23, 1))
@pytest.mark.parametrize("name", ["manifest.json", "index.bin"])
def test_a_file_cut_at_any_byte_or_a_flipped_bit_in_it_is_noticed(
    name: str, draft: Draft, step: int
) -> None:
    path = draft.path / name
    data = path.read_bytes()
    for at in range(0, len(data), step):
        flipped = data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :]
        for damaged in (flipped, data[:at]):
            path.write_bytes(damaged)
            refused(draft.path)
            assert at % 5 or complaint(draft.path), at


# Giants: seconds and 100 MB, in a process of its own.

OPEN = ("import moepack", "moepack.open(path)")


BIG_MANIFESTS = {
    "objects": b'{"a":[' + filled(b"{},", manifest.MAX_LENGTH - 20) + b"0]}",
    "too long": b" " * (manifest.MAX_LENGTH + 1),
    "a long text": b'{"format":"' + filled(b"a", manifest.MAX_LENGTH - 20) + b'"}',
    "long digits": b'{"format":' + filled(b"9", manifest.MAX_LENGTH - 20) + b"}",
    "deep lists": filled(b"[", manifest.MAX_LENGTH),
}
"""Empty objects take more memory and time than lists, numbers or fractions."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name == "objects" else ())
        for name in BIG_MANIFESTS
    ],
)
def test_a_big_manifest_is_refused_within_seconds_and_256_mib(name: str, tmp_path: Path) -> None:
    path = tmp_path / "pack"
    path.mkdir()
    (path / "manifest.json").write_bytes(BIG_MANIFESTS[name])
    assert_cheap(OPEN, path, 256 << 20)


def test_a_sparse_manifest_of_gigabytes_is_refused(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_bytes(b"{")
    os.truncate(tmp_path / "manifest.json", 4 << 30)
    assert "too long" in assert_cheap(OPEN, tmp_path).text


@pytest.mark.parametrize("in_header", [True, False])
def test_a_sparse_index_of_gigabytes_is_refused(in_header: bool, draft: Draft) -> None:
    counts = {name: section.record_count for name, section in draft.sections.items()}
    counts |= {"blobs": records.MAX_BLOBS, "ranks": records.MAX_BLOBS, "parts": 1 << 26}
    directory = sections.place(counts)
    if in_header:
        draft.set("header", index_length=directory.index_length)
        start = records.HEADER.size
        encoded = sections.encode(directory)
        draft.index[start : start + len(encoded)] = encoded
    (draft.path / "index.bin").write_bytes(draft.index)
    os.truncate(draft.path / "index.bin", directory.index_length)
    assert directory.index_length > 2 << 30
    assert_cheap(OPEN, draft.path)


def test_tables_filled_to_their_limits_are_read_or_refused_in_time(draft: Draft) -> None:
    """All files, families and part kinds that the format allows, and a digest that is wrong."""
    kinds, families = records.MAX_PART_KINDS, records.MAX_FAMILIES
    assert kinds * records.PART_KIND.size < 64 << 20, "more than a reader can check"
    each = kinds // families
    file, family, kind = draft.get("file"), draft.get("family"), draft.get("part_kind")
    tables: dict[bytes, list[bytes]] = {
        b"files": [
            records.FILE.pack(*file._replace(name=f"{number}.bin".encode()))
            for number in range(records.MAX_FILES)
        ],
        b"families": [
            records.FAMILY.pack(
                *family._replace(
                    layer=number,
                    expert_count=1,
                    parts_per_blob=each,
                    first_blob=number,
                    first_part_kind=number * each,
                    first_part=number * each,
                )
            )
            for number in range(families)
        ],
        b"part_kinds": [
            records.PART_KIND.pack(*kind._replace(name=f"{number % each}.weight".encode()))
            for number in range(kinds)
        ],
        b"blobs": [bytes(32)] * families,
        b"parts": [bytes(32)] * kinds,
        b"ranks": [bytes(4)] * families,
    }
    draft.rebuild([Piece(name, b"".join(rows), len(rows[0]), 1) for name, rows in tables.items()])
    draft.save()
    assert "files: index and manifest list" in assert_cheap(OPEN, draft.path).text


def test_a_directory_filled_to_its_limits_is_read_in_time(draft: Draft) -> None:
    pieces = draft.pieces()
    more = [
        Piece(b"news-%d" % number, b"", 1, 0)
        for number in range(records.MAX_SECTIONS - len(pieces))
    ]
    draft.rebuild([*pieces, *more], header_more=bytes(1992), section_more=bytes(200))
    header = draft.header
    assert header.header_length + 256 * header.section_record_length == records.MAX_DIRECTORY_END
    draft.save()
    start = time.process_time()
    look_up_everything(draft.path)
    assert time.process_time() - start < MAX_SECONDS


# Random damage.

_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda values: st.lists(values, max_size=4) | st.dictionaries(st.text(), values, max_size=4),
    max_leaves=10,
)


# Its experts have slices of their own.
BASE = Draft(make_packs.FOLDER / "a-tensor-an-expert")
INDEX = bytes(BASE.index)
INDEXES = (
    mutants(INDEX)
    | mutants(INDEX, 512)  # most of it in the header and the directory
    | st.binary(max_size=300)
    | st.binary().map(lambda tail: INDEX[:512] + tail)
)
MANIFEST = (BASE.path / "manifest.json").read_bytes()
BODY = {key: value for key, value in BASE.body.items() if key != "manifest_digest"}
BODIES = st.dictionaries(st.sampled_from([*BODY, "more"]), _JSON, max_size=4).map(
    lambda changes: sealed(json.dumps(BODY | changes, indent=2))
)
MANIFESTS = mutants(MANIFEST) | BODIES | _JSON.map(lambda v: json.dumps(v).encode()) | st.binary()


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a pack that examples may change: each writes both of its files."""
    return Path(shutil.copytree(BASE.path, tmp_path_factory.mktemp("scratch") / "pack"))


def check_pack(scratch: Path, *, index: bytes = INDEX, text: bytes | None = None) -> None:
    """Open and verify a pack with this index, or this manifest: it may only raise PackError.

    The digests of an index are right, and so is its length, whatever else is wrong.
    """
    draft = Draft(BASE.path)
    draft.path = scratch
    draft.index[:] = index
    if len(index) >= 24:
        struct.pack_into("<Q", draft.index, 16, len(index))
    draft.save()
    if text is not None:
        (scratch / "manifest.json").write_bytes(text)
    try:
        look_up_everything(scratch)
    except (PackError, MachineError) as error:
        assert_tidy(error)
    complaint(scratch)


@pytest.mark.parametrize("effort", EFFORTS)
def test_any_index_is_read_and_verified_or_refused(effort: settings, scratch: Path) -> None:
    effort(given(INDEXES)(lambda index: check_pack(scratch, index=index)))()


@pytest.mark.parametrize("effort", EFFORTS)
def test_any_manifest_is_read_and_verified_or_refused(effort: settings, scratch: Path) -> None:
    surrogate = b'{"format": "moepack", "format_version": 1, "files": [{"name": "\\ud800"}]}'
    check_pack(scratch, text=surrogate)
    effort(given(MANIFESTS)(lambda text: check_pack(scratch, text=text)))()
