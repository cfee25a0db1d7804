"""The C reader keeps each rule of the index, and no rule that is none."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.broken_packs import INDEX_RULES, VERIFIERS_RULES
from tests.support.c_readers import Case, c_says, drafts, python_says
from tests.support.pack_draft import (
    Change,
    Draft,
    Piece,
    Rule,
    added,
    all_of,
    moved,
    own_tensors,
    record,
    renamed,
    section,
    without_blobs,
)


def kind(number: int, /, **fields: Any) -> Change:
    return record("part_kind", number, **fields)


def tensor(**fields: Any) -> Change:
    return record("tensor", 1, **fields)


def named_files(first: str, second: str) -> Callable[[Draft], None]:
    return all_of(record("file", 0, name=first.encode()), renamed(second))


def large_alignment(draft: Draft) -> None:
    draft.set("header", 0, blob_alignment=1 << 30)
    for number in range(2):
        longest_file(draft, number, 1 << 31)
    for number in range(4):
        draft.set("blob", number, offset=number % 2 << 30, length=1 << 30)
        for part in range(3 * number, 3 * number + 3):
            draft.set("part", part, offset=(number % 2 << 30) + 32 * part)


def longest_file(draft: Draft, number: int = 0, length: int = (1 << 63) - 1) -> None:
    draft.resize(number, length)


def as_long_as_its_blob(draft: Draft) -> None:
    draft.set("part_kind", 0, length=12288)
    for part in (0, 3):
        draft.set("part", part, stored_length=12288)


def at_the_end(past: int) -> Callable[[Draft], None]:
    """Move a part to the end of its blob, or a little past it."""

    def change(draft: Draft) -> None:
        blob = draft.get("blob", 1)
        assert blob.offset == 0, "there is another blob behind it"
        draft.set("part", 3, offset=blob.length - 32 + past)

    return change


def blob_to_the_end(past: int) -> Callable[[Draft], None]:
    def change(draft: Draft) -> None:
        blob = draft.get("blob", 0)
        length = draft.get("file", 0).length - blob.offset + past
        draft.set("blob", 0, rank=0, length=length)

    return change


def second_family(draft: Draft, name: bytes) -> None:
    """Put both families into one layer; each part keeps a name of its own."""
    draft.set("family", 1, layer=0, name=name)
    for number in range(3, 6):
        draft.set("part_kind", number, name=b"%d.weight" % number)


def other_names(draft: Draft) -> None:
    for number, name in enumerate(("a" * 255, "con-.bin", "com10")):
        (draft.path / draft.body["files"][number]["name"]).rename(draft.path / name)
        draft.rename(number, name)


# Named by the words of the C reader: one check each, where a later one would refuse these as well.
MORE_RULES = [
    Case("the index's name in capitals", renamed("INDEX.bin"), "no data file's"),
    Case("the name of a manifest to be", renamed("manifest.json.tmp"), "no data file's"),
    *(Case(f"a name with {c} first", renamed(f"{c}x.bin"), "no data file's") for c in ".-_"),
    *(Case(f"a name with {c!r}", renamed(f"x{c}.bin"), f"0x{ord(c):02x}") for c in "/@:[`{,\x7f"),
    *(
        Case(f"a device, {name}", renamed(name), "no data file's")
        for name in ("CON", "prn.x.y", "aUx", "nul.", "com9.bin", "lpt0", "lpt9..")
    ),
    Case("a family of 32 bytes", record("family", 0, name=b"n" * 32), "family 0: name"),
    Case("more behind a family", record("family", 0, name=b"a\0b"), "family 0: name"),
    Case(
        "more at the end of a family", record("family", 0, name=b"a" + bytes(30) + b"b"), "byte 31"
    ),
    Case("more behind a part", kind(0, name=b"a\0b"), "family 0: part 0: name"),
    Case("more behind a type", kind(0, type_name=b"F\0" + b"3"), "part 0: type_name"),
    Case("a type of 24 bytes", kind(0, type_name=b"F" * 24), "part 0: type_name"),
    Case("two dimensions, one axis", kind(1, ne1=0), "no shape"),
    Case("two dimensions, no elements", kind(1, ne0=0), "no shape"),
    Case("one dimension of 2^63", kind(1, dimension_count=1, ne0=1 << 63, ne1=0), "no shape"),
    Case("a product of 2^63", kind(1, ne0=1 << 31, ne1=1 << 32), "no shape"),
    Case("a part one byte past its blob", at_the_end(1), "not inside the blob"),
    Case(
        "a part longer than its blob",
        all_of(
            kind(0, length=12289),
            record("blob", 0, offset=0),
            record("part", 0, offset=0, stored_length=12289),
        ),
        "12289 bytes at 0 of file 0 are not inside the blob",
    ),
    Case("a blob one step past its file", blob_to_the_end(4096), "not inside experts-00000.bin"),
    Case("a kind of no bytes", kind(0, length=0), "part 0: length"),
    Case("a kind of 2^63 bytes", kind(0, length=1 << 63), "part 0: length"),
    Case("65 parts a blob", record("family", 1, parts_per_blob=65), "expected 1 to 64"),
    Case("a blob off its alignment", moved("blob", 1, offset=512), "blob 1: offset"),
    Case("no length, but a place", record("blob", 1, length=0, file=1), "blob 1: no length"),
    Case("a blob of odd bytes", moved("blob", 1, length=-1), "blob 1: length"),
    Case("names that differ in case", named_files("AZ.bin", "az.bin"), "files: two are named"),
    Case("the same, reversed", named_files("az.bin", "AZ.bin"), "files: two are named"),
    Case("a section of odd records", section("blobs", record_length=36), "blobs: record_length"),
    # Counts and lengths that are allowed, so that a later rule refuses.
    Case("65,536 experts", record("family", 0, expert_count=65536), "family 1: first_blob"),
    Case("64 parts", record("family", 1, parts_per_blob=64), "no more than there are part kinds"),
    Case("2^63 - 1 bytes", kind(0, length=(1 << 63) - 1), "stored_length"),
    Case("a blob in the file behind the last", record("blob", 0, file=3), "file: expected less"),
    *(
        Case(f"a tensor called {name!r}", tensor(name=name), "tensor 1: name")
        for name in (
            *(b"a\x80", b"\xc3", b"\xc3a", b"\xe2\x82", b"\xf0\x9f\x98", b"\xc0\x80", b"\xc1\xbf"),
            *(b"\xe0\x9f\xbf", b"\xf0\x8f\xbf\xbf", b"\xf4\x90\x80\x80", b"\xf8\x88\x80\x80\x80"),
            *(b"\xed\xa0\x80", b"\xed\xbf\xbf", b"\xfe", b"x" * 62 + b"\xc3"),
        )
    ),
    *(
        Case(f"a tensor: {what}", tensor(**fields), "no shape")
        for what, fields in {
            "no dimension": {"dimension_count": 0},
            "an axis behind the last": {"ne3": 1},
            "a product of 2^63": {"dimension_count": 4, "ne1": 1 << 30, "ne3": 1 << 31},
        }.items()
    ),
    Case("a tensor one byte past", tensor(offset=20480, length=1, stored_length=1), "not inside"),
    Case("a tensor from 2^63 - 15", tensor(shard_offset=(1 << 63) - 15), "shard_offset"),
    Case("slices to 2^63", kind(0, shard_offset=(1 << 63) - 64), "its slices"),
    Case("a part a byte past its file", record("part", 7, offset=24576 - 31), "not inside"),
    *(
        Case(f"records of {name} of {length}", section(name, record_length=length), "record_length")
        for name, length in (
            *(("files", 0), ("files", 65537), ("ranks", 2), ("ranks", 6), ("blobs", 36)),
            *(("tensors", 176), ("shard_bytes", 32), ("part_kinds", 148)),
        )
    ),
    *(
        Case(
            f"{count} records of {length} bytes that nobody knows",
            section("shard_bytes", name=b"x", record_count=count, record_length=length),
            "end behind the index",
        )
        for count, length in (((1 << 64) - 1, 1), (1 << 62, 4), (1 << 60, 16), (99, 1))
    ),
    Case("no slices for tensors of their own", own_tensors(0), "slices"),
    Case("the last layer first", record("family", 0, layer=7), "families: layer 1 stands behind"),
    Case(
        "two families of a layer, one name",
        record("family", 1, layer=0),
        "families: layer 0 has two named ffn_exps",
    ),
]
ALLOWED = [
    Case("a part at the end of its blob", at_the_end(0)),
    Case("a part as long as its blob", as_long_as_its_blob),
    Case("a blob up to the end of its file", blob_to_the_end(0)),
    Case("a blob as long as its file", record("blob", 1, length=24576)),
    Case("a file of 2^63 - 1 bytes", longest_file),
    Case("the largest alignment", large_alignment),
    Case("tensors aligned to nothing", record("header", 0, tensor_alignment=1)),
    Case("a shape of one dimension", kind(1, dimension_count=1, ne0=(1 << 63) - 1, ne1=0)),
    Case("a shape of none", kind(1, dimension_count=0, ne0=0, ne1=0)),
    Case("the largest product", kind(1, ne0=(1 << 63) - 1, ne1=1)),
    Case("the last of all layers", record("family", 1, layer=(1 << 32) - 1)),
    Case("two families", lambda draft: second_family(draft, b"-._")),
    Case("the longest family", record("family", 1, name=b"n" * 31)),
    Case("the longest names", kind(1, name=b"n" * 63, type_name=b"t" * 23)),
    Case("all kinds of letters", kind(1, name=b"-_.09AZaz", type_name=b"z_9.Z")),
    Case("an unknown type", kind(1, flags=1, type_id=(1 << 32) - 1, interleaved_row_count=0)),
    Case("hotness that was not measured", record("family", 0, flags=0)),
    Case("names of files that look like devices", other_names),
    Case("files whose digests are not known", record("file", 0, flags=1)),
    Case("blobs, and experts without one", without_blobs),
    Case("the last shard", kind(0, shard=(1 << 16) - 1, shard_offset=(1 << 63) - 65)),
    Case("tensors of their own", own_tensors()),
    Case("more slices than are asked for", own_tensors(9)),
    Case("an unknown optional section", added(Piece(b"slices2", b"", 3, 0))),
    Case("an optional section that is said to be required", section("tensors", flags=1)),
    Case("required ones that are not", section("files", flags=0)),
    Case("a tensor of no bytes", tensor(length=0, stored_length=0, ne0=0)),
    Case("one at the end of its file", tensor(offset=16384, length=4096, stored_length=4096)),
    Case("one of four dimensions", tensor(dimension_count=4, ne1=1, ne2=1, ne3=(1 << 61) - 1)),
    Case("one of none", tensor(dimension_count=0, ne0=0)),
    Case("one with an inferred type", tensor(flags=1, type_id=99)),
    Case("one from the end of a shard", tensor(shard=65535, shard_offset=(1 << 63) - 17)),
    *(
        Case(f"one called {name!r}", tensor(name=name.encode()), "")
        for name in (
            "x" * 63,
            "a b\n\x7f",
            "\x80\u07ff",
            "\u0800\ud7ff\ue000\uffff",
            "\U00010000",
            "\U0010ffff",
            "x" * 61 + "é",
            "token_embd.weight2",
            "token_embd",
        )
    ),
]


def with_a_shard(rule: Rule) -> Case:
    """Break a rule of shard bytes, which are looked at where there is a shard."""
    return Case(rule.name, all_of(without_blobs, rule.breaks))


# What stands in the manifest as well is left to those who read it.
ALL_RULES = [
    *(
        with_a_shard(rule) if rule.name.startswith("shard bytes") else rule
        for group, rules in INDEX_RULES.items()
        for rule in rules
        if group != "cross"
    ),
    *MORE_RULES,
]


def test_each_rule_of_the_index_is_kept_by_the_c_reader(
    small: Path, tmp_path: Path, program: Path
) -> None:
    paths = drafts(small, tmp_path, ALL_RULES)
    verdicts = c_says(program, "check", paths)
    for rule, path, verdict in zip(ALL_RULES, paths, verdicts, strict=True):
        code = verdict.refusal.partition(" ")[0]
        assert code == expected_code(rule), rule.name
        assert not isinstance(rule, Case) or rule.words in verdict.refusal, rule.name
        expected = python_says(path)
        assert expected.place, rule.name
        # The check that is meant refuses, not a later one.
        assert f"index.bin: {expected.place}: " in f"{verdict.refusal} ", (rule.name, expected)
    assert len({verdict.refusal for verdict in verdicts}) > 0.8 * len(verdicts)


def expected_code(rule: Rule | Case) -> str:
    if rule.name.startswith("version"):
        return "VERSION"
    return "FEATURE" if "needs the section" in rule.words else "DAMAGED"


def test_shard_bytes_are_nobodys_concern_in_a_pack_of_blobs(
    small: Path, tmp_path: Path, program: Path
) -> None:
    rules = [rule for rule in INDEX_RULES["dense"] if rule.name.startswith("shard bytes")]
    paths = drafts(small, tmp_path, rules)
    for path, verdict in zip(paths, c_says(program, "check", paths), strict=True):
        assert verdict == python_says(path)
        assert verdict.refusal == ""


def test_what_a_reader_does_not_need_and_what_is_allowed_is_read(
    small: Path, tmp_path: Path, program: Path
) -> None:
    rules: list[Rule | Case] = [*VERIFIERS_RULES, *ALLOWED]
    paths = drafts(small, tmp_path, rules)
    for rule, path, verdict in zip(rules, paths, c_says(program, "check", paths), strict=True):
        assert verdict.refusal == "", rule.name
        assert verdict == python_says(path), rule.name
