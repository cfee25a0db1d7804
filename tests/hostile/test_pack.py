"""Hostile packs, layouts and journals: each rule broken alone, giants, damage."""

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import moepack
from moepack import digest, installed
from moepack.errors import MachineError, MoepackError, PackError, RequestError
from moepack.format import manifest, records
from moepack.format.index import Index
from moepack.packing import journal, layout, packer
from moepack.report.inspection import describe_pack
from moepack.report.json_text import json_text, to_json
from moepack.verifying.verifier import verify
from tests.support.broken_packs import (
    BAD_NAMES,
    INDEX_RULES,
    SECTIONS,
    VERIFIERS_RULES,
    Draft,
    Rule,
    sealed,
)
from tests.support.gguf_builder import F32, moe
from tests.support.hostile_input import (
    DEEP,
    QUICK,
    Edit,
    assert_cheap,
    assert_clear,
    edits,
    mutants,
    mutate,
)
from tests.support.models import pack_model


def look_up_everything(path: Path) -> None:
    """Open a pack and locate all that it says it holds."""
    with moepack.open(path) as pack:
        for layer in pack.layers:
            for family in pack.families(layer):
                for expert in range(pack.expert_count(layer, family=family)):
                    pack.locate(layer, expert, family=family)
                    for kind in pack.parts(layer, family=family):
                        pack.locate(layer, expert, kind.name)
        pack.hottest(1 << 62)
        json_text(describe_pack(pack))


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


def assert_tidy(error: MoepackError) -> None:
    """Check what holds for every message about a pack."""
    assert error.path is not None
    assert_clear(error, error.path)


def refused(path: Path) -> PackError:
    with pytest.raises(PackError) as caught:
        look_up_everything(path)
    assert_tidy(caught.value)
    return caught.value


def test_the_tiny_pack_and_an_unchanged_draft_are_sound(tiny: Path, draft: Draft) -> None:
    draft.save()
    assert (draft.path / "index.bin").read_bytes() == (tiny / "index.bin").read_bytes()
    assert (draft.path / "manifest.json").read_bytes() == (tiny / "manifest.json").read_bytes()
    look_up_everything(draft.path)
    assert complaint(draft.path) == ""
    assert draft.header[6:11] == (2, 2, 6, 4, 12)


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
    assert rule.words in str(refused(draft.path))
    assert complaint(draft.path)


@pytest.mark.parametrize("rule", VERIFIERS_RULES, ids=lambda rule: rule.name)
def test_the_verifier_finds_also_what_readers_do_not_need(rule: Rule, draft: Draft) -> None:
    rule.breaks(draft)
    draft.save()
    look_up_everything(draft.path)
    assert rule.words in complaint(draft.path)


def test_features_that_are_optional_are_ignored(draft: Draft) -> None:
    draft.set("header", optional_features=(1 << 64) - 1)
    draft.save()
    look_up_everything(draft.path)
    assert complaint(draft.path) == ""


def test_a_name_may_be_as_long_as_a_file_system_allows(draft: Draft) -> None:
    for name in ("x" * 251 + ".bin", "Experts_1-of-2..x.bin"):
        (draft.path / draft.body["files"][1]["name"]).rename(draft.path / name)
        draft.rename(1, name)
        draft.save()
        look_up_everything(draft.path)
        assert complaint(draft.path) == ""


@pytest.mark.parametrize("claimed", [1 << 40, (1 << 63) - 4096])
def test_a_blob_that_claims_terabytes_is_not_allocated(claimed: int, draft: Draft) -> None:
    draft.set("file", 0, length=claimed)
    draft.body["files"][0]["length"] = claimed
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

MISSING = object()


class Entry(NamedTuple):
    """A value in the manifest that breaks a rule, and what the error must hold."""

    name: str
    path: tuple[Any, ...]
    value: Any
    words: str


KEYS = ("tool", "source", "layout", "index", "files")
BAD_ENTRIES = [
    Entry("another format", ("format",), "gguf", "format: not a moepack manifest"),
    Entry("no format", ("format",), MISSING, "format: not a moepack manifest"),
    Entry("a format of two lines", ("format",), "a\nb", "format: not a moepack manifest"),
    Entry("version 2", ("format_version",), 2, "format_version: unknown format version"),
    Entry("version 1.0", ("format_version",), 1.0, "format_version: unknown format version"),
    Entry("version true", ("format_version",), True, "format_version: unknown format version"),
    Entry("version of two lines", ("format_version",), "1\n2", "format_version: unknown"),
    *(Entry(f"no {key}", (key,), MISSING, f"{key}: wrong kind") for key in KEYS),
    *(Entry(f"{key} as a number", (key,), 5, f"{key}: wrong kind") for key in KEYS),
    *(Entry(f"{key} as null", (key,), None, f"{key}: wrong kind") for key in KEYS),
    Entry("hotness as a list", ("hotness",), [1], "hotness: wrong kind"),
    Entry("layers as text", ("layers",), "0-3", "layers: wrong kind"),
    Entry("layers as a number", ("layers",), 5, "layers: wrong kind"),
    Entry("layers as an object", ("layers",), {}, "layers: wrong kind"),
    Entry("layers as texts", ("layers",), ["0"], "layers: wrong kind"),
    Entry("layers as booleans", ("layers",), [True], "layers: wrong kind"),
    Entry("long layers", ("layers",), ["x" * 5000], "layers: wrong kind"),
    Entry("a file as text", ("files", 0), "experts-00000.bin", "files[0]: wrong kind"),
    Entry("a file without a name", ("files", 0, "name"), MISSING, "name: wrong kind"),
    Entry("a file without a length", ("files", 0, "length"), MISSING, "length: wrong kind"),
    Entry("a file without a digest", ("files", 0, "digest"), MISSING, "digest: wrong kind"),
    *(
        Entry(f"a file name {what}", ("files", 1, "name"), name, "files[1]: not a plain file name")
        for what, name in BAD_NAMES.items()
    ),
    Entry("a file without letters", ("files", 1, "name"), "", "files[1]: not a plain file name"),
    Entry("NUL in a name", ("files", 1, "name"), "a\0b", "files[1]: not a plain file name"),
    Entry("a surrogate", ("files", 1, "name"), "\ud800", "files[1]: not a plain file name"),
    Entry("256 letters", ("files", 1, "name"), "x" * 256, "files[1]: not a plain file name"),
    Entry("a negative length", ("files", 0, "length"), -1, "files[0]: length out of bounds"),
    Entry("a length of 2^63", ("files", 0, "length"), 1 << 63, "files[0]: length out of bounds"),
    Entry("a length of 4000 digits", ("files", 0, "length"), 10**4000, "files[0]: length out of"),
    Entry("a length of 12288.0", ("files", 0, "length"), 12288.0, "length: wrong kind"),
    Entry("a length of true", ("files", 0, "length"), True, "length: wrong kind"),
    Entry("a digest in capitals", ("files", 0, "digest"), "xxh3:" + "A" * 16, "not a digest"),
    Entry("a digest too short", ("files", 0, "digest"), "xxh3:00", "not a digest"),
    Entry("a digest with more", ("files", 0, "digest"), "xxh3:" + "0" * 16 + "\n", "not a digest"),
    Entry("another kind of digest", ("files", 0, "digest"), "sha256:00", "not a digest"),
    Entry("an index by another name", ("index", "name"), "other.bin", "index"),
    Entry("an index upwards", ("index", "name"), "../index.bin", "index: "),
    Entry("an index of another length", ("index", "length"), 1, "index"),
    Entry("an index of another digest", ("index", "digest"), "xxh3:" + "0" * 16, "index"),
    Entry("a file that is missing", ("files", 1), MISSING, "files"),
    Entry("another file length", ("files", 1, "length"), 4096, "files"),
    Entry("another file name", ("files", 1, "name"), "other.bin", "files"),
]


@pytest.mark.parametrize("entry", BAD_ENTRIES, ids=lambda entry: entry.name)
def test_each_rule_of_the_manifest_is_kept_by_reader_and_verifier(
    entry: Entry, draft: Draft
) -> None:
    *parents, last = entry.path
    holder: Any = draft.body
    for key in parents:
        holder = holder[key]
    assert holder[last] != entry.value or type(holder[last]) is not type(entry.value)
    holder[last] = entry.value
    if entry.value is MISSING:
        del holder[last]
    draft.save_manifest()
    assert entry.words in str(refused(draft.path))
    assert complaint(draft.path)


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


@pytest.mark.parametrize("name", ["manifest.json", "index.bin"])
def test_a_flipped_bit_in_any_byte_is_noticed_by_reader_and_verifier(
    name: str, draft: Draft
) -> None:
    path = draft.path / name
    data = path.read_bytes()
    for at in range(len(data)):
        damaged = bytearray(data)
        damaged[at] ^= 1 << at % 8
        path.write_bytes(damaged)
        refused(draft.path)
        assert at % 5 or complaint(draft.path), at


@pytest.mark.parametrize("name", ["manifest.json", "index.bin"])
def test_a_file_cut_at_any_byte_is_noticed(name: str, draft: Draft) -> None:
    path = draft.path / name
    data = path.read_bytes()
    for length in range(len(data)):
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


# Layouts.

SHIPPED = {
    name: (installed.folder("layouts") / f"{name}.toml").read_bytes() for name in layout.names()
}


def edited(old: str, new: str, *, name: str = "layers") -> bytes:
    """Return a shipped layout with one text replaced."""
    text = SHIPPED[name].decode()
    assert old in text
    return text.replace(old, new, 1).encode()


def named(name: str) -> bytes:
    return edited('"experts-{layer:05}.bin"', json.dumps(name))


def sized(length: str) -> bytes:
    return edited('"4 GiB"', length, name="hot-first")


def aligned(length: str) -> bytes:
    return edited('alignment = "4 KiB"', f"alignment = {length}")


PROJECTIONS = '["gate_up", "gate", "up", "down", "attn_v"]'
BAD_LAYOUTS: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "files: missing"),
    "not TOML": (b"<html>", "not TOML"),
    "not UTF-8": (b'description = "\xff"', "not TOML"),
    "NUL": (b"\0" * 100, "not TOML"),
    "too long": (b"#" * (layout.MAX_FILE_LENGTH + 1), "too long"),
    "deep lists": (b"a = " + b"[" * 5000, "not TOML"),
    "deep tables": (b"a = " + b"{a=" * 2000, "not TOML"),
    "a huge number": (b"a = " + b"9" * 5000, "not TOML"),
    "a key twice": (edited("[files]", "[files]\n[files]"), "not TOML"),
    "an unknown key": (b"extra = 1\n" + SHIPPED["layers"], "extra: unknown key"),
    "an unknown key of two lines": (b'"a\\nb" = 1\n' + SHIPPED["layers"], "unknown key"),
    "an unknown key inside": (edited("[blobs]", "[blobs]\nextra = 1"), "blobs.extra': unknown key"),
    "no description": (edited("description", "# description"), "description: missing"),
    "a description of two lines": (edited("one file a layer, h", "\\nh"), "description: missing"),
    "a long description": (edited("one file a layer, h", "h" * 300), "description: missing"),
    "no files": (edited("[files]", "[other]"), ""),
    "files as a number": (b"files = 1", "files: missing, or not a table"),
    "an unknown group": (edited('"layer"', '"expert"'), "files.group: unknown value"),
    "a group of a list": (edited('"layer"', '["layer"]'), "files.group: missing"),
    "an unknown order": (edited('"hotness"', '"heat"'), "blobs.order: unknown value"),
    "no order": (edited("order =", "# order ="), "blobs.order: missing"),
    "a class in the name": (named("{layer.__class__}.bin"), "files.name: wrong placeholders"),
    "an item in the name": (named("{layer[0]}.bin"), "files.name: wrong placeholders"),
    "a conversion in the name": (named("{layer!r}.bin"), "files.name: wrong placeholders"),
    "a position in the name": (named("{}.bin"), "files.name: wrong placeholders"),
    "a wide number in the name": (named("{layer:099999999}.bin"), "files.name: wrong placeholders"),
    "a format in the name": (named("{layer:>9}.bin"), "files.name: wrong placeholders"),
    "a brace in the name": (named("{{layer}}.bin"), "files.name: wrong placeholders"),
    "an open brace in the name": (named("{layer}{.bin"), "files.name: wrong placeholders"),
    "no number in the name": (named("experts.bin"), "files.name: wrong placeholders"),
    "two numbers in the name": (named("{layer}-{layer}.bin"), "files.name: wrong placeholders"),
    "the other number": (named("{number}.bin"), "files.name: wrong placeholders"),
    "a name upwards": (named("../{layer}.bin"), "files.name: not a plain file name"),
    "an absolute name": (named("/tmp/{layer}.bin"), "files.name: not a plain file name"),
    "a name with NUL": (named("a\0{layer}.bin"), "files.name: missing"),
    "a name of two lines": (named("a\n{layer}.bin"), "files.name: missing"),
    "a long name": (named("x" * 120 + "{layer}.bin"), "files.name: not a plain file name"),
    "another ending": (named("{layer}.json"), "files.name: not a plain file name"),
    "a length by layer": (
        edited("[blobs]", "max_length = 1\n[blobs]"),
        "files.max_length: belongs",
    ),
    "no length by size": (
        edited("max_length", "# max", name="hot-first"),
        "files.max_length: belongs",
    ),
    "a length of 0": (sized("0"), "files.max_length: out of bounds"),
    "a negative length": (sized("-1"), "files.max_length: out of bounds"),
    "a length of 2^63": (sized(str(1 << 63)), "files.max_length: out of bounds"),
    "a length of 2^9999": (sized(hex(1 << 9999)), "files.max_length: out of bounds"),
    "a length in TiB": (sized('"999999999999999999 TiB"'), "files.max_length: out of bounds"),
    "a length of 19 digits": (sized('"1000000000000000000"'), "files.max_length: not a length"),
    "a length of NaN": (sized("nan"), "files.max_length: missing"),
    "a length of 1.5": (sized("1.5"), "files.max_length: missing"),
    "a length of true": (sized("true"), "files.max_length: missing"),
    "a length of words": (sized('"four"'), "files.max_length: not a length"),
    "alignment 0": (aligned("0"), "blobs.alignment: not an alignment"),
    "alignment 3": (aligned("3"), "blobs.alignment: not an alignment"),
    "alignment -4096": (aligned("-4096"), "blobs.alignment: not an alignment"),
    "alignment 2^31": (aligned('"2 GiB"'), "blobs.alignment: not an alignment"),
    "alignment 2^9999": (aligned(hex(1 << 9999)), "blobs.alignment: not an alignment"),
    "alignment -2^9999": (aligned("-" + "9" * 4000), "blobs.alignment: not an alignment"),
    "blobs below parts": (aligned('"1 KiB"'), "parts.alignment: larger than the blob's"),
    "small above parts": (edited("= 64", "= 8192"), "parts.small_alignment: larger than"),
    "no projections": (edited(PROJECTIONS, "[]"), "parts.projections: not an order"),
    "a projection twice": (edited('"gate_up"', '"gate"'), "parts.projections: not an order"),
    "a projection as a number": (edited('"gate_up"', "1"), "parts.projections: not an order"),
    "projections as text": (edited(PROJECTIONS, '"gate"'), "parts.projections: not an order"),
    "projections as lists": (edited('"gate_up"', '["gate_up"]'), "parts.projections: not an order"),
}


@pytest.mark.parametrize("name", BAD_LAYOUTS)
def test_each_rule_of_a_layout_has_an_error(name: str, tmp_path: Path) -> None:
    data, words = BAD_LAYOUTS[name]
    path = tmp_path / "bad.toml"
    path.write_bytes(data)
    with pytest.raises(RequestError) as caught:
        layout.load(str(path))
    assert_clear(caught.value, path)
    assert words.replace("'", "") in str(caught.value).replace("'", "")


@pytest.mark.parametrize(
    "name", ["../layers", "none", "\0", "x" * 5000, "/etc/passwd", "/dev/null"]
)
def test_the_name_of_a_layout_is_looked_up_and_never_a_path(name: str) -> None:
    with pytest.raises(RequestError) as caught:
        layout.load(name)
    assert len(str(caught.value)) < 500 + len(name)


# Giants: seconds and 100 MB, in a process of its own.

OPEN = ("import moepack", "moepack.open(path)")
VERIFY_MANIFEST = (
    "from moepack.format import manifest",
    "manifest.decode(open(path, 'rb').read(), path)",
)
LAYOUT = ("from moepack.packing import layout", "layout.load(path)")


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
def test_a_big_manifest_is_refused_within_a_second_and_100_mb(name: str, tmp_path: Path) -> None:
    path = tmp_path / "pack"
    path.mkdir()
    (path / "manifest.json").write_bytes(BIG_MANIFESTS[name])
    assert_cheap(OPEN, path)


def test_a_sparse_manifest_of_gigabytes_is_refused(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_bytes(b"{")
    os.truncate(tmp_path / "manifest.json", 4 << 30)
    assert "too long" in assert_cheap(OPEN, tmp_path).text


@pytest.mark.parametrize("stated", [True, False], ids=["stated", "not stated"])
def test_a_sparse_index_of_gigabytes_is_refused(stated: bool, draft: Draft) -> None:
    counts = {"blob_count": records.MAX_BLOBS, "part_count": 1 << 26}
    held = {name: getattr(draft.header, name) for name in draft.header._fields[6:11]} | counts
    *offsets, length = records.section_offsets(*held.values())
    places = dict(zip((f"{name}_offset" for name in SECTIONS), offsets, strict=True))
    if stated:
        draft.set("header", index_length=length, **counts, **places)
    (draft.path / "index.bin").write_bytes(draft.index)
    os.truncate(draft.path / "index.bin", length)
    assert length > 2 << 30
    assert_cheap(OPEN, draft.path)


def test_tables_filled_to_their_limits_are_read_or_refused_in_time(draft: Draft) -> None:
    """All files, families and part kinds that the format allows, and a digest that is wrong."""
    kinds = getattr(records, "MAX_PART_KINDS", records.MAX_FAMILIES * records.MAX_PARTS_IN_BLOB)
    assert kinds * records.PartKindRecord.LAYOUT.size < 64 << 20, "more than a reader can check"
    families = records.MAX_FAMILIES
    each = kinds // families
    counts = (records.MAX_FILES, families, kinds, families, kinds)
    *offsets, length = records.section_offsets(*counts)
    index = bytearray(length)
    fields: dict[str, Any] = dict(
        zip(records.Header._fields[6:17], (*counts, *offsets), strict=True)
    )
    records.Header.LAYOUT.pack_into(index, 0, *draft.header._replace(index_length=length, **fields))
    file, family, kind = draft.get("file"), draft.get("family"), draft.get("part_kind")
    for number in range(records.MAX_FILES):
        record = file._replace(name=f"{number}.bin".encode())
        records.FileRecord.LAYOUT.pack_into(index, offsets[0] + number * 288, *record)
    for number in range(families):
        record = family._replace(
            layer=number, expert_count=1, parts_per_blob=each, first_blob=number,
            first_part_kind=number * each, first_part=number * each,
        )  # fmt: skip
        records.FamilyRecord.LAYOUT.pack_into(index, offsets[1] + number * 64, *record)
    for number in range(kinds):
        record = kind._replace(name=f"{number % each}.weight".encode())
        records.PartKindRecord.LAYOUT.pack_into(index, offsets[2] + number * 128, *record)
    draft.index = index
    draft.save()
    assert "files" in assert_cheap(OPEN, draft.path).text


LIMIT = layout.MAX_FILE_LENGTH
BIG_LAYOUTS = {
    "dotted keys": b"a" + filled(b".a", LIMIT - 5) + b"=1",
    "dotted tables": filled(b"[a" + b".a" * 500 + b"]\n", LIMIT),
    "tables": b"".join(b"[t%d]\n" % n for n in range(6000)),
    "lists of tables": filled(b"[[a]]\n", LIMIT),
    "lists": b"a=[" + filled(b"[],", LIMIT - 10) + b"]",
    "inline tables": b"a=[" + filled(b"{a=1},", LIMIT - 10) + b"]",
    "escapes": b'a="' + filled(b"\\u0041", LIMIT - 10) + b'"',
    "quotes": b'a="""' + filled(b'""x', LIMIT - 10),
    "dates": b"a=[" + filled(b"1979-05-27T07:32:00Z,", LIMIT - 30) + b"]",
    "a long key": b'"' + filled(b"k", LIMIT - 10) + b'"=1',
    "digits": b"a=" + filled(b"9", LIMIT - 10),
    "digits with underscores": b"a=1" + filled(b"_1", LIMIT - 10),
    "hexadecimal": b"a=0x" + filled(b"f", LIMIT - 10),
}


@pytest.mark.parametrize("name", BIG_LAYOUTS)
def test_a_big_layout_is_refused_within_a_second_and_100_mb(name: str, tmp_path: Path) -> None:
    path = tmp_path / "big.toml"
    path.write_bytes(BIG_LAYOUTS[name])
    assert_cheap(LAYOUT, path)


# The journal: it may have been cut off, or changed by who knows whom.


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Leave a pack that failed just before its index was written; read-only."""
    folder = tmp_path_factory.mktemp("interrupted")
    model = moe((0, 1), 2, ne=(4, 2), type_id=F32, block=(1, 4)).write(folder / "m.gguf")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packer, "write_synced", _fail)
        with pytest.raises(MachineError):
            pack_model([model], folder / "pack")
    assert (folder / "pack" / "pack.journal").read_bytes().count(b"\n") == 3
    return folder


def _fail(path: Path, data: bytes) -> None:
    raise OSError(28, "no space left on device")


def resume(interrupted: Path, target: Path, data: bytes) -> bool:
    """Go on with a journal; say whether a pack came of it, which then is as it should be."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(interrupted / "pack", target)
    (target / "pack.journal").write_bytes(data)
    model = interrupted / "m.gguf"
    try:
        pack_model([model], target, resume=True)
    except MoepackError as error:
        assert_tidy(error)
        assert not (target / "manifest.json").exists()
        return False
    assert verify(target, [str(model)], threads=1).passed
    return True


def journal_of(interrupted: Path) -> bytes:
    return (interrupted / "pack" / "pack.journal").read_bytes()


def places(data: bytes) -> list[int]:
    """Return some places in a journal, with those around the ends of its lines."""
    ends = [at for at, byte in enumerate(data) if byte == 10]
    around = {end + more for end in ends for more in (-1, 0, 1)} & set(range(len(data)))
    return sorted(around | set(range(0, len(data), 29)))


def test_a_journal_that_is_whole_is_gone_on_with(interrupted: Path, tmp_path: Path) -> None:
    assert resume(interrupted, tmp_path / "pack", journal_of(interrupted))


def test_a_journal_cut_at_any_place_gives_a_whole_pack(interrupted: Path, tmp_path: Path) -> None:
    data = journal_of(interrupted)
    for length in places(data):
        assert resume(interrupted, tmp_path / "pack", data[:length])


def test_a_flipped_bit_in_a_journal_never_gives_a_wrong_pack(
    interrupted: Path, tmp_path: Path
) -> None:
    data = journal_of(interrupted)
    for at in places(data):
        damaged = bytearray(data)
        damaged[at] ^= 1 << at % 7
        resume(interrupted, tmp_path / "pack", bytes(damaged))


@pytest.mark.parametrize(
    "change",
    [
        lambda line: line | {"parts": ""},
        lambda line: line | {"parts": line["parts"][:16]},
        lambda line: line | {"parts": line["parts"] * 2},
        lambda line: line | {"parts": line["parts"][:-2]},
        lambda line: line | {"parts": 5},
        lambda line: line | {"parts": "zz" * 48},
        lambda line: line | {"digest": "xxh3:0"},
        lambda line: line | {"digest": 5},
        lambda line: line | {"name": "../../x"},
        lambda line: line | {"name": ["x"] * 3},
        lambda line: line | {"name": 10**4000},
        lambda line: {},
    ],
)
def test_a_line_of_the_journal_that_makes_no_sense_is_not_trusted(
    change: Callable[[dict[str, Any]], Any], interrupted: Path, tmp_path: Path
) -> None:
    """The lines are written by the journal itself: well formed, whatever they say."""
    lines = journal_of(interrupted).decode().splitlines()
    first, second, third = (json.JSONDecoder().raw_decode(line)[0] for line in lines)
    held = journal.open_journal(tmp_path / "pack.journal")
    for line in (first, change(second), third):
        held._append(line)
    held.close()
    resume(interrupted, tmp_path / "pack", (tmp_path / "pack.journal").read_bytes())


def test_a_journal_of_gigabytes_costs_nothing(tmp_path: Path) -> None:
    path = tmp_path / "pack.journal"
    for start in (b"", b"{}\n", b"[" * 1000):
        path.write_bytes(start)
        os.truncate(path, 4 << 30)
        call = ("from moepack.packing import journal; from pathlib import Path", _RESUME)
        assert_cheap(call, path)


_RESUME = """
held = journal.open_journal(Path(path))
held.resume({"a": 1})
raise MoepackError("begun anew", path=path)
"""


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
    for rank in range(min(index.blob_count, 8)):
        try:
            assert index.blob_at_rank(rank) < index.blob_count
        except PackError as error:
            assert_clear(error, "index.bin")


def check_records(index: Index, blob: int, first_part: int, kinds: tuple[Any, ...]) -> None:
    try:
        offset, length, _, rank, file = index.blob(blob)
        assert offset + length <= index.files[file].length
        assert rank < index.blob_count
        for number, kind in enumerate(kinds):
            start, stored_length, _, file, _, _ = index.part(first_part + number, kind)
            assert start + stored_length <= index.files[file].length
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
    return index, sealed(json.dumps(body, indent=2))


def tiny_index() -> bytes:
    """Return an index like that of the `tiny` pack, without a pack."""
    files = [records.FileRecord(b"%d.bin" % n, 24576, 0, 0, b"").pack() for n in range(2)]
    kinds = [
        records.PartKindRecord(name + b".weight", 0, 0, 2, 1, 4, 2, 32, b"F32").pack()
        for name in (b"gate", b"up", b"down")
    ]
    families = [
        records.FamilyRecord(n, 2, 3, n, 2 * n, 3 * n, 6 * n, b"ffn_exps").pack() for n in range(2)
    ]
    blobs = [records.BLOB.pack(12288 * (n % 2), 12288, n, 3 - n, n // 2) for n in range(4)]
    parts = [
        records.PART.pack(12288 * (n // 3 % 2) + 4096 * (n % 3), 32, n, n // 6, 0, 0)
        for n in range(12)
    ]
    ranks = [records.RANK.pack(3 - n) for n in range(4)]
    counts = (2, 2, 6, 4, 12)
    *offsets, length = records.section_offsets(*counts)
    fields = (records.MAGIC, 1, 128, 0, 0, length, *counts, *offsets, 4096, 4096, 0)
    head = records.Header.LAYOUT.pack(*fields)
    out = bytearray(length)
    tables = (files, families, kinds * 2, blobs, parts, ranks)
    for offset, chunks in zip((0, *offsets), ([head], *tables), strict=True):
        out[offset : offset + sum(map(len, chunks))] = b"".join(chunks)
    return bytes(out[:-8]) + struct.pack("<Q", digest.of(bytes(out[:-8])))


INDEX = tiny_index()
INDEXES = (
    mutants(INDEX) | st.binary(max_size=300) | st.binary().map(lambda tail: INDEX[:128] + tail)
)
MANIFEST = manifest.encode(
    tool="t",
    source={"shards": [{"name": "m.gguf", "length": 5}], "architecture": "m", "name": None},
    layout={"name": "layers"},
    hotness=None,
    layers=[0, 1],
    index_file=manifest.FileEntry("index.bin", len(INDEX), 1),
    files=(manifest.FileEntry("a.bin", 4096, 2),),
)
BODIES = st.dictionaries(st.sampled_from([*json.loads(MANIFEST), "more"]), _JSON, max_size=4).map(
    lambda changes: json.dumps(json.loads(MANIFEST) | changes).encode()
)
MANIFESTS = mutants(MANIFEST) | BODIES | _JSON.map(lambda v: json.dumps(v).encode()) | st.binary()
LAYOUTS = st.one_of(*(mutants(data) for data in SHIPPED.values())) | st.binary(max_size=100)


def check_manifest(data: bytes) -> None:
    try:
        manifest.decode(data, "m.json")
    except PackError as error:
        assert_clear(error, "m.json")


def check_layout(data: bytes) -> None:
    try:
        found = layout.decode(data, "l.toml", "l")
    except RequestError as error:
        assert_clear(error, "l.toml")
        return
    assert found.small_alignment <= found.part_alignment <= found.blob_alignment <= 1 << 30
    names = {found.file_named(number) for number in (0, 1, 9, 10, 99999)}
    assert len(names) == 5
    assert not any("/" in name or name in ("index.bin", "manifest.json") for name in names)
    json.dumps(found.to_json())


def check_journal(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    held = journal.open_journal(path)
    try:
        held.resume({"tool": packer.TOOL})
    except RequestError as error:
        assert_clear(error, path)
    finally:
        held.close()


JOURNAL_EDITS = edits(1000)


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


@QUICK
@given(LAYOUTS)
def test_any_layout_is_decoded_or_refused(data: bytes) -> None:
    check_layout(data)


@settings(QUICK, max_examples=100)
@given(JOURNAL_EDITS)
def test_any_journal_is_taken_up_or_refused(
    scratch: Path, interrupted: Path, damage: list[Edit]
) -> None:
    check_journal(scratch.parent / "pack.journal", mutate(journal_of(interrupted), damage))


@pytest.mark.slow
@DEEP
@given(INDEXES, MANIFESTS, LAYOUTS)
def test_any_of_many_files_is_decoded_or_refused(
    tiny: Path, scratch: Path, index: bytes, text: bytes, profile: bytes, hot: bytes
) -> None:
    check_index(index)
    check_manifest(text)
    check_layout(profile)
    check_pack(scratch, *resealed(index, tiny))
