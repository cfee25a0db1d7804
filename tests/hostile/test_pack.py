"""Hostile packs: each rule broken alone, giants, damage."""

import contextlib
import itertools
import json
import os
import shutil
import struct
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import moepack
from moepack import digest
from moepack.errors import MachineError, PackError, RequestError
from moepack.format import manifest, records, sections
from moepack.format.dense import DenseTensor, ShardBytes
from moepack.format.index import Index
from moepack.format.source_entry import ShardEntry, SourceEntry
from moepack.format.tables import PackedFamily
from moepack.reading.pack import Pack
from moepack.reading.shard_map import map_shards
from moepack.report.inspection import describe_pack
from moepack.report.json_text import json_text, to_json
from moepack.verifying.verifier import verify
from tests.support.amounts import amounts
from tests.support.broken_manifests import BAD_ENTRIES, Entry, change
from tests.support.broken_packs import INDEX_RULES, SHARD_RULES, VERIFIERS_RULES
from tests.support.hostile_input import (
    DEEP,
    MAX_SECONDS,
    QUICK,
    assert_cheap,
    assert_clear,
    assert_tidy,
    mutants,
)
from tests.support.messages import MESSAGES, documented
from tests.support.pack_draft import (
    Draft,
    Piece,
    Rule,
    added,
    own_tensors,
    sealed,
    without_blobs,
)


def look_up_everything(path: Path) -> None:
    """Open a pack and locate all that it says it holds."""
    with moepack.open(path) as pack:
        for layer in pack.layers:
            for family in pack.families(layer):
                for expert in range(pack.expert_count(layer, family=family)):
                    pack.hotness(layer, expert, family=family)
                    with contextlib.suppress(RequestError):  # its parts lie apart
                        pack.locate(layer, expert, family=family)
                    for kind in pack.parts(layer, family=family):
                        pack.locate(layer, expert, kind.name)
        for found in pack.index.families:
            for number in range(found.expert_count * len(found.part_kinds)):
                kind = found.part_kinds[number % len(found.part_kinds)]
                pack.index.second_place(found.first_part + number, kind)
        pack.hottest(1 << 62)
        pack.dense()
        look_up_origins(pack)
        json_text(describe_pack(pack))


def look_up_origins(pack: Pack) -> None:
    """Ask where everything came from."""
    for family in pack.index.families:
        for kind in family.part_kinds:
            for expert in range(family.expert_count):
                shard, _ = pack.index.origin(family, kind, expert)
                assert shard < records.MAX_SHARDS
    for held in pack.index.shard_bytes():
        assert held.shard < records.MAX_SHARDS


def complaint(path: Path) -> str:
    """Return what the verifier says of a pack, an error or its findings; empty if it is content."""
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


@pytest.mark.parametrize("rule", SHARD_RULES, ids=lambda rule: rule.name)
def test_shards_are_put_together_only_from_what_fits(rule: Rule, draft: Draft) -> None:
    rule.breaks(draft)
    draft.save()
    look_up_everything(draft.path)
    with moepack.open(draft.path) as pack, pytest.raises(PackError) as caught:
        map_shards(pack)
    assert_tidy(caught.value)
    assert (caught.value.place or "").startswith(rule.place)
    assert caught.value.problem == rule.problem


@pytest.mark.parametrize("rule", VERIFIERS_RULES, ids=lambda rule: rule.name)
def test_the_verifier_finds_also_what_readers_do_not_need(rule: Rule, draft: Draft) -> None:
    index = bytes(draft.index)
    rule.breaks(draft)
    if draft.index == index:
        draft.save_manifest()
    else:
        draft.save()
    look_up_everything(draft.path)
    findings = complaint(draft.path)
    assert rule.place in findings
    assert rule.problem in findings


# What is allowed, now and in versions to come.


def grown(draft: Draft) -> None:
    """Make everything as large as a later version may make it, and add a section."""
    news = Piece(b"news", b"later" * 3, 5, 0)
    first, others = draft.pieces()[:3], draft.pieces()[3:]
    pieces = []
    for piece in (*first, *reversed(others)):
        step = 4 if piece.name.startswith(b"ranks") else 40
        length = piece.record_length
        starts = range(0, len(piece.data), length)
        data = b"".join(piece.data[at : at + length] + b"\xff" * step for at in starts)
        pieces.append(piece._replace(data=data, record_length=length + step))
    draft.rebuild(
        [*pieces[:3], news, *pieces[3:]], header_more=b"\xee" * 64, section_more=b"\xdd" * 16
    )


def test_longer_records_other_orders_and_unknown_sections_are_read(
    tiny: Path, draft: Draft
) -> None:
    places = facts(tiny)
    grown(draft)
    draft.save()
    look_up_everything(draft.path)
    assert facts(draft.path) == places
    assert complaint(draft.path) == ""


def facts(path: Path) -> list[Any]:
    """List all that a pack says of its experts and its dense part."""
    with moepack.open(path) as pack:
        index = pack.index
        numbers = range(index.blob_count)
        parts = [
            index.part(family.first_part + number, kind)
            for family in index.families
            for number in range(family.expert_count * len(family.part_kinds))
            for kind in [family.part_kinds[number % len(family.part_kinds)]]
        ]
        shards = [shard.pieces for shard in map_shards(pack)]
        blobs = [index.blob(number) for number in numbers]
        ranks = [index.blob_at_rank(number) for number in numbers]
        return [index.files, index.families, blobs, parts, ranks, [*index.tensors()], shards]


def test_sections_that_readers_of_experts_do_without_may_be_missing(draft: Draft) -> None:
    names = (b"tensors", b"shard_bytes")
    draft.rebuild([piece for piece in draft.pieces() if piece.name.rstrip(b"\0") not in names])
    draft.body["whole"] = False
    draft.save()
    look_up_everything(draft.path)
    with moepack.open(draft.path) as pack:
        assert pack.dense() == ()


def test_experts_may_have_had_a_tensor_each(draft: Draft) -> None:
    held = draft.get("part_kind")
    own_tensors()(draft)
    draft.save()
    look_up_everything(draft.path)
    with moepack.open(draft.path) as pack:
        family = pack.index.families[0]
        kind = family.part_kinds[0]
        starts = [pack.index.origin(family, kind, expert) for expert in range(2)]
    assert starts == [(0, held.shard_offset), (0, held.shard_offset + held.stride)]


def test_an_expert_may_have_no_blob_where_its_parts_lie_in_a_shard(draft: Draft) -> None:
    without_blobs(draft)
    draft.save()
    look_up_everything(draft.path)
    with moepack.open(draft.path) as pack:
        with pytest.raises(RequestError, match="has no blob"):
            pack.locate(0, 1)
        part = pack.locate(0, 1, "up")
        assert (part.offset, part.blob_offset) == (4096, None)


def test_the_digests_of_a_file_may_be_unknown(draft: Draft) -> None:
    draft.set("file", 0, flags=1)
    for number in range(6):
        draft.set("part", number, digest=0)
    draft.save()
    look_up_everything(draft.path)
    with moepack.open(draft.path) as pack, pack.reader() as reader:
        assert pack.locate(0, 0, "up").digest is None
        assert pack.locate(1, 0, "up").digest is not None
        reader.read(0, 0).release()


def test_a_name_may_be_as_long_as_a_file_system_allows(draft: Draft) -> None:
    for name in ("x" * 251 + ".bin", "Experts_1-of-2..x.bin", "console.bin", "com10"):
        (draft.path / draft.body["files"][1]["name"]).rename(draft.path / name)
        draft.rename(1, name)
        draft.save()
        look_up_everything(draft.path)
        assert complaint(draft.path) == ""


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


@pytest.mark.parametrize("entry", BAD_ENTRIES, ids=lambda entry: entry.name)
def test_each_rule_of_the_manifest_is_kept_by_reader_and_verifier(
    entry: Entry, draft: Draft
) -> None:
    change(draft.body, entry)
    draft.save_manifest()
    error = refused(draft.path)
    assert entry.words in str(error)
    assert documented(error)
    assert complaint(draft.path)


def test_the_messages_of_the_manifest_are_those_of_its_rules(draft: Draft) -> None:
    """None is in the document that no rule has; that each is in it, the test above says."""
    path = draft.path / "manifest.json"
    whole = path.read_bytes()
    broken = [whole[:-11] + b'0000000"\n}\n', b"[]", b"{", bytes(manifest.MAX_LENGTH + 1)]
    for entry in BAD_ENTRIES:
        draft.body = json.loads(whole)
        change(draft.body, entry)
        draft.save_manifest()
        broken.append(path.read_bytes())
    draft.body = json.loads(whole)
    draft.body["source"]["shards"] *= 2
    draft.save_manifest()
    seen = set()
    for data in (*broken, path.read_bytes()):
        path.write_bytes(data)
        seen.add(documented(refused(draft.path)))
    assert not set(MESSAGES["manifest"]) - seen


def test_shards_have_different_names(draft: Draft) -> None:
    draft.body["source"]["shards"] *= 2
    draft.save_manifest()
    assert "source.shards: two shards have the same name" in str(refused(draft.path))


def test_a_wrong_digest_of_the_manifest_is_refused(draft: Draft) -> None:
    text = (draft.path / "manifest.json").read_bytes()
    for damaged in (
        text[:-10] + b'0000000"\n}\n',
        text.replace(b'"tool"', b'"t00l": "",\n  "tool"'),
    ):
        (draft.path / "manifest.json").write_bytes(damaged)
        assert "the manifest is damaged: its own digest differs" in str(refused(draft.path))
        assert "its own digest differs" in complaint(draft.path)


def test_keys_that_are_not_known_are_ignored_at_every_depth(draft: Draft) -> None:
    more = {"more": [1, -2.5, {"deep": None}]}
    for holder in (draft.body, draft.body["source"], draft.body["source"]["shards"][0]):
        holder |= more
    for holder in (draft.body["index"], draft.body["files"][1], draft.body["index"]["pages"]):
        holder |= more
    draft.save_manifest()
    look_up_everything(draft.path)
    assert complaint(draft.path) == ""


def test_names_with_a_dot_are_others_and_pass(draft: Draft) -> None:
    """Of sections, keys and families; required sections and codecs are refused by name."""
    name = "org.example.x"
    added(Piece(name.encode(), b"12345", 5, 0))(draft)
    draft.set("family", 1, name=name.encode())
    for holder in (draft.body, draft.body["layout"], draft.body["index"], draft.body["files"][0]):
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


def test_pages_may_be_left_out(draft: Draft) -> None:
    del draft.body["index"]["pages"]
    draft.save_manifest()
    look_up_everything(draft.path)


@pytest.mark.parametrize("number", ["1e999", "-1e999", "9" * 400, "-" + "9" * 400])
def test_a_number_that_not_all_parsers_have_is_refused_anywhere(number: str, draft: Draft) -> None:
    del draft.body["manifest_digest"]
    text = json.dumps(draft.body | {"more": {"number": 5}}, indent=2)
    (draft.path / "manifest.json").write_bytes(sealed(text.replace(": 5", f": {number}")))
    assert "not JSON" in str(refused(draft.path))
    assert "beyond all numbers" in complaint(draft.path)


HUGE = "9" * 100_000
BAD_TEXTS = {
    "empty": b"",
    "zeros": bytes(500),
    "not UTF-8": b'{"format": "\xff"}',
    "a byte order mark": b'\xef\xbb\xbf{"format": "moepack"}',
    "UTF-16": '{"format": "moepack"}'.encode("utf-16"),
    "not closed": b'{"format": "moepack"',
    "a list": b"[]",
    "a number": b"1",
    "text": b'"moepack"',
    "null": b"null",
    "NaN": b'{"format": NaN}',
    "Infinity": b'{"format": -Infinity}',
    "100,000 digits": b'{"format": ' + HUGE.encode() + b"}",
    "deep lists": b"[" * 100_000,
    "deep objects": b'{"a":' * 100_000,
    "deep lists, closed": b'{"format":' + b"[" * 50_000 + b"]" * 50_000 + b"}",
    "a key twice": b'{"format": "moepack", "format": "moepack"}',
    "a key twice inside": b'{"format": {"a": 1, "a": 1}}',
    "a web page": b"<!DOCTYPE html>\n<p>Log in",
    "a line feed in text": b'{"format": "a\nb"}',
}


@pytest.mark.parametrize("name", BAD_TEXTS)
def test_what_is_no_manifest_is_refused(name: str, draft: Draft) -> None:
    (draft.path / "manifest.json").write_bytes(BAD_TEXTS[name])
    error = refused(draft.path)
    assert error.path == str(draft.path / "manifest.json")
    assert complaint(draft.path)


def test_a_key_twice_is_refused_also_where_all_else_is_right(draft: Draft) -> None:
    """Parsers differ in which of the two they take."""
    del draft.body["manifest_digest"]
    text = json.dumps(draft.body, indent=2)
    twice = text.replace('"tool":', '"tool": "t",\n  "tool":', 1)
    assert twice != text
    (draft.path / "manifest.json").write_bytes(sealed(twice))
    assert "twice" in str(refused(draft.path))
    assert "twice" in complaint(draft.path)


def test_a_value_that_no_json_has_does_not_hide_in_provenance(draft: Draft) -> None:
    """1e999 is a number for a parser, and infinity for those who read the report."""
    text = json.dumps(draft.body | {"hotness": {"token_count": 0}}, indent=2)
    text = text.replace('"token_count": 0', '"token_count": 1e999')
    del draft.body["manifest_digest"]
    (draft.path / "manifest.json").write_bytes(sealed(text.replace('"manifest_digest"', '"x"')))
    try:
        with moepack.open(draft.path) as pack:
            json.dumps(to_json(describe_pack(pack)), allow_nan=False)
    except PackError as error:
        assert_tidy(error)


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


def test_long_and_odd_provenance_does_not_flood_the_findings(draft: Draft, tiny: Path) -> None:
    odd = "\n\x1b[2J" * 10_000
    draft.body["source"]["shards"] = [{"name": odd, "length": odd, "header_sha256": odd}]
    draft.save_manifest()
    try:
        findings = verify(draft.path, [str(tiny.parent / "m.gguf")], threads=1).findings
    except PackError as error:
        assert_tidy(error)
        return
    assert findings
    for finding in findings:
        assert str(finding).isprintable()
        assert len(str(finding)) < 1000


@pytest.mark.parametrize("value", ["\n\x1b[2J" * 10_000, [1] * 10_000, {"\x1b": 0}])
def test_what_hotness_states_does_not_flood_the_findings(value: Any, draft: Draft) -> None:
    draft.body["hotness"] = {"blob_count": value}
    draft.save_manifest()
    (finding,) = verify(draft.path, threads=1).findings
    assert finding.message.startswith("hotness.blob_count is ")
    assert str(finding).isprintable()
    assert len(str(finding)) < 1000


def test_counts_of_hotness_that_are_not_known_are_null_or_missing(draft: Draft) -> None:
    for hotness in ({}, {"blob_count": None, "measured_blob_count": None}):
        draft.body["hotness"] = hotness
        draft.save_manifest()
        assert verify(draft.path, threads=1).passed


@pytest.mark.parametrize("step", amounts(3, 1))
@pytest.mark.parametrize("name", ["manifest.json", "index.bin"])
def test_a_flipped_bit_in_any_byte_is_noticed_by_reader_and_verifier(
    name: str, draft: Draft, step: int
) -> None:
    path = draft.path / name
    data = path.read_bytes()
    for at in range(0, len(data), step):
        damaged = bytearray(data)
        damaged[at] ^= 1 << at % 8
        path.write_bytes(damaged)
        refused(draft.path)
        assert at % 5 or complaint(draft.path), at


@pytest.mark.parametrize("step", amounts(3, 1))
@pytest.mark.parametrize("name", ["manifest.json", "index.bin"])
def test_a_file_cut_at_any_byte_is_noticed(name: str, draft: Draft, step: int) -> None:
    path = draft.path / name
    data = path.read_bytes()
    for length in range(0, len(data), step):
        path.write_bytes(data[:length])
        refused(draft.path)
        assert length % 7 or complaint(draft.path), length


@pytest.mark.parametrize("name", ["manifest.json", "index.bin"])
def test_a_folder_in_the_place_of_a_file_is_an_error(name: str, draft: Draft) -> None:
    (draft.path / name).unlink()
    (draft.path / name).mkdir()
    for look in (look_up_everything, verify):
        with pytest.raises((PackError, MachineError)) as caught:
            look(draft.path)
        assert_tidy(caught.value)


# Giants: seconds and 100 MB, in a process of its own.

OPEN = ("import moepack", "moepack.open(path)")
VERIFY_MANIFEST = (
    "from moepack.format import manifest",
    "manifest.decode(open(path, 'rb').read(), path)",
)


def filled(piece: bytes, length: int) -> bytes:
    return piece * (length // len(piece))


BIG_MANIFESTS = {
    "lists": b'{"a":[' + filled(b"[],", manifest.MAX_LENGTH - 20) + b"0]}",
    "objects": b'{"a":[' + filled(b"{},", manifest.MAX_LENGTH - 20) + b"0]}",
    "fractions": b'{"a":[' + filled(b"1.5,", manifest.MAX_LENGTH - 20) + b"0]}",
    "numbers": b'{"a":[' + filled(b"1000,", manifest.MAX_LENGTH - 20) + b"0]}",
    "too long": b" " * (manifest.MAX_LENGTH + 1),
    "a long text": b'{"format":"' + filled(b"a", manifest.MAX_LENGTH - 20) + b'"}',
    "long digits": b'{"format":' + filled(b"9", manifest.MAX_LENGTH - 20) + b"}",
    "spaces": b"{" + filled(b" ", manifest.MAX_LENGTH - 2) + b"}",
    "deep lists": filled(b"[", manifest.MAX_LENGTH),
}


@pytest.mark.parametrize("name", BIG_MANIFESTS)
def test_a_big_manifest_is_refused_within_seconds_and_256_mib(name: str, tmp_path: Path) -> None:
    path = tmp_path / "pack"
    path.mkdir()
    (path / "manifest.json").write_bytes(BIG_MANIFESTS[name])
    assert_cheap(OPEN, path, 256 << 20)


def test_a_sparse_manifest_of_gigabytes_is_refused(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_bytes(b"{")
    os.truncate(tmp_path / "manifest.json", 4 << 30)
    assert "too long" in assert_cheap(OPEN, tmp_path).text


@pytest.mark.parametrize("stated", [True, False], ids=["stated", "not stated"])
def test_a_sparse_index_of_gigabytes_is_refused(stated: bool, draft: Draft) -> None:
    counts = {name: held.record_count for name, held in draft.sections.items()}
    counts |= {"blobs": records.MAX_BLOBS, "ranks": records.MAX_BLOBS, "parts": 1 << 26}
    directory = sections.place(counts)
    if stated:
        draft.set("header", index_length=directory.index_length)
        start = records.Header.LAYOUT.size
        encoded = sections.encode(directory)
        draft.index[start : start + len(encoded)] = encoded
    (draft.path / "index.bin").write_bytes(draft.index)
    os.truncate(draft.path / "index.bin", directory.index_length)
    assert directory.index_length > 2 << 30
    assert_cheap(OPEN, draft.path)


def test_tables_filled_to_their_limits_are_read_or_refused_in_time(draft: Draft) -> None:
    """All files, families and part kinds that the format allows, and a digest that is wrong."""
    kinds, families = records.MAX_PART_KINDS, records.MAX_FAMILIES
    assert kinds * records.PartKindRecord.LAYOUT.size < 64 << 20, "more than a reader can check"
    each = kinds // families
    file, family, kind = draft.get("file"), draft.get("family"), draft.get("part_kind")
    tables: dict[bytes, list[bytes]] = {
        b"files": [
            file._replace(name=f"{number}.bin".encode()).pack()
            for number in range(records.MAX_FILES)
        ],
        b"families": [
            family._replace(
                layer=number,
                expert_count=1,
                parts_per_blob=each,
                first_blob=number,
                first_part_kind=number * each,
                first_part=number * each,
            ).pack()
            for number in range(families)
        ],
        b"part_kinds": [
            kind._replace(name=f"{number % each}.weight".encode()).pack() for number in range(kinds)
        ],
        b"blobs": [bytes(32)] * families,
        b"parts": [bytes(32)] * kinds,
        b"ranks": [bytes(4)] * families,
    }
    draft.rebuild([Piece(name, b"".join(held), len(held[0]), 1) for name, held in tables.items()])
    draft.save()
    assert "files: index and manifest list" in assert_cheap(OPEN, draft.path).text


def test_a_directory_filled_to_its_limits_is_read_in_time(draft: Draft) -> None:
    known = draft.pieces()
    more = [
        Piece(b"news-%d" % number, b"", 1, 0) for number in range(records.MAX_SECTIONS - len(known))
    ]
    draft.rebuild([*known, *more], header_more=bytes(1992), section_more=bytes(200))
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


@pytest.fixture(scope="module")
def scratch(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a pack that examples may change: each writes both of its files."""
    return Path(shutil.copytree(tiny, tmp_path_factory.mktemp("scratch") / "pack"))


def check_index(data: bytes) -> None:
    """Decode an index and look up all records: values in bounds, or PackError."""
    try:
        index = Index(data, "index.bin")
    except PackError as error:
        assert_clear(error, "index.bin")
        return
    for family in index.families[:4]:
        for expert in range(min(family.expert_count, 4)):
            check_records(index, family.first_blob + expert, family.first_part, family.part_kinds)
            check_origins(index, family, expert)
    for rank in range(min(index.blob_count, 8)):
        try:
            assert index.blob_at_rank(rank) < index.blob_count
        except PackError as error:
            assert_clear(error, "index.bin")
    for every in (index.tensors(), index.shard_bytes()):
        check_dense(index, itertools.islice(every, 8))


def check_dense(index: Index, every: Iterable[DenseTensor | ShardBytes]) -> None:
    try:
        for held in every:
            assert held.offset + held.length <= index.files[held.file].length
            assert held.shard < records.MAX_SHARDS
            assert held.shard_offset + held.length <= records.MAX_LENGTH
    except PackError as error:
        assert_clear(error, "index.bin")


def check_records(index: Index, blob: int, first_part: int, kinds: tuple[Any, ...]) -> None:
    try:
        offset, length, _, rank, file = index.blob(blob)
        assert offset + length <= index.files[file].length
        assert rank < index.blob_count
        for number, kind in enumerate(kinds):
            start, stored_length, _, file, _ = index.part(first_part + number, kind)
            assert start + stored_length <= index.files[file].length
    except PackError as error:
        assert_clear(error, "index.bin")


def check_origins(index: Index, family: PackedFamily, expert: int) -> None:
    try:
        for kind in family.part_kinds:
            assert index.origin(family, kind, expert)[0] < records.MAX_SHARDS
    except PackError as error:
        assert_clear(error, "index.bin")


def check_pack(scratch: Path, index: bytes, text: bytes) -> None:
    """Open and verify a pack with this index and manifest: nothing but PackError comes of it."""
    (scratch / "index.bin").write_bytes(index)
    (scratch / "manifest.json").write_bytes(text)
    try:
        look_up_everything(scratch)
    except (PackError, MachineError) as error:
        assert_tidy(error)
    complaint(scratch)


def resealed(index: bytes, tiny: Path) -> tuple[bytes, bytes]:
    """Make the digests of a damaged index right, and its list of files the manifest's."""
    index = index[:-8] + struct.pack("<Q", digest.of(index[:-8]))
    body = json.loads((tiny / "manifest.json").read_bytes())
    del body["manifest_digest"]
    body["index"]["digest"] = digest.to_text(struct.unpack("<Q", index[-8:])[0])
    body["index"]["length"] = len(index)
    del body["index"]["pages"]
    return index, sealed(json.dumps(body, indent=2))


def tiny_index() -> bytes:
    """Return an index like that of the `tiny` pack, without a pack, and with slices."""
    names = (b"gate", b"up", b"down")
    kinds = [
        records.PartKindRecord(
            *(name + b".weight", 0, 2 * (n > 2), 2, 1, 4, 2, 32, b"F32"),
            *((0, 2 * (n - 3), 0, 0) if n > 2 else (0, 0, 512 + 64 * n, 32)),
        ).pack()
        for n, name in enumerate(names * 2)
    ]
    tables: dict[str, list[bytes]] = {
        "files": [records.FileRecord(b"%d.bin" % n, 24576, 0, 0).pack() for n in range(3)],
        "families": [
            records.FamilyRecord(n, 2, 3, n, 2 * n, 3 * n, 6 * n, b"ffn_exps").pack()
            for n in range(2)
        ],
        "part_kinds": kinds,
        "blobs": [records.BLOB.pack(12288 * (n % 2), 12288, n, 3 - n, n // 2) for n in range(4)],
        "parts": [
            records.PART.pack(12288 * (n // 3 % 2) + 4096 * (n % 3), 32, n, n // 6, 0)
            for n in range(12)
        ],
        "ranks": [records.RANK.pack(3 - n) for n in range(4)],
        "slices": [records.SliceRecord(0, 1024 + 32 * n).pack() for n in range(6)],
        "tensors": [
            records.TensorRecord(
                *(b"norm%d" % n, b"F32", 0, 0, 1, 2, 4, 0, 0, 0),
                *(16, 4096 * n, 16, n, 0, 0, 2048 + 32 * n),
            ).pack()
            for n in range(1, 3)
        ],
        "shard_bytes": [records.ShardBytesRecord(0, 2, 0, 512, 0, 7).pack()],
    }
    directory = sections.place({name: len(held) for name, held in tables.items()})
    header = records.Header(
        records.MAGIC, 1, 56, directory.index_length, len(tables), 48, 4096, 4096, 4096
    )
    out = bytearray(directory.index_length)
    start = header.pack() + sections.encode(directory)
    out[: len(start)] = start
    for name, held in tables.items():
        at = directory[name].offset
        out[at : at + sum(map(len, held))] = b"".join(held)
    return bytes(out[:-8]) + struct.pack("<Q", digest.of(bytes(out[:-8])))


INDEX = tiny_index()
INDEXES = (
    mutants(INDEX)
    | mutants(INDEX, 512)  # most of it in the header and the directory
    | st.binary(max_size=300)
    | st.binary().map(lambda tail: INDEX[:512] + tail)
)
MANIFEST = manifest.encode(
    manifest.Manifest(
        tool="t",
        is_whole=False,
        source=SourceEntry(
            architecture="m",
            name=None,
            experts_used={"ffn_exps": 2, "ffn_chexps": [None, 1]},
            context_length=4096,
            mtp_layers=[1],
            shards=(ShardEntry("m.gguf", 5, 4, "0" * 64, "1" * 64),),
        ),
        layout={"name": "layers"},
        hotness=None,
        layers=[0, 1],
        index_entry=manifest.describe_index(INDEX),
        files=(manifest.FileEntry("a.bin", 4096),),
    )
)
BODIES = st.dictionaries(st.sampled_from([*json.loads(MANIFEST), "more"]), _JSON, max_size=4).map(
    lambda changes: json.dumps(json.loads(MANIFEST) | changes).encode()
)
MANIFESTS = mutants(MANIFEST) | BODIES | _JSON.map(lambda v: json.dumps(v).encode()) | st.binary()


def check_manifest(data: bytes) -> None:
    try:
        manifest.decode(data, "m.json")
    except PackError as error:
        assert_clear(error, "m.json")


@QUICK
@given(INDEXES)
def test_any_index_is_decoded_or_refused(data: bytes) -> None:
    check_index(data)


@QUICK
@given(mutants(INDEX))
def test_any_pack_is_opened_and_verified_or_refused(
    tiny: Path, scratch: Path, index: bytes
) -> None:
    check_pack(scratch, *resealed(index, tiny))


@QUICK
@given(MANIFESTS)
@example(b'{"format": "moepack", "format_version": 1, "files": [{"name": "\\ud800"}]}')
def test_any_manifest_is_decoded_or_refused(data: bytes) -> None:
    check_manifest(data)


@pytest.mark.slow
@DEEP
@given(INDEXES, MANIFESTS)
def test_any_of_many_files_is_decoded_or_refused(
    tiny: Path, scratch: Path, index: bytes, text: bytes
) -> None:
    check_index(index)
    check_manifest(text)
    check_pack(scratch, *resealed(index, tiny))
