"""Packs with one fault each."""

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from moepack import digest
from moepack.format import manifest, records, sections
from tests.support.gguf_builder import F32, moe
from tests.support.grown_packs import NewSection, grown
from tests.support.models import pack_model

COUNTS = {(0, 0): 5, (0, 1): 9, (1, 0): 7, (1, 1): 0}
KINDS: dict[str, tuple[str, struct.Struct, Any]] = {
    "header": ("", records.Header.LAYOUT, records.Header),
    "section": ("", records.SectionRecord.LAYOUT, records.SectionRecord),
    "file": ("files", records.FileRecord.LAYOUT, records.FileRecord),
    "family": ("families", records.FamilyRecord.LAYOUT, records.FamilyRecord),
    "part_kind": ("part_kinds", records.PartKindRecord.LAYOUT, records.PartKindRecord),
    "blob": ("blobs", records.BLOB, records.BlobRecord),
    "part": ("parts", records.PART, records.PartRecord),
    "slice": ("slices", records.SliceRecord.LAYOUT, records.SliceRecord),
    "tensor": ("tensors", records.TensorRecord.LAYOUT, records.TensorRecord),
    "shard_bytes": ("shard_bytes", records.ShardBytesRecord.LAYOUT, records.ShardBytesRecord),
}
"""By what a test calls them: the section of the records, their form, their fields."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pack two layers of two experts, each of three parts of 32 bytes; read-only."""
    folder = tmp_path_factory.mktemp("tiny")
    model = moe((0, 1), 2, ne=(4, 2), type_id=F32, block=(1, 4)).write(folder / "m.gguf")
    pack_model([model], folder / "pack", counts=COUNTS)
    return folder / "pack"


@pytest.fixture
def draft(tiny: Path, tmp_path: Path) -> "Draft":
    return Draft(Path(shutil.copytree(tiny, tmp_path / "pack")))


class Draft:
    """A pack whose index and manifest a test changes; `save` makes all digests right again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.body: dict[str, Any] = json.loads((path / "manifest.json").read_bytes())
        self.replace((path / "index.bin").read_bytes())

    def replace(self, index: bytes) -> None:
        """Go on with another index, which is sound so far."""
        self.index = bytearray(index)
        self.header = records.Header.unpack(index, 0)
        self.directory = sections.decode(index, self.header, str(self.path))

    def at(self, kind: str, number: int) -> int:
        """Return the offset of a record, as the index was when the draft was made."""
        if kind == "header":
            return 0
        if kind == "section":
            return self.header.header_length + number * self.header.section_record_length
        return self.directory[KINDS[kind][0]].at(number)

    def section(self, name: str) -> int:
        """Return the number of a section's record."""
        return list(self.directory.sections).index(name)

    def get(self, kind: str, number: int = 0, /) -> Any:
        _, form, record = KINDS[kind]
        return record(*form.unpack_from(self.index, self.at(kind, number)))

    def set(self, kind: str, number: int = 0, /, **fields: Any) -> None:
        """Change fields of a record, and make sure that something changed."""
        before = self.get(kind, number)
        after = before._replace(**fields)
        assert tuple(after) != tuple(before)
        KINDS[kind][1].pack_into(self.index, self.at(kind, number), *after)

    def rename(self, number: int, name: str) -> None:
        """Return a data file another name, in the index and in the manifest alike."""
        self.set("file", number, name=name.encode("utf-8", "surrogateescape"))
        self.body["files"][number]["name"] = name

    def save(self) -> None:
        trailer = digest.of(bytes(self.index[:-8]))
        self.index[-8:] = struct.pack("<Q", trailer)
        self.body["index"] = manifest.describe_index(bytes(self.index)).to_json()
        (self.path / "index.bin").write_bytes(self.index)
        self.save_manifest()

    def save_manifest(self) -> None:
        self.body.pop("manifest_digest", None)
        (self.path / "manifest.json").write_bytes(sealed(json.dumps(self.body, indent=2)))


def sealed(text: str) -> bytes:
    """Add the digest to a manifest that lacks it."""
    signed = text[: text.rindex("\n}")].encode("utf-8", "surrogatepass")
    return signed + f',\n  "manifest_digest": "{digest.to_text(digest.of(signed))}"\n}}\n'.encode()


class Rule(NamedTuple):
    """One broken rule: how, and what the reader's error and the verifier's finding must hold."""

    name: str
    breaks: Callable[[Draft], object]
    words: str


def header(**fields: Any) -> Callable[[Draft], None]:
    return lambda draft: draft.set("header", **fields)


def record(kind: str, number: int, /, **fields: Any) -> Callable[[Draft], None]:
    return lambda draft: draft.set(kind, number, **fields)


def moved(kind: str, number: int, /, **steps: int) -> Callable[[Draft], None]:
    """Add to fields of a record."""

    def change(draft: Draft) -> None:
        held = draft.get(kind, number)
        draft.set(kind, number, **{name: getattr(held, name) + n for name, n in steps.items()})

    return change


def renamed(name: str) -> Callable[[Draft], None]:
    """Return a file another name, in the index alone."""
    return record("file", 1, name=name.encode())


def resized(change: int, *, stated: bool) -> Callable[[Draft], None]:
    """Make the index longer or shorter, and say so in its header or not."""

    def resize(draft: Draft) -> None:
        end = len(draft.index) - 8
        draft.index[end:end] = bytes(max(0, change))
        del draft.index[end + min(0, change) : end]
        if stated:
            draft.set("header", index_length=len(draft.index))

    return resize


def longer_file(draft: Draft) -> None:
    draft.set("file", 0, length=draft.get("file", 0).length + 4096)


def swapped_files(draft: Draft) -> None:
    draft.body["files"].reverse()


def section(name: str, /, **fields: Any) -> Callable[[Draft], None]:
    """Change the record of a section in the directory."""
    return lambda draft: draft.set("section", draft.section(name), **fields)


def moved_section(name: str, **steps: int) -> Callable[[Draft], None]:
    return lambda draft: moved("section", draft.section(name), **steps)(draft)


def more(**counts: int) -> Callable[[Draft], None]:
    """Give sections more records, without a word to the families."""

    def change(draft: Draft) -> None:
        draft.index = bytearray(grown(bytes(draft.index), more=counts))

    return change


def with_section(new: NewSection) -> Callable[[Draft], None]:
    def change(draft: Draft) -> None:
        draft.index = bytearray(grown(bytes(draft.index), new=[new]))

    return change


def slices(**fields: Any) -> Callable[[Draft], None]:
    """Add the section of slices, and change its record in the directory."""

    def change(draft: Draft) -> None:
        draft.replace(grown(bytes(draft.index), new=[NewSection("slices", 1, 16)]))
        draft.set("section", draft.section("slices"), **fields)

    return change


def any_section(name: str, /, **fields: Any) -> Callable[[Draft], None]:
    return slices(**fields) if name == "slices" else section(name, **fields)


def dirty_before(name: str | None) -> Callable[[Draft], None]:
    """Write into the bytes before a section, or before the trailer."""

    def change(draft: Draft) -> None:
        ends = [section.end for section in draft.directory.sections.values()]
        ends.insert(0, draft.at("section", len(ends)))
        at = ends[-1 if name is None else draft.section(name)]
        start = len(draft.index) - 8 if name is None else draft.directory[name].offset
        assert at < start, "nothing is between"
        draft.index[start - 1] = 1

    return change


def both(*changes: Callable[[Draft], object]) -> Callable[[Draft], None]:
    def change(draft: Draft) -> None:
        for each in changes:
            each(draft)

    return change


def set_rank(draft: Draft, rank: int, number: int) -> None:
    at = draft.directory["ranks"].at(rank)
    draft.index[at : at + 4] = struct.pack("<I", number)


SECTIONS = records.NEEDED_SECTIONS
ALIGNMENTS = ("blob_alignment", "part_alignment", "tensor_alignment")
BAD_NAMES = {
    "upwards": "../x",
    "a path": "a/b",
    "absolute": "/etc/passwd",
    "a path elsewhere": "a\\b",
    "a drive": "C:x",
    "the folder": ".",
    "the folder above": "..",
    "with a line feed": "a\nb",
    "with an escape": "\x1b[2J",
    "with a turn of direction": "a\u202eb",
    "of the index": "index.bin",
    "of the manifest": "manifest.json",
    "of the journal": "pack.journal",
    "with a dot at its end": "experts.",
    "of a device": "con",
    "of a device, with more": "Nul.bin",
    "of a port": "com1",
    "of a printer": "LPT0.tar.gz",
}
BAD_TEXTS = {
    "empty": b"",
    "as long as its field": b"n" * 300,
    "with more behind it": b"a\0b",
    "not in UTF-8": b"\xff",
}
BAD_WORDS = BAD_TEXTS | {"of many lines": b"a\nb", "with an escape": b"\x1b[2J", "odd": b"a b"}
"""Names that no section, family, part and type may have; of what is longer, the field is full."""

HEADER_RULES = [
    Rule("magic", header(magic=b"MOEPACK\1"), "magic"),
    Rule("version 0", header(format_version=0), "format_version: unknown format version"),
    Rule("version 2", header(format_version=2), "format_version: unknown format version"),
    Rule("a longer index", resized(64, stated=False), "index_length: wrong length"),
    Rule("a shorter index", resized(-64, stated=False), "index_length: wrong length"),
    Rule("a longer index, stated", resized(64, stated=True), "index_length: does not fit"),
    Rule("a shorter index, stated", resized(-64, stated=True), "shard_bytes: ends behind the"),
    Rule("no sections", header(section_count=0), "section_count: out of bounds"),
    Rule("257 sections", header(section_count=257), "section_count: out of bounds"),
    *(
        Rule(f"{name} of {length}", header(**{name: length}), f"{name}: wrong length")
        for name, least in (("header_length", 56), ("section_record_length", 48))
        for length in (0, least - 8, least + 4, (1 << 16) + 8, 1 << 31)
    ),
    Rule("a header as long as the index", header(header_length=4096), "directory: longer than"),
    Rule("a long directory", header(section_record_length=4096), "directory: longer than the"),
    *(
        Rule(f"{name} of {value}", header(**{name: value}), f"{name}: not an alignment")
        for name in ALIGNMENTS
        for value in (0, 3, 4097, 1 << 31, (1 << 32) + 1)
    ),
    Rule("parts above blobs", header(part_alignment=8192), "part_alignment: above the blobs'"),
]
DIRECTORY_RULES = [
    *(
        Rule(f"a name {what}", record("section", 7, name=name), "section 7: ")
        for what, name in BAD_WORDS.items()
    ),
    *(
        Rule(f"flags {flags:#x}", section("tensors", flags=flags), "tensors: unknown flags")
        for flags in (2, 3, 1 << 31)
    ),
    *(
        Rule(f"records of {length}", section("files", record_length=length), "files: record length")
        for length in (0, (1 << 16) + 1, (1 << 32) - 1)
    ),
    *(
        Rule(
            f"records of {name} {step} bytes off",
            any_section(name, record_length=length + step),
            f"{name}: wrong record length",
        )
        for name, length in records.RECORD_LENGTHS.items()
        for step in (-8, -2, 2)
        if length + step > 0
    ),
    Rule("blobs of 36 bytes", section("blobs", record_length=36), "blobs: wrong record length"),
    *(
        Rule(f"no {name}", section(name, record_count=0), f"{name}: count out of bounds")
        for name in SECTIONS
    ),
    *(
        Rule(
            f"too many of {name}",
            any_section(name, record_count=most + 1),
            f"{name}: count out of bounds",
        )
        for name, (_, most) in records.COUNTS.items()
    ),
    *(
        Rule(
            f"as many of {name} as may be",
            any_section(name, record_count=most),
            "ends behind the index",
        )
        for name, (_, most) in records.COUNTS.items()
    ),
    *(
        Rule(
            f"{name} not there",
            section(name, name=b"x", flags=0),
            f"{name}: the section is missing",
        )
        for name in SECTIONS
    ),
    Rule("a section twice", section("files", name=b"families"), "families: the section stands tw"),
    Rule(
        "an unknown one twice",
        both(with_section(NewSection("new")), with_section(NewSection("new"))),
        "new: the section stands twice",
    ),
    Rule(
        "an unknown one that is required",
        with_section(NewSection("pages", is_required=True)),
        "directory: needs the section 'pages'",
    ),
    Rule(
        "an unknown one of too many records",
        section("shard_bytes", name=b"x", record_count=(1 << 64) - 1),
        "x: ends behind the index",
    ),
    Rule(
        "an unknown one whose length is 2^64",
        section("shard_bytes", name=b"x", record_count=1 << 62, record_length=4),
        "x: ends behind the index",
    ),
    *(
        Rule(
            f"{name} moved by {step}",
            moved_section(name, offset=step),
            f"{name}: not where the section before it ends",
        )
        for name in ("files", "blobs", "shard_bytes")
        for step in (-64, 1, 64, 1 << 63)
    ),
    *(
        Rule(f"bytes before {name}", dirty_before(name), f"{name}: bytes before it are not zero")
        for name in ("files", "families", "blobs", "tensors", "shard_bytes")
    ),
    Rule("bytes before the trailer", dirty_before(None), "the trailer: bytes before it are not"),
    Rule("a rank too few", moved_section("ranks", record_count=-1), "tensors: bytes before it"),
    Rule("a rank too many", more(ranks=1), "ranks: not one for each blob"),
    Rule("a file that is not in the manifest", more(files=1), "files: two files have the same"),
    Rule("a blob of no family", more(blobs=1, ranks=1), "blobs: the families' records do not add"),
    Rule("a part of no family", more(parts=1), "parts: the families' records do not add up"),
    Rule("a part kind of no family", more(part_kinds=1), "part_kinds: the families' records do no"),
]
FILE_RULES = [
    *(Rule(f"a name {what}", renamed(name), "file 1: ") for what, name in BAD_NAMES.items()),
    *(Rule(f"a name {w}", record("file", 0, name=n), "file 0: ") for w, n in BAD_TEXTS.items()),
    Rule("a name twice", renamed("experts-00000.bin"), "files: two files have the same name"),
    Rule("a name twice, in capitals", renamed("EXPERTS-00000.bin"), "files: two files have the"),
    Rule("another kind", record("file", 0, kind=2), "file 0: unknown kind of file"),
    Rule("unknown flags", record("file", 0, flags=2), "file 0: unknown flags"),
    Rule("a length of 2^63", record("file", 0, length=1 << 63), "file 0: length out of bounds"),
    Rule("another length than in the manifest", longer_file, "files"),
    Rule("another order than in the manifest", swapped_files, "files"),
]
FAMILY_RULES = [
    *(
        Rule(f"{field} of {value}", record("family", 0, **{field: value}), f"family 0: {field}")
        for field, most in (("expert_count", 65536), ("parts_per_blob", 64))
        for value in (0, most + 1)
    ),
    *(
        Rule(f"another {name}", record("family", 1, **{name: value}), f"family 1: {name}: not the")
        for name, value in (
            *(("first_blob", 1), ("first_part_kind", 1), ("first_part", 1)),
            ("first_part", 1 << 63),
        )
    ),
    Rule("more parts than there are", record("family", 1, parts_per_blob=4), "family 1: more part"),
    Rule("fewer parts than there are", record("family", 1, parts_per_blob=2), "part_kinds: the f"),
    Rule("an expert too many", record("family", 1, expert_count=3), "blobs: the families' records"),
    Rule("an expert too few", record("family", 1, expert_count=1), "blobs: the families' records"),
    Rule("unknown flags", record("family", 0, flags=2), "family 0: unknown flags"),
    Rule("layers in another order", record("family", 0, layer=2), "families: not in the order"),
    Rule("a family twice", record("family", 1, layer=0), "families: two families have the same"),
    *(Rule(f"a name {w}", record("family", 0, name=n), "family 0: ") for w, n in BAD_WORDS.items()),
]


def kind(number: int, /, **fields: Any) -> Callable[[Draft], None]:
    return record("part_kind", number, **fields)


KIND_RULES = [
    Rule("rank 3", kind(0, dimension_count=3), "part 0: dimension_count out of bounds"),
    *(
        Rule(f"no shape: {what}", kind(0, **fields), "part 0: not a shape of")
        for what, fields in {
            "one axis too many": {"dimension_count": 1},
            "two axes too many": {"dimension_count": 0},
            "a second axis too many": {"dimension_count": 0, "ne0": 0},
            "one axis too few": {"ne1": 0},
            "no first axis": {"ne0": 0},
            "a product of 2^64": {"ne0": 1 << 32, "ne1": 1 << 32},
            "a product of 2^63": {"ne0": 1 << 31, "ne1": 1 << 32},
            "an axis of 2^63": {"dimension_count": 1, "ne0": 1 << 63, "ne1": 0},
            "an empty axis": {"dimension_count": 1, "ne0": 0, "ne1": 0},
        }.items()
    ),
    Rule("length 0", kind(0, length=0), "part 0: a part without bytes"),
    Rule("length 2^63", kind(0, length=1 << 63), "part 0: length out of bounds"),
    Rule("unknown flags", kind(0, flags=4), "part 0: unknown flags"),
    *(Rule(f"a name {w}", kind(5, name=n), "family 1: part 2: ") for w, n in BAD_WORDS.items()),
    *(Rule(f"a type {w}", kind(0, type_name=n), "part 0: ") for w, n in BAD_WORDS.items()),
    Rule("a name twice", kind(1, name=b"ffn_gate_exps.weight"), "family 0: two parts have the sa"),
    Rule("shard 2^16", kind(0, shard=1 << 16), "part 0: shard out of bounds"),
    Rule("no stride", kind(0, stride=0), "part 0: its origin is of two kinds, or of none"),
    Rule("a stride and slices", kind(0, first_slice=1), "part 0: its origin is of two kinds"),
    *(
        Rule(
            f"own tensors, and {name}",
            kind(0, **({"flags": 2, "shard_offset": 0, "stride": 0} | {name: 1})),
            "part 0: its origin is of two kinds",
        )
        for name in ("shard", "shard_offset", "stride")
    ),
    Rule("an origin at 2^63", kind(0, shard_offset=1 << 63), "part 0: length out of bounds"),
]
RECORD_RULES = [
    Rule("a rank past the end", record("blob", 0, rank=4), "blob 0: no such rank"),
    Rule("no length, but an offset", record("blob", 0, length=0), "blob 0: no length, but a place"),
    Rule("no length, but a file", record("blob", 2, length=0, offset=0), "blob 2: no length, but"),
    Rule(
        "no length, and a rank past the end",
        record("blob", 1, length=0, offset=0, rank=4),
        "blob 1: no such rank",
    ),
    Rule("a blob in no file", record("blob", 1, file=3), "blob 1: no such file"),
    Rule("a blob unaligned", record("blob", 0, offset=512, length=4096), "blob 0: offset not"),
    Rule("an uneven blob", moved("blob", 0, length=-1), "blob 0: length not aligned"),
    *(
        Rule(f"a blob {what}", moved("blob", 0, **step), "blob 0: ends behind the end of")
        for what, step in {
            "past the end": {"offset": 1 << 20},
            "one step past the end": {"offset": 4096},
            "too long": {"length": 1 << 20},
        }.items()
    ),
    *(
        Rule(f"a blob, {name}", record("blob", 1, **{name: (1 << 64) - 4096}), "blob 1: ends behin")
        for name in ("offset", "length")
    ),
    Rule("a part in no file", record("part", 7, file=3), "part 7 (ffn_up_exps.weight): no such fi"),
    Rule("a part with a codec", record("part", 7, codec=1), "part 7 (ffn_up_exps.weight): unknown"),
    Rule(
        "a part stored shorter", record("part", 7, stored_length=31), "part 7 (ffn_up_exps.weight"
    ),
    *(
        Rule(f"a part at {at}", record("part", 7, offset=at), "part 7 (ffn_up_exps.weight): ends b")
        for at in (1 << 40, (1 << 64) - 32, 24576 - 31)
    ),
    Rule("a part in another file", record("part", 0, file=1), "layer 0 expert 0 ffn_gate_exps.wei"),
    Rule("a part before its blob", record("part", 0, offset=0), "layer 0 expert 0 ffn_gate_exps.w"),
    Rule(
        "a part behind its blob", moved("part", 3, offset=12288), "layer 0 expert 1 ffn_gate_exps"
    ),
    Rule(
        "a part one byte past its blob",
        record("part", 3, offset=12288 - 31),
        "layer 0 expert 1 ffn_gate_exps.weight: a part lies outside",
    ),
    Rule(
        "no blob, and no shard",
        record("blob", 1, length=0, offset=0),
        "layer 0 expert 1 ffn_gate_exps.weight: a part of an expert without a blob",
    ),
    Rule("a rank of no blob", lambda draft: set_rank(draft, 0, 4), "rank 0: no such blob"),
    Rule("a rank of 2^32-1", lambda draft: set_rank(draft, 3, 0xFFFFFFFF), "rank 3: no such blob"),
]


def tensor(**fields: Any) -> Callable[[Draft], None]:
    return record("tensor", 1, **fields)


_TENSOR = "tensor 1 (blk.0.attn_norm.weight): "
TENSOR_RULES = [
    *(Rule(f"a name {w}", tensor(name=n), "tensor 1: ") for w, n in BAD_TEXTS.items()),
    *(
        Rule(f"a name {name!r}", tensor(name=name), "tensor 1: a name is not UTF-8")
        for name in (
            *(b"a\x80", b"\xc3", b"\xc3a", b"\xe2\x82", b"\xf0\x9f\x98", b"\xc0\x80", b"\xc1\xbf"),
            *(b"\xe0\x9f\xbf", b"\xf0\x8f\xbf\xbf", b"\xf4\x90\x80\x80", b"\xf8\x88\x80\x80\x80"),
            *(b"\xed\xa0\x80", b"\xed\xbf\xbf", b"\xfe", b"x" * 62 + b"\xc3"),
        )
    ),
    Rule("unknown flags", tensor(flags=2), _TENSOR + "unknown flags"),
    Rule("a codec", tensor(codec=1), _TENSOR + "unknown codec"),
    Rule("stored shorter", tensor(stored_length=15), _TENSOR + "stored_length is not"),
    Rule("five dimensions", tensor(dimension_count=5), _TENSOR + "dimension_count out of"),
    *(
        Rule(f"no shape: {what}", tensor(**fields), _TENSOR + "not a shape of")
        for what, fields in {
            "no dimension": {"dimension_count": 0},
            "an axis behind the last": {"ne3": 1},
            "an axis of 2^63": {"ne0": 1 << 63},
            "a product of 2^63": {"dimension_count": 4, "ne1": 1 << 30, "ne3": 1 << 31},
        }.items()
    ),
    Rule("no such file", tensor(file=3), _TENSOR + "no such file"),
    *(
        Rule(f"at byte {at}", tensor(offset=at), _TENSOR + "ends behind its file")
        for at in (20480 - 15, (1 << 64) - 16)
    ),
    Rule(
        "2^64 - 1 bytes",
        tensor(length=(1 << 64) - 1, stored_length=(1 << 64) - 1),
        _TENSOR + "ends behind its file",
    ),
    Rule("shard 2^16", tensor(shard=1 << 16), _TENSOR + "shard out of bounds"),
    Rule("from 2^63 - 15", tensor(shard_offset=(1 << 63) - 15), _TENSOR + "shard_offset out of"),
    *(Rule(f"a type {what}", tensor(type_name=name), _TENSOR) for what, name in BAD_WORDS.items()),
]


def overlapping_blobs(draft: Draft) -> None:
    """Put expert 1 where expert 0 lies, parts and all."""
    draft.set("blob", 0, offset=draft.get("blob", 1).offset)
    for number in range(3):
        draft.set("part", number, offset=draft.get("part", 3 + number).offset)


def uneven_file(draft: Draft) -> None:
    length = draft.get("file", 1).length + 64
    draft.set("file", 1, length=length)
    draft.body["files"][1]["length"] = length
    name = draft.path / draft.body["files"][1]["name"]
    name.write_bytes(name.read_bytes() + bytes(64))


# A reader relies on none of these; the verifier finds them.
VERIFIERS_RULES = [
    Rule("blobs overlap", overlapping_blobs, "the blob overlaps another"),
    Rule("parts overlap", moved("part", 1, offset=-4096), "overlaps the part before it"),
    Rule("a weight unaligned", moved("part", 2, offset=512), "is not aligned to 4096"),
    Rule("a file's end unaligned", uneven_file, "its length is not aligned"),
    Rule(
        "a rank twice",
        lambda draft: set_rank(draft, 1, draft.index[draft.directory["ranks"].offset]),
        "rank",
    ),
    Rule("ranks that differ", record("blob", 0, rank=3), "its record says 3"),
    Rule("hotness that rises", record("blob", 3, hotness=100), "is hotter than the one before it"),
    Rule("a part's digest", record("part", 4, digest=1), "digest: layer 0 expert 1"),
]
INDEX_RULES = {
    "header": HEADER_RULES,
    "directory": DIRECTORY_RULES,
    "file": FILE_RULES,
    "family": FAMILY_RULES,
    "kind": KIND_RULES,
    "record": RECORD_RULES,
}
