"""The C reader keeps each rule of the index, and no rule that is none."""

from collections.abc import Callable
from pathlib import Path

from tests.support.c_drafts import (
    INDEX_RULES,
    TENSOR_RULES,
    VERIFIERS_RULES,
    Draft,
    Rule,
    both,
    kind,
    longer_file,
    moved,
    record,
    renamed,
    section,
    swapped_files,
    tensor,
    with_section,
)
from tests.support.c_readers import c_says, drafts, python_says
from tests.support.grown_packs import NewSection


def named_files(first: str, second: str) -> Callable[[Draft], None]:
    return both(record("file", 0, name=first.encode()), renamed(second))


def large_alignment(draft: Draft) -> None:
    draft.set("header", 0, blob_alignment=1 << 30)
    for number in range(2):
        longest_file(draft, number, 1 << 31)
    for number in range(4):
        draft.set("blob", number, offset=number % 2 << 30, length=1 << 30)
        for part in range(3 * number, 3 * number + 3):
            draft.set("part", part, offset=(number % 2 << 30) + 32 * part)


def longest_file(draft: Draft, number: int = 0, length: int = (1 << 63) - 1) -> None:
    draft.set("file", number, length=length)
    draft.body["files"][number]["length"] = length


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
    Rule("the index's name in capitals", renamed("INDEX.bin"), "no data file's"),
    Rule("the name of a manifest to be", renamed("manifest.json.tmp"), "no data file's"),
    *(Rule(f"a name with {c} first", renamed(f"{c}x.bin"), "no data file's") for c in ".-_"),
    *(Rule(f"a name with {c!r}", renamed(f"x{c}.bin"), f"0x{ord(c):02x}") for c in "/@:[`{,\x7f"),
    *(
        Rule(f"a device, {name}", renamed(name), "no data file's")
        for name in ("CON", "prn.x.y", "aUx", "nul.", "com9.bin", "lpt0", "lpt9..")
    ),
    Rule("a family of 32 bytes", record("family", 0, name=b"n" * 32), "family 0: name"),
    Rule("more behind a family", record("family", 0, name=b"a\0b"), "family 0: name"),
    Rule(
        "more at the end of a family", record("family", 0, name=b"a" + bytes(30) + b"b"), "byte 31"
    ),
    Rule("more behind a part", kind(0, name=b"a\0b"), "family 0: part 0: name"),
    Rule("more behind a type", kind(0, type_name=b"F\0" + b"3"), "part 0: type_name"),
    Rule("a type of 24 bytes", kind(0, type_name=b"F" * 24), "part 0: type_name"),
    Rule("two dimensions, one axis", kind(1, ne1=0), "no shape"),
    Rule("two dimensions, no elements", kind(1, ne0=0), "no shape"),
    Rule("one dimension of 2^63", kind(1, dimension_count=1, ne0=1 << 63, ne1=0), "no shape"),
    Rule("a product of 2^63", kind(1, ne0=1 << 31, ne1=1 << 32), "no shape"),
    Rule("a part one byte past its blob", at_the_end(1), "not inside the blob"),
    Rule(
        "a part longer than its blob",
        both(
            kind(0, length=12289),
            record("blob", 0, offset=0),
            record("part", 0, offset=0, stored_length=12289),
        ),
        "12289 bytes at 0 of file 0 are not inside the blob",
    ),
    Rule("a blob one step past its file", blob_to_the_end(4096), "not inside experts-00000.bin"),
    Rule("a kind of no bytes", kind(0, length=0), "part 0: length"),
    Rule("a kind of 2^63 bytes", kind(0, length=1 << 63), "part 0: length"),
    Rule("65 parts a blob", record("family", 1, parts_per_blob=65), "expected 1 to 64"),
    Rule("a blob off its alignment", moved("blob", 1, offset=512), "blob 1: offset"),
    Rule("no length, but a place", record("blob", 1, length=0, file=1), "blob 1: no length"),
    Rule("a blob of odd bytes", moved("blob", 1, length=-1), "blob 1: length"),
    Rule("names that differ in case", named_files("AZ.bin", "az.bin"), "files: two are named"),
    Rule("the same, reversed", named_files("az.bin", "AZ.bin"), "files: two are named"),
    Rule("a section of odd records", section("blobs", record_length=36), "blobs: record_length"),
    # Counts and lengths that are allowed, so that a later rule refuses.
    Rule("65,536 experts", record("family", 0, expert_count=65536), "family 1: first_blob"),
    Rule("64 parts", record("family", 1, parts_per_blob=64), "no more than there are part kinds"),
    Rule("2^63 - 1 bytes", kind(0, length=(1 << 63) - 1), "stored_length"),
    Rule("a blob in the file behind the last", record("blob", 0, file=3), "file: expected less"),
    Rule("the last layer first", record("family", 0, layer=7), "families: layer 1 stands behind"),
    Rule(
        "two families of a layer, one name",
        record("family", 1, layer=0),
        "families: layer 0 has two named ffn_exps",
    ),
]
ALLOWED = [
    Rule("a part at the end of its blob", at_the_end(0), ""),
    Rule("a part as long as its blob", as_long_as_its_blob, ""),
    Rule("a blob up to the end of its file", blob_to_the_end(0), ""),
    Rule("a blob as long as its file", record("blob", 1, length=24576), ""),
    Rule("a file of 2^63 - 1 bytes", longest_file, ""),
    Rule("the largest alignment", large_alignment, ""),
    Rule("tensors aligned to more than blobs", record("header", 0, tensor_alignment=1 << 30), ""),
    Rule("a shape of one dimension", kind(1, dimension_count=1, ne0=(1 << 63) - 1, ne1=0), ""),
    Rule("a shape of none", kind(1, dimension_count=0, ne0=0, ne1=0), ""),
    Rule("the largest product", kind(1, ne0=(1 << 63) - 1, ne1=1), ""),
    Rule("the last of all layers", record("family", 1, layer=(1 << 32) - 1), ""),
    Rule("two families", lambda draft: second_family(draft, b"-._"), ""),
    Rule("the longest family", record("family", 1, name=b"n" * 31), ""),
    Rule("the longest names", kind(1, name=b"n" * 63, type_name=b"t" * 23), ""),
    Rule("all kinds of letters", kind(1, name=b"-_.09AZaz", type_name=b"z_9.Z"), ""),
    Rule("an unknown type", kind(1, flags=1, type_id=(1 << 32) - 1, interleaved_row_count=0), ""),
    Rule("hotness that was not measured", record("family", 0, flags=0), ""),
    Rule("names of files that look like devices", other_names, ""),
    Rule("files whose digests are not known", record("file", 0, flags=1), ""),
    Rule("a blob in a shard", record("file", 0, kind=1), ""),
    Rule("the last shard", kind(0, shard=(1 << 16) - 1, shard_offset=(1 << 63) - 1), ""),
    Rule(
        "tensors of their own, whose slices nobody asks for",
        kind(0, flags=2, first_slice=(1 << 32) - 1, shard_offset=0, stride=0),
        "",
    ),
    Rule("unknown optional sections", with_section(NewSection("slices2", 0)), ""),
    Rule("an optional section that is said to be required", section("tensors", flags=1), ""),
    Rule("required ones that are not", section("files", flags=0), ""),
    Rule("a tensor of no bytes", tensor(length=0, stored_length=0, ne0=0), ""),
    Rule("one at the end of its file", tensor(offset=20480 - 16), ""),
    Rule("one of four dimensions", tensor(dimension_count=4, ne1=1, ne2=1, ne3=(1 << 61) - 1), ""),
    Rule("one of none", tensor(dimension_count=0, ne0=0), ""),
    Rule("one with an inferred type", tensor(flags=1, type_id=99), ""),
    Rule("one from the end of a shard", tensor(shard=65535, shard_offset=(1 << 63) - 17), ""),
    *(
        Rule(f"one called {name!r}", tensor(name=name.encode()), "")
        for name in (
            "x" * 63,
            "a b\n\x7f",
            "\x80\u07ff",
            "\u0800\ud7ff\ue000\uffff",
            "\U00010000",
            "\U0010ffff",
            "x" * 61 + "é",
            "token_embd.weight",
        )
    ),
]
# Only the manifest, which the C reader leaves out, could tell.
MANIFESTS_RULES = (longer_file, swapped_files)
ALL_RULES = [
    *(
        rule
        for rules in (*INDEX_RULES.values(), TENSOR_RULES)
        for rule in rules
        if rule.breaks not in MANIFESTS_RULES
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
        assert "index.bin: " in verdict.refusal
        assert rule not in MORE_RULES or rule.words in verdict.refusal, rule.name
        expected = python_says(path)
        assert expected.place, rule.name
        # The check that is meant refuses, not a later one.
        assert f"index.bin: {expected.place}: " in f"{verdict.refusal} ", (rule.name, expected)
    assert len({verdict.refusal for verdict in verdicts}) > 0.8 * len(verdicts)


def expected_code(rule: Rule) -> str:
    if rule.name.startswith("version"):
        return "VERSION"
    return "FEATURE" if "needs the section" in rule.words else "DAMAGED"


def test_what_a_reader_does_not_need_and_what_is_allowed_is_read(
    small: Path, tmp_path: Path, program: Path
) -> None:
    rules = [*VERIFIERS_RULES, *ALLOWED]
    paths = drafts(small, tmp_path, rules)
    for rule, path, verdict in zip(rules, paths, c_says(program, "check", paths), strict=True):
        assert verdict.refusal == "", rule.name
        assert verdict == python_says(path), rule.name
