"""The C reader keeps each rule of the index, and no rule that is none."""

from pathlib import Path
from typing import Any

from moepack.pack.format import records
from tests.support.broken_packs import INDEX_RULES, VERIFIERS_RULES
from tests.support.c_readers import Case, c_says, drafts, python_says
from tests.support.pack_draft import (
    Change,
    Draft,
    Piece,
    Rule,
    all_of,
    later,
    more,
    record,
    renamed,
    section,
    stated,
    strong_digests,
    without,
    without_blobs,
)


def kind(number: int, /, **fields: Any) -> Change:
    return record("part_kind", number, **fields)


def tensor(**fields: Any) -> Change:
    return record("tensor", 1, **fields)


def as_long_as_its_blob(draft: Draft) -> None:
    draft.set("part_kind", 0, length=12288)
    for part in (0, 3):
        draft.set("part", part, stored_length=12288)


@later
def at_the_end(draft: Draft, past: int) -> None:
    """Move a part to the end of its blob, or a little past it."""
    blob = draft.get("blob", 1)
    assert blob.offset == 0, "there is another blob after it"
    draft.set("part", 3, offset=blob.length - 32 + past)


@later
def blob_to_the_end(draft: Draft, past: int) -> None:
    blob = draft.get("blob", 0)
    length = draft.get("file", 0).length - blob.offset + past
    draft.set("blob", 0, rank=0, length=length)


@later
def directory_to(draft: Draft, end: int) -> None:
    """Let the directory end at a byte, by a longer header."""
    pieces = draft.pieces()
    draft.rebuild(pieces, header_more=bytes(end - 56 - 48 * len(pieces)))


def with_many_sections(draft: Draft) -> None:
    pieces = draft.pieces()
    count = records.MAX_SECTIONS - len(pieces)
    draft.rebuild([*pieces, *(Piece(b"s%d" % n, b"x", 1, 0) for n in range(count))])


def of_one_byte(draft: Draft) -> None:
    """Add a file of one byte, and let a part be as long."""
    more("files")(draft)
    draft.body["files"].append({"name": "one", "length": 1})
    (draft.path / "one").write_bytes(b"1")
    draft.set("file", 3, name=b"one", length=1)
    draft.set("part_kind", 0, length=1)
    for part in (0, 3):
        draft.set("part", part, stored_length=1)


def other_names(draft: Draft) -> None:
    for number, name in enumerate(("a" * 255, "con-.bin", "com10")):
        (draft.path / draft.body["files"][number]["name"]).rename(draft.path / name)
        draft.rename(number, name)


# Named by the words of the C reader: one check each, where a later one would refuse these as well.
MORE_RULES = [
    *(Case(f"a name with {c} first", renamed(f"{c}x.bin"), "no data file's") for c in ".-_"),
    *(Case(f"a name with {c!r}", renamed(f"x{c}.bin"), f"0x{ord(c):02x}") for c in "/@:[`{,\x7f"),
    *(
        Case(f"a device, {name}", renamed(name), "no data file's")
        for name in ("CON", "prn.x.y", "aUx", "nul.", "com9.bin", "lpt0", "lpt9..")
    ),
    Case("one dimension of 2^63", kind(1, dimension_count=1, ne0=1 << 63, ne1=0), "no shape"),
    Case("a part one byte past its blob", at_the_end(1), "not inside the blob"),
    Case("a blob one step past its file", blob_to_the_end(4096), "not inside experts-00000.bin"),
    # Counts and lengths that are allowed, so that a later rule refuses.
    Case("65,536 experts", record("family", 0, expert_count=65536), "family 1: first_blob"),
    Case("2^63 - 1 bytes", kind(0, length=(1 << 63) - 1), "stored_length"),
    *(
        Case(f"a tensor called {name!r}", tensor(name=name), "tensor 1: name")
        for name in (
            *(b"a\x80", b"\xc3", b"\xc3a", b"\xe2\x82", b"\xf0\x9f\x98", b"\xc0\x80", b"\xc1\xbf"),
            *(b"\xe0\x9f\xbf", b"\xf0\x8f\xbf\xbf", b"\xf4\x90\x80\x80", b"\xf8\x88\x80\x80\x80"),
            *(b"\xed\xa0\x80", b"\xed\xbf\xbf", b"\xfe", b"x" * 254 + b"\xc3", b"x" * 256),
        )
    ),
    *(
        Case(f"a tensor: {what}", tensor(**fields), "no shape")
        for what, fields in {
            "no dimension": {"dimension_count": 0},
            "an axis after the last": {"ne3": 1},
            "a product of 2^63": {"dimension_count": 4, "ne1": 1 << 30, "ne3": 1 << 31},
        }.items()
    ),
    Case("a tensor one byte past", tensor(offset=20480, length=1, stored_length=1), "not inside"),
    Case("a tensor from 2^63 - 15", tensor(shard_offset=(1 << 63) - 15), "shard_offset"),
    Case("a part a byte past its file", record("part", 7, offset=24576 - 31), "not inside"),
    *(
        Case(f"records of files of {length}", section("files", record_length=length), "files: rec")
        for length in (0, 65537)
    ),
    *(
        Case(
            f"{count} records of {length} bytes that nobody knows",
            section("shard_bytes", name=b"x", record_count=count, record_length=length),
            "end past the index",
        )
        for count, length in (((1 << 64) - 1, 1), (1 << 62, 4), (1 << 60, 16), (99, 1))
    ),
]
ALLOWED = [
    Case("a part at the end of its blob", at_the_end(0)),
    Case("a part as long as its blob", as_long_as_its_blob),
    Case("a part and a file of one byte", of_one_byte),
    Case("a blob up to the end of its file", blob_to_the_end(0)),
    Case("a blob as long as its file", record("blob", 1, length=24576)),
    Case("a file of 2^63 - 1 bytes", lambda draft: draft.resize(0, (1 << 63) - 1)),
    Case("tensors aligned to nothing", record("header", 0, tensor_alignment=1)),
    Case("a shape of one dimension", kind(1, dimension_count=1, ne0=(1 << 63) - 1, ne1=0)),
    Case("a shape of none", kind(1, dimension_count=0, ne0=0, ne1=0)),
    Case("the largest product", kind(1, ne0=(1 << 63) - 1, ne1=1)),
    Case("the last of all layers", record("family", 1, layer=65535)),
    Case("the longest family", record("family", 1, name=b"n" * 31)),
    Case("the longest names", kind(1, name=b"n" * 63, type_name=b"t" * 23)),
    Case("all kinds of letters", kind(1, name=b"-_.09AZaz", type_name=b"z_9.Z")),
    Case("names of files that look like devices", other_names),
    Case("the last shard", kind(0, shard=4095, shard_offset=(1 << 63) - 65)),
    Case("an optional section that is said to be required", section("tensors", flags=1)),
    Case("required ones that are not", section("files", flags=0)),
    Case("a tensor of no bytes", tensor(length=0, stored_length=0, ne0=0)),
    Case("one at the end of its file", tensor(offset=16384, length=4096, stored_length=4096)),
    Case("one of four dimensions", tensor(dimension_count=4, ne1=1, ne2=1, ne3=(1 << 61) - 1)),
    Case("one of none", tensor(dimension_count=0, ne0=0)),
    Case("the longest", tensor(ne0=(1 << 63) - 1)),
    Case(
        "strong digests of parts alone",
        all_of(without("tensors"), without("shard_bytes"), stated(whole=False), strong_digests()),
    ),
    Case("one with an inferred type", tensor(flags=1, type_id=99)),
    Case("a directory up to byte 65,536", directory_to(65536)),
    Case("as many sections as may be", with_many_sections),
    Case("one from the end of a shard", tensor(shard=4095, shard_offset=(1 << 63) - 17)),
    *(
        Case(f"one called {name!r}", tensor(name=name.encode()), "")
        for name in (
            "x" * 255,
            "a b\n\x7f",
            "\x80\u07ff",
            "\u0800\ud7ff\ue000\uffff",
            "\U00010000",
            "\U0010ffff",
            "x" * 253 + "é",
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
        with_a_shard(rule) if rule.place.startswith("shard_bytes ") else rule
        for group, rules in INDEX_RULES.items()
        for rule in rules
        if group != "cross"
    ),
    *MORE_RULES,
]


def test_each_rule_of_the_index_is_kept_by_the_c_reader(
    tiny: Path, tmp_path: Path, program: Path
) -> None:
    paths = drafts(tiny, tmp_path, ALL_RULES)
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
    is_unknown = "needs the section" in rule.words or "unknown kind of file" in rule.words
    return "FEATURE" if is_unknown else "DAMAGED"


def test_shard_bytes_are_nobodys_concern_in_a_pack_of_blobs(
    tiny: Path, tmp_path: Path, program: Path
) -> None:
    rules = [rule for rule in INDEX_RULES["dense"] if rule.place.startswith("shard_bytes ")]
    paths = drafts(tiny, tmp_path, rules)
    for path, verdict in zip(paths, c_says(program, "check", paths), strict=True):
        assert verdict == python_says(path)
        assert verdict.refusal == ""


def test_the_rules_of_shard_bytes_are_kept_when_a_header_is_located(
    tiny: Path, tmp_path: Path, program: Path
) -> None:
    rules = [rule for rule in INDEX_RULES["dense"] if rule.place.startswith("shard_bytes ")]
    paths = drafts(tiny, tmp_path, rules)
    refused = 0
    for rule, verdict in zip(rules, c_says(program, "headers", paths), strict=True):
        assert verdict.lines == [], rule.name
        if verdict.refusal:  # else it is the header of no shard any more
            refused += 1
            assert verdict.refusal.startswith(f"DAMAGED index.bin: {rule.place}: "), rule.name
    assert refused >= len(rules) - 2


def test_what_a_reader_does_not_need_and_what_is_allowed_is_read(
    tiny: Path, tmp_path: Path, program: Path
) -> None:
    rules: list[Rule | Case] = [*VERIFIERS_RULES, *ALLOWED]
    paths = drafts(tiny, tmp_path, rules)
    for rule, path, verdict in zip(rules, paths, c_says(program, "check", paths), strict=True):
        assert verdict.refusal == "", rule.name
        assert verdict == python_says(path), rule.name
