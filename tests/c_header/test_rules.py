"""The C reader keeps each rule of the index, and no rule that is none."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from moepack.format import records
from tests.support.broken_packs import INDEX_RULES, VERIFIERS_RULES
from tests.support.c_compiler import HAS_ZSTD
from tests.support.c_readers import Case, Verdict, c_says, drafts, python_says
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
    second_places,
    section,
    with_codecs,
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
        assert blob.offset == 0, "there is another blob after it"
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


def directory_to(end: int) -> Change:
    """Let the directory end at a byte, by a longer header."""

    def change(draft: Draft) -> None:
        pieces = draft.pieces()
        draft.rebuild(pieces, header_more=bytes(end - 56 - 48 * len(pieces)))

    return change


def swapped(first: str, second: str) -> Change:
    """Let two sections change places."""

    def change(draft: Draft) -> None:
        pieces = draft.pieces()
        one, two = draft.number_of(first), draft.number_of(second)
        pieces[one], pieces[two] = pieces[two], pieces[one]
        draft.rebuild(pieces)

    return change


def new_section_first(draft: Draft) -> None:
    draft.rebuild([Piece(b"x", bytes(8), 8, 0), *draft.pieces()])


def codecs(*names: bytes) -> Change:
    """State any number of codecs."""
    data = b"".join(name.ljust(32, b"\0") for name in names)

    def change(draft: Draft) -> None:
        with_codecs()(draft)
        held = [piece for piece in draft.pieces() if not piece.name.startswith(b"codecs")]
        draft.rebuild([*held, Piece(b"codecs", data, 32, 1)])

    return change


def short_codecs(draft: Draft) -> None:
    with_codecs()(draft)
    draft.set("section", draft.number_of("codecs"), record_length=24)


def stored_in(length: int, *, codec: int = 1) -> Change:
    """State that the first part is stored in other bytes, which are not there."""
    return all_of(with_codecs(), record("part", 0, stored_length=length, codec=codec))


PARTS = ("parts",)
EACH = {
    "stored_digests": (8, PARTS),
    "second_places": (16, PARTS),
    "strong_digests": (32, ("parts", "tensors", "shard_bytes")),
}
"""Sections with a record for each of others: its length, and theirs."""


def each(name: str, *, more: int = 0, of: tuple[str, ...] = ()) -> Change:
    """Add such a section, of zeros, with `more` records than those of others."""
    length, others = EACH[name]

    def change(draft: Draft) -> None:
        count = sum(draft.sections[other].record_count for other in of or others) + more
        added(Piece(name.encode(), bytes(count * length), length, 0))(draft)

    return change


def with_all_sections(draft: Draft) -> None:
    for change in (own_tensors(), with_codecs(), each("second_places"), each("strong_digests")):
        change(draft)


def without_a_blob_in(file: int) -> Change:
    """Let the parts of the first expert lie apart in a file."""

    def change(draft: Draft) -> None:
        draft.set("blob", 0, offset=0, length=0)
        for part in range(3):
            draft.set("part", part, file=file, offset=32 * part)

    return change


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
    Case("more after a family", record("family", 0, name=b"a\0b"), "family 0: name"),
    Case(
        "more at the end of a family", record("family", 0, name=b"a" + bytes(30) + b"b"), "byte 31"
    ),
    Case("more after a part", kind(0, name=b"a\0b"), "family 0: part 0: name"),
    Case("more after a type", kind(0, type_name=b"F\0" + b"3"), "part 0: type_name"),
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
    Case("no length, yet a place", record("blob", 1, length=0, file=1), "blob 1: no length"),
    Case("a blob of odd bytes", moved("blob", 1, length=-1), "blob 1: length"),
    Case("names that differ in case", named_files("AZ.bin", "az.bin"), "files: two are named"),
    Case("the same, reversed", named_files("az.bin", "AZ.bin"), "files: two are named"),
    Case("a section of odd records", section("blobs", record_length=36), "blobs: record_length"),
    # Counts and lengths that are allowed, so that a later rule refuses.
    Case("65,536 experts", record("family", 0, expert_count=65536), "family 1: first_blob"),
    Case("64 parts", record("family", 1, parts_per_blob=64), "no more than there are part kinds"),
    Case("2^63 - 1 bytes", kind(0, length=(1 << 63) - 1), "stored_length"),
    Case("a blob in the file after the last", record("blob", 0, file=3), "file: expected less"),
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
    Case("slices to 2^63", kind(0, shard_offset=(1 << 63) - 64), "its slices"),
    Case("a part a byte past its file", record("part", 7, offset=24576 - 31), "not inside"),
    *(
        Case(f"records of {name} of {length}", section(name, record_length=length), "record_length")
        for name, length in (
            *(("files", 0), ("files", 65537), ("ranks", 2), ("ranks", 6), ("blobs", 36)),
            *(("tensors", 368), ("shard_bytes", 32), ("part_kinds", 148)),
        )
    ),
    *(
        Case(
            f"{count} records of {length} bytes that nobody knows",
            section("shard_bytes", name=b"x", record_count=count, record_length=length),
            "end past the index",
        )
        for count, length in (((1 << 64) - 1, 1), (1 << 62, 4), (1 << 60, 16), (99, 1))
    ),
    Case("no slices for tensors of their own", own_tensors(0), "slices"),
    Case("a directory up to byte 65,544", directory_to(65544), "directory: expected its end at"),
    *(
        Case(f"shard 4,096 of a {what}", record(what, 0, shard=4096), "shard: expected less than")
        for what in ("part_kind", "tensor")
    ),
    *(
        Case(f"{first} after {second}", swapped(first, second), "directory: section ")
        for first, second in (("files", "families"), ("part_kinds", "blobs"), ("files", "ranks"))
    ),
    Case("a new section first", new_section_first, "directory: section 0: expected files, found x"),
    *(
        Case(
            f"{most + 1:,} {name}",
            all_of(with_all_sections, section(name, record_count=most + 1)),
            f"{name}: record_count: expected {least} to {most}, found {most + 1}",
        )
        for name, (least, most) in records.COUNTS.items()
    ),
    Case("no codec", codecs(), "codecs: record_count: expected 1 to 64, found 0"),
    Case("65 codecs", codecs(*[b"zstd"] * 65), "codecs: record_count: expected 1 to 64, found 65"),
    Case("a codec of 32 bytes", codecs(b"z" * 32), "codec 0: name: expected 1 to 31"),
    Case("a codec without a name", codecs(b"zstd", b""), "codec 1: name: expected 1 to 31"),
    Case("a codec twice", codecs(b"zstd", b"zstd"), "codec 1: name: codec 0 has the same"),
    Case("codecs of 24 bytes", short_codecs, "codecs: record_length: expected 32 or more"),
    *(
        Case(f"{more} {name} to those", each(name, more=more), f"{name}: record_count: expected ")
        for name in EACH
        for more in (-1, 1)
    ),
    Case("strong digests of parts alone", each("strong_digests", of=PARTS), "parts, tensors and s"),
    Case("codec 2 of 1", stored_in(31, codec=2), "codec: expected up to 1, found 2"),
    Case("31 bytes without a codec", stored_in(31, codec=0), "stored_length: expected 32 as its"),
    Case("31 bytes in a shard", all_of(stored_in(31), without_blobs), "codec: expected 0 in a sh"),
    Case(
        "a blob in a file of second places",
        all_of(second_places, lambda draft: draft.resize(3, 1 << 20), record("blob", 0, file=3)),
        "blob 0: file: expected a data file, found 3 of kind 2",
    ),
    Case(
        "a part in a file of second places",
        all_of(second_places, without_a_blob_in(3)),
        "there is no blob, and file 3 is no shard",
    ),
    Case("the last layer first", record("family", 0, layer=7), "families: layer 1 comes after"),
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
    Case("the last of all layers", record("family", 1, layer=65535)),
    Case("two families", lambda draft: second_family(draft, b"-._")),
    Case("the longest family", record("family", 1, name=b"n" * 31)),
    Case("the longest names", kind(1, name=b"n" * 63, type_name=b"t" * 23)),
    Case("all kinds of letters", kind(1, name=b"-_.09AZaz", type_name=b"z_9.Z")),
    Case("an unknown type", kind(1, flags=1, type_id=(1 << 32) - 1, interleaved_row_count=0)),
    Case("hotness that was not measured", record("family", 0, flags=0)),
    Case("names of files that look like devices", other_names),
    Case("files whose digests are not known", record("file", 0, flags=1)),
    Case("blobs, and experts without one", without_blobs),
    Case("the last shard", kind(0, shard=4095, shard_offset=(1 << 63) - 65)),
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
    Case("a directory up to byte 65,536", directory_to(65536)),
    Case("blobs after parts", swapped("blobs", "parts")),
    Case("second places", second_places),
    *(Case(f"{name} that nothing uses", each(name)) for name in EACH),
    Case("all sections", with_all_sections),
    Case("a codec that nothing uses", codecs(b"zstd")),
    Case("a part stored in 31 bytes", stored_in(31)),
    Case("another in 1", stored_in(1)),
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
        if group != "cross" and not rule.place.startswith("second place ")  # which it does not use
    ),
    *MORE_RULES,
]


def test_each_rule_of_the_index_is_kept_by_the_c_reader(
    small: Path, tmp_path: Path, program: Path
) -> None:
    paths = drafts(small, tmp_path, ALL_RULES)
    verdicts = c_says(program, "check", paths)
    for rule, path, verdict in zip(ALL_RULES, paths, verdicts, strict=True):
        if is_for_zstd(verdict):
            continue
        code = verdict.refusal.partition(" ")[0]
        assert code == expected_code(rule), rule.name
        assert not isinstance(rule, Case) or rule.words in verdict.refusal, rule.name
        expected = python_says(path)
        assert expected.place, rule.name
        # The check that is meant refuses, not a later one.
        assert f"index.bin: {expected.place}: " in f"{verdict.refusal} ", (rule.name, expected)
    assert len({verdict.refusal for verdict in verdicts}) > 0.8 * len(verdicts)


def is_for_zstd(verdict: Verdict) -> bool:
    """Return whether a pack was refused at once as there is no zstd for C here."""
    return not HAS_ZSTD and "needs the codec 'zstd'" in verdict.refusal


def expected_code(rule: Rule | Case) -> str:
    if rule.name.startswith("version"):
        return "VERSION"
    is_unknown = "needs the section" in rule.words or "needs the codec" in rule.words
    return "FEATURE" if is_unknown else "DAMAGED"


def test_shard_bytes_are_nobodys_concern_in_a_pack_of_blobs(
    small: Path, tmp_path: Path, program: Path
) -> None:
    rules = [rule for rule in INDEX_RULES["dense"] if rule.place.startswith("shard_bytes ")]
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
        if is_for_zstd(verdict):
            continue
        assert verdict.refusal == "", rule.name
        assert verdict == python_says(path), rule.name
