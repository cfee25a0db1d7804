"""Packs with one fault each."""

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from moepack import digest
from moepack.format import records
from tests.support.gguf_builder import F32, moe
from tests.support.models import pack_model

COUNTS = {(0, 0): 5, (0, 1): 9, (1, 0): 7, (1, 1): 0}
KINDS: dict[str, tuple[struct.Struct, Any]] = {
    "header": (records.Header.LAYOUT, records.Header),
    "file": (records.FileRecord.LAYOUT, records.FileRecord),
    "family": (records.FamilyRecord.LAYOUT, records.FamilyRecord),
    "part_kind": (records.PartKindRecord.LAYOUT, records.PartKindRecord),
    "blob": (records.BLOB, records.BlobRecord),
    "part": (records.PART, records.PartRecord),
}


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
        self.index = bytearray((path / "index.bin").read_bytes())
        self.body: dict[str, Any] = json.loads((path / "manifest.json").read_bytes())
        self.header = records.Header.unpack(self.index, 0)

    def at(self, kind: str, number: int) -> int:
        """Return the offset of a record."""
        first = (
            0 if kind == "header" else getattr(self.header, f"{kind}s_offset".replace("ys", "ies"))
        )
        return int(first) + number * KINDS[kind][0].size

    def get(self, kind: str, number: int = 0, /) -> Any:
        form, record = KINDS[kind]
        return record(*form.unpack_from(self.index, self.at(kind, number)))

    def set(self, kind: str, number: int = 0, /, **fields: Any) -> None:
        """Change fields of a record, and make sure that something changed."""
        before = self.get(kind, number)
        after = before._replace(**fields)
        assert tuple(after) != tuple(before)
        KINDS[kind][0].pack_into(self.index, self.at(kind, number), *after)

    def rename(self, number: int, name: str) -> None:
        """Return a data file another name, in the index and in the manifest alike."""
        self.set("file", number, name=name.encode("utf-8", "surrogateescape"))
        self.body["files"][number]["name"] = name

    def save(self) -> None:
        trailer = digest.of(bytes(self.index[:-8]))
        self.index[-8:] = struct.pack("<Q", trailer)
        self.body["index"] |= {"digest": digest.to_text(trailer), "length": len(self.index)}
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


LIMITS = {
    "file_count": records.MAX_FILES,
    "family_count": records.MAX_FAMILIES,
    "blob_count": records.MAX_BLOBS,
    "part_count": records.MAX_BLOBS * records.MAX_PARTS_IN_BLOB,
}
SECTIONS = ("files", "families", "part_kinds", "blobs", "parts", "ranks")
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
}
HEADER_RULES = [
    Rule("magic", header(magic=b"MOEPACK\1"), "magic"),
    Rule("version 0", header(format_version=0), "format_version: unknown format version"),
    Rule("version 2", header(format_version=2), "format_version: unknown format version"),
    Rule("feature 0", header(required_features=1), "required_features: needs features"),
    Rule("feature 1", header(required_features=2), "codecs"),
    Rule("both features", header(required_features=3), "external files, codecs"),
    Rule("feature 63", header(required_features=1 << 63), "bit 63"),
    Rule("a shorter header", header(header_length=64), "header_length: wrong length, expected 128"),
    Rule("a longer header", header(header_length=256), "header_length: wrong length, expected 128"),
    Rule("reserved", header(reserved=1), "header: reserved"),
    Rule("a longer index", resized(64, stated=False), "index_length: wrong length"),
    Rule("a shorter index", resized(-64, stated=False), "index_length: wrong length"),
    Rule("a longer index, stated", resized(64, stated=True), "index_length: does not fit"),
    Rule("a shorter index, stated", resized(-64, stated=True), "index_length: does not fit"),
    *(Rule(f"no {name}", header(**{name: 0}), f"{name}: out of bounds") for name in LIMITS),
    Rule("no part kinds", header(part_kind_count=0), "part_kind_count: out of bounds"),
    Rule("many part kinds", header(part_kind_count=(1 << 32) - 1), "part_kind_count: out of"),
    *(
        Rule(f"too many of {name}", header(**{name: limit + 1}), f"{name}: out of bounds")
        for name, limit in LIMITS.items()
    ),
    *(
        Rule(f"{name} one too many", moved("header", 0, **{name: 1}), "_offset: wrong offset")
        for name in ("file_count", "family_count", "blob_count", "part_count")
    ),
    *(
        Rule(f"{name} of {value}", header(**{name: value}), f"{name}: not an alignment")
        for name in ("blob_alignment", "part_alignment")
        for value in (0, 3, 4097, 1 << 31)
    ),
    Rule("parts above blobs", header(part_alignment=8192), "part_alignment"),
    *(
        Rule(f"{name} moved", moved("header", 0, **{f"{name}_offset": 64}), f"{name}_offset: wrong")
        for name in SECTIONS
    ),
    Rule("bytes between sections", lambda draft: dirty_gap(draft), "between sections"),
    Rule("an offset of 2^64-64", header(blobs_offset=(1 << 64) - 64), "blobs_offset: wrong offset"),
]
FILE_RULES = [
    *(Rule(f"a name {what}", renamed(name), "file 1: ") for what, name in BAD_NAMES.items()),
    Rule("no name", record("file", 0, name=b""), "file 0: a name is empty"),
    Rule("a name of 256 bytes", record("file", 0, name=b"n" * 256), "file 0: a name is"),
    Rule("bytes behind a name", record("file", 0, name=b"a\0b"), "file 0: a name is"),
    Rule("a name not in UTF-8", record("file", 0, name=b"\xff"), "file 0: a name is not UTF-8"),
    Rule("a name twice", renamed("experts-00000.bin"), "files: two files have the same name"),
    Rule("a file elsewhere", record("file", 0, kind=1), "file 0: unknown kind"),
    Rule("reserved", record("file", 0, reserved=1), "file 0"),
    Rule("more reserved", record("file", 0, reserved_more=b"\0" * 15 + b"\1"), "file 0"),
    Rule("a length of 2^63", record("file", 0, length=1 << 63), "file 0: length out of bounds"),
    Rule("another length than in the manifest", longer_file, "files"),
    Rule("another order than in the manifest", swapped_files, "files"),
]
FAMILY_RULES = [
    Rule("no experts", record("family", 0, expert_count=0), "family 0: expert_count out of bounds"),
    Rule("many experts", record("family", 0, expert_count=65537), "family 0: expert_count out of"),
    Rule(
        "no parts", record("family", 0, parts_per_blob=0), "family 0: parts_per_blob out of bounds"
    ),
    Rule(
        "65 parts", record("family", 0, parts_per_blob=65), "family 0: parts_per_blob out of bounds"
    ),
    Rule(
        "more parts than there are",
        record("family", 1, parts_per_blob=4),
        "family 1: more part kinds",
    ),
    Rule(
        "fewer parts than there are",
        record("family", 1, parts_per_blob=2),
        "families: counts do not",
    ),
    Rule("an expert too many", record("family", 1, expert_count=3), "families: counts do not"),
    Rule("an expert too few", record("family", 1, expert_count=1), "families: counts do not"),
    *(
        Rule(f"another {name}", record("family", 1, **{name: 1}), "family 1: first records")
        for name in ("first_blob", "first_part_kind", "first_part")
    ),
    Rule(
        "a first part of 2^63", record("family", 1, first_part=1 << 63), "family 1: first records"
    ),
    Rule("unknown flags", record("family", 0, flags=2), "family 0: unknown flags"),
    Rule("layers in another order", record("family", 0, layer=2), "families: not ordered"),
    Rule("a family twice", record("family", 1, layer=0), "families: not ordered"),
    Rule("a family without a name", record("family", 0, name=b""), "family 0: a name is empty"),
    Rule("a family of many lines", record("family", 0, name=b"a\nb"), "family 0"),
    Rule(
        "a family not in UTF-8", record("family", 0, name=b"\xff"), "family 0: a name is not UTF-8"
    ),
]
KIND_RULES = [
    Rule(
        "rank 3",
        record("part_kind", 0, dimension_count=3),
        "family 0: part 0: dimension_count out of bounds",
    ),
    Rule(
        "a rank without its axis", record("part_kind", 0, dimension_count=1), "part 0: not a shape"
    ),
    Rule(
        "a product of 2^64", record("part_kind", 0, ne0=1 << 32, ne1=1 << 32), "part 0: not a shape"
    ),
    Rule("an empty shape", record("part_kind", 0, ne1=0), "part 0: "),
    Rule("length 0", record("part_kind", 0, length=0), "part 0: length out of bounds"),
    Rule("length 2^63", record("part_kind", 0, length=1 << 63), "part 0: length out of bounds"),
    Rule("unknown flags", record("part_kind", 0, flags=2), "part 0: unknown flags"),
    Rule("no name", record("part_kind", 0, name=b""), "part 0: a name is empty"),
    Rule("64 bytes", record("part_kind", 5, name=b"n" * 64), "family 1: part 2: a name is"),
    Rule("not UTF-8", record("part_kind", 0, name=b"\xff"), "part 0: a name is not UTF-8"),
    Rule("several lines", record("part_kind", 0, name=b"up\nup"), "part 0"),
    Rule("an escape", record("part_kind", 0, name=b"\x1b[2J"), "part 0"),
    Rule(
        "a name twice", record("part_kind", 1, name=b"ffn_gate_exps.weight"), "family 0: two parts"
    ),
    Rule("no type name", record("part_kind", 0, type_name=b""), "part 0: a name is empty"),
    Rule("a type of many lines", record("part_kind", 0, type_name=b"F\n"), "part 0"),
]
RECORD_RULES = [
    Rule("a blob in no file", record("blob", 1, file=2), "blob 1: record out of bounds"),
    Rule("a blob past the end", moved("blob", 1, offset=1 << 20), "blob 1: record out of bounds"),
    Rule(
        "a blob at 2^64-4096", record("blob", 1, offset=(1 << 64) - 4096), "blob 1: record out of"
    ),
    Rule("a blob without bytes", record("blob", 0, length=0), "blob 0: record out of bounds"),
    Rule("a blob too long", moved("blob", 1, length=1 << 20), "blob 1: record out of bounds"),
    Rule(
        "a blob of 2^64-4096", record("blob", 0, length=(1 << 64) - 4096), "blob 0: record out of"
    ),
    Rule("a blob unaligned", record("blob", 0, offset=512, length=4096), "blob 0: record out of"),
    Rule("an uneven blob", moved("blob", 0, length=-1), "blob 0: record out of bounds"),
    Rule("rank past the end", record("blob", 0, rank=4), "blob 0: record out of bounds"),
    Rule("a part in no file", record("part", 7, file=2), "part 7 ("),
    Rule("a part with a codec", record("part", 7, codec=1), "part 7 ("),
    Rule("a part, reserved", record("part", 7, reserved=1), "part 7 ("),
    Rule("a part stored shorter", record("part", 7, stored_length=31), "part 7 ("),
    Rule("a part past the end", moved("part", 7, offset=1 << 40), "part 7 ("),
    Rule("a part at 2^64-32", record("part", 7, offset=(1 << 64) - 32), "part 7 ("),
    Rule("a part in another file", record("part", 0, file=1), "outside its blob"),
    Rule("a part before its blob", record("part", 0, offset=0), "outside its blob"),
    Rule("a part behind its blob", moved("part", 3, offset=12288), "outside its blob"),
    Rule("a rank of no blob", lambda draft: set_rank(draft, 0, 4), "rank 0: no such blob"),
    Rule("a rank of 2^32-1", lambda draft: set_rank(draft, 3, 0xFFFFFFFF), "rank 3: no such blob"),
]


def set_rank(draft: Draft, rank: int, number: int) -> None:
    at = draft.header.ranks_offset + 4 * rank
    draft.index[at : at + 4] = struct.pack("<I", number)


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
    draft.body["files"][1]["digest"] = digest.to_text(digest.of(name.read_bytes()))


def dirty_gap(draft: Draft) -> None:
    """Write into the bytes between the ranks and the trailer."""
    at = draft.header.ranks_offset + 16
    assert at < len(draft.index) - 8
    draft.index[at] = 1


# A reader relies on none of these; the verifier finds them.
VERIFIERS_RULES = [
    Rule("blobs overlap", overlapping_blobs, "the blob overlaps another"),
    Rule("parts overlap", moved("part", 1, offset=-4096), "overlaps the part before it"),
    Rule("a weight unaligned", moved("part", 2, offset=512), "is not aligned to 4096"),
    Rule("a file's end unaligned", uneven_file, "its length is not aligned"),
    Rule(
        "a rank twice",
        lambda draft: set_rank(draft, 1, draft.index[draft.header.ranks_offset]),
        "rank",
    ),
    Rule("ranks that differ", record("blob", 0, rank=3), "its record says 3"),
    Rule("hotness that rises", record("blob", 3, hotness=100), "is hotter than the one before it"),
    Rule("a part's digest", record("part", 4, digest=1), "digest: layer 0 expert 1"),
]
INDEX_RULES = {
    "header": HEADER_RULES,
    "file": FILE_RULES,
    "family": FAMILY_RULES,
    "kind": KIND_RULES,
    "record": RECORD_RULES,
}
