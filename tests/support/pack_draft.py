"""A pack that a test takes apart, changes and puts together again, with all digests made right."""

import hashlib
import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from moepack import digest
from moepack.format import records
from moepack.format.manifest import PAGE_LENGTH
from tests.support.gguf_builder import F32, moe
from tests.support.models import pack_model

COUNTS = {(0, 0): 5, (0, 1): 9, (1, 0): 7, (1, 1): 0}
KINDS: dict[str, tuple[str, struct.Struct, Any]] = {
    "file": ("files", records.FileRecord.LAYOUT, records.FileRecord),
    "family": ("families", records.FamilyRecord.LAYOUT, records.FamilyRecord),
    "part_kind": ("part_kinds", records.PartKindRecord.LAYOUT, records.PartKindRecord),
    "blob": ("blobs", records.BLOB, records.BlobRecord),
    "part": ("parts", records.PART, records.PartRecord),
    "slice": ("slices", records.SliceRecord.LAYOUT, records.SliceRecord),
    "tensor": ("tensors", records.TensorRecord.LAYOUT, records.TensorRecord),
    "shard_bytes": ("shard_bytes", records.ShardBytesRecord.LAYOUT, records.ShardBytesRecord),
    "header": ("", records.Header.LAYOUT, records.Header),
    "section": ("", records.SectionRecord.LAYOUT, records.SectionRecord),
}
"""By kind of record: its section, its bytes, its fields."""


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


class Piece(NamedTuple):
    """A section as it stands in an index: its record in the directory, and its bytes."""

    name: bytes
    data: bytes
    record_length: int
    flags: int

    @property
    def record_count(self) -> int:
        return len(self.data) // self.record_length if self.record_length else 0


class Draft:
    """A pack whose index and manifest a test changes; `save` makes all digests right again.

    A `compact` manifest has a line for each key and no more.
    """

    def __init__(self, path: Path, *, compact: bool = False) -> None:
        self.path = path
        self.compact = compact
        self.body: dict[str, Any] = json.loads((path / "manifest.json").read_bytes())
        self.index = bytearray((path / self.body["index"]["name"]).read_bytes())

    @property
    def header(self) -> records.Header:
        return records.Header.unpack(self.index, 0)

    @property
    def sections(self) -> dict[str, records.SectionRecord]:
        """The records of the directory, by name."""
        size = records.SectionRecord.LAYOUT.size
        held = [
            records.SectionRecord.unpack(self.index, records.Header.LAYOUT.size + n * size)
            for n in range(self.header.section_count)
        ]
        return {section.name.rstrip(b"\0").decode(): section for section in held}

    def number_of(self, section: str) -> int:
        """Return the number of a section's record in the directory."""
        return list(self.sections).index(section)

    def at(self, kind: str, number: int) -> int:
        """Return the offset of a record."""
        if kind == "header":
            return 0
        if kind == "section":
            return records.Header.LAYOUT.size + number * records.SectionRecord.LAYOUT.size
        section = self.sections[KINDS[kind][0]]
        return section.offset + number * section.record_length

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
        """Give a data file another name, in the index and in the manifest alike."""
        self.set("file", number, name=name.encode("utf-8", "surrogateescape"))
        self.body["files"][number]["name"] = name

    def resize(self, number: int, length: int) -> None:
        """State another length of a data file, in the index and in the manifest alike."""
        self.set("file", number, length=length)
        self.body["files"][number]["length"] = length

    def lengthen(self, number: int, data: bytes) -> None:
        """Append to a data file, and say so everywhere."""
        with open(self.path / self.body["files"][number]["name"], "ab") as file:
            file.write(data)
        self.resize(number, self.get("file", number).length + len(data))

    def pieces(self) -> list[Piece]:
        """Take the index apart."""
        return [
            Piece(
                held.name,
                bytes(self.index[held.offset :][: held.record_count * held.record_length]),
                held.record_length,
                held.flags,
            )
            for held in self.sections.values()
        ]

    def rebuild(
        self, pieces: list[Piece], *, header_more: bytes = b"", section_more: bytes = b""
    ) -> None:
        """Put an index together again, with a longer header and a longer directory if asked."""
        header_length = records.Header.LAYOUT.size + len(header_more)
        record_length = records.SectionRecord.LAYOUT.size + len(section_more)
        position = _aligned(header_length + len(pieces) * record_length)
        directory, body = b"", b""
        for name, data, length, flags in pieces:
            count = len(data) // length
            directory += records.SectionRecord(name, position, count, length, flags).pack()
            directory += section_more
            body += data + bytes(_aligned(len(data)) - len(data))
            position += _aligned(len(data))
        header = self.header._replace(
            header_length=header_length,
            section_count=len(pieces),
            section_record_length=record_length,
            index_length=position + 8,
        )
        start = header.pack() + header_more + directory
        self.index = bytearray(start + bytes(_aligned(len(start)) - len(start)) + body + bytes(8))

    def save(self) -> None:
        """Write index and manifest, with all digests made right."""
        trailer = digest.of(bytes(self.index[:-8]))
        self.index[-8:] = struct.pack("<Q", trailer)
        (self.path / self.body["index"]["name"]).write_bytes(self.index)
        entry = self.body["index"] | {
            "digest": digest.to_text(trailer),
            "length": len(self.index),
        }
        pages = [self.index[at : at + PAGE_LENGTH] for at in range(0, len(self.index), PAGE_LENGTH)]
        entry["pages"] = {
            "length": PAGE_LENGTH,
            "digests": [digest.to_text(digest.of(page)) for page in pages],
        }
        self.body["index"] = entry
        self.save_manifest()

    def save_manifest(self) -> None:
        """Write the manifest, with its own digest made right."""
        self.body.pop("manifest_digest", None)
        text = json.dumps(self.body, indent=2)
        if self.compact:
            lines = (f"  {json.dumps(key)}: {json.dumps(held)}" for key, held in self.body.items())
            text = "{\n" + ",\n".join(lines) + "\n}"
        (self.path / "manifest.json").write_bytes(sealed(text))


def _aligned(length: int) -> int:
    return -(-length // 64) * 64


def sealed(text: str) -> bytes:
    """Add the digest to a manifest that lacks it."""
    signed = text[: text.rindex("\n}")].encode("utf-8", "surrogatepass")
    return signed + f',\n  "manifest_digest": "{digest.to_text(digest.of(signed))}"\n}}\n'.encode()


class Rule(NamedTuple):
    """One broken rule: how, and the place and the problem that the reader's error names."""

    name: str
    breaks: Callable[[Draft], object]
    place: str
    problem: str

    @property
    def words(self) -> str:
        """What the message holds of the two."""
        return f"{self.place}: {self.problem}"


Change = Callable[[Draft], None]


def header(**fields: Any) -> Change:
    return lambda draft: draft.set("header", **fields)


def record(kind: str, number: int, /, **fields: Any) -> Change:
    return lambda draft: draft.set(kind, number, **fields)


def moved(kind: str, number: int, /, **steps: int) -> Change:
    """Add to fields of a record."""

    def change(draft: Draft) -> None:
        held = draft.get(kind, number)
        draft.set(kind, number, **{name: getattr(held, name) + n for name, n in steps.items()})

    return change


def shifted(kind: str, number: int, /, **multiples: float) -> Change:
    """Add multiples of the blobs' alignment to fields of a record."""

    def change(draft: Draft) -> None:
        alignment = draft.header.blob_alignment
        steps = {name: int(times * alignment) for name, times in multiples.items()}
        moved(kind, number, **steps)(draft)

    return change


def section(name: str, /, **fields: Any) -> Change:
    """Change the record of a section in the directory."""
    return lambda draft: draft.set("section", draft.number_of(name), **fields)


def all_of(*changes: Callable[[Draft], object]) -> Change:
    def change(draft: Draft) -> None:
        for each in changes:
            each(draft)

    return change


def renamed(name: str) -> Change:
    """Give a file another name, in the index alone."""
    return record("file", 1, name=name.encode())


def resized(change: int, *, stated: bool) -> Change:
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


def stated(**values: Any) -> Change:
    """Change keys of the manifest."""

    def change(draft: Draft) -> None:
        assert {key: draft.body[key] for key in values} != values
        draft.body |= values

    return change


def without(name: str) -> Change:
    """Leave a section out."""

    def change(draft: Draft) -> None:
        draft.rebuild([piece for piece in draft.pieces() if _name(piece) != name])

    return change


def added(*pieces: Piece) -> Change:
    """Add sections at the end."""
    return lambda draft: draft.rebuild([*draft.pieces(), *pieces])


def replaced(name: str, **fields: Any) -> Change:
    """Give a section other bytes, record lengths or flags."""

    def change(draft: Draft) -> None:
        held = draft.pieces()
        new = [piece._replace(**fields) if _name(piece) == name else piece for piece in held]
        assert new != held
        draft.rebuild(new)

    return change


def fewer(name: str) -> Change:
    """Leave out the last record of a section."""

    def change(draft: Draft) -> None:
        piece = next(piece for piece in draft.pieces() if _name(piece) == name)
        replaced(name, data=piece.data[: -piece.record_length])(draft)

    return change


def more(name: str) -> Change:
    """Repeat the last record of a section."""

    def change(draft: Draft) -> None:
        piece = next(piece for piece in draft.pieces() if _name(piece) == name)
        replaced(name, data=piece.data + piece.data[-piece.record_length :])(draft)

    return change


def _name(piece: Piece) -> str:
    return piece.name.rstrip(b"\0").decode()


def counted(name: str, count: int) -> Change:
    """State another count of a section's records, in the directory alone."""
    return section(name, record_count=count)


def pushed(name: str, step: int) -> Change:
    """Move a section, in the directory alone."""
    return lambda draft: moved("section", draft.number_of(name), offset=step)(draft)


def swapped_sections(draft: Draft) -> None:
    """Let the second section stand first."""
    first, second, *others = draft.pieces()
    draft.rebuild([second, first, *others])


def cut_to(length: int) -> Change:
    """Cut the index off."""

    def change(draft: Draft) -> None:
        del draft.index[length:]

    return change


def dirty_gap(before: str) -> Change:
    """Write into the bytes before a section, or before the trailer."""

    def change(draft: Draft) -> None:
        held = draft.sections
        end = held[before].offset if before in held else len(draft.index) - 8
        ends = [one.offset + one.record_count * one.record_length for one in held.values()]
        assert end not in ends, "nothing lies between"
        draft.index[end - 1] = 1

    return change


def set_rank(draft: Draft, rank: int, number: int) -> None:
    at = draft.sections["ranks"].offset + 4 * rank
    draft.index[at : at + 4] = struct.pack("<I", number)


def ranked(rank: int, number: int) -> Change:
    return lambda draft: set_rank(draft, rank, number)


def without_blobs(draft: Draft, *, kind: int = records.SHARD_FILE) -> None:
    """Make the first file a shard, in which the parts of both of its blobs lie apart."""
    if kind != draft.get("file", 0).kind:
        draft.set("file", 0, kind=kind)
    for number in range(2):
        draft.set("blob", number, offset=0, length=0)


def second_places(draft: Draft, *, file: int = 4, offset: int = 0, kind: int = 2) -> None:
    """Give the first part a second place, in a file of its own; file number 3 is that file."""
    part = draft.get("part")
    data = (draft.path / "experts-00000.bin").read_bytes()[part.offset :][: part.stored_length]
    alignment = draft.header.part_alignment
    name, length = "second.bin", -(-len(data) // alignment) * alignment
    (draft.path / name).write_bytes(data + bytes(length - len(data)))
    pieces = {_name(piece): piece for piece in draft.pieces()}
    held = pieces["files"]
    new = records.FileRecord(name.encode(), length, kind, 0).pack()
    pieces["files"] = held._replace(data=held.data + new)
    draft.body["files"].append({"name": name, "length": length})
    records_of_parts = [records.SecondPlaceRecord(file, offset)]
    records_of_parts += [records.SecondPlaceRecord(0, 0)] * (pieces["parts"].record_count - 1)
    places = b"".join(place.pack() for place in records_of_parts)
    draft.rebuild([*pieces.values(), Piece(b"second_places", places, 16, 0)])


def strong_digests(*, other: int | None = None) -> Change:
    """Add the SHA-256 of all parts, tensors and shard bytes; of record `other` it is wrong."""

    def change(draft: Draft) -> None:
        files = [draft.path / entry["name"] for entry in draft.body["files"]]
        digests = []
        for kind in ("part", "tensor", "shard_bytes"):
            for number in range(draft.sections[KINDS[kind][0]].record_count):
                held = draft.get(kind, number)
                length = getattr(held, "stored_length", None) or held.length
                data = files[held.file].read_bytes()[held.offset : held.offset + length]
                digests.append(hashlib.sha256(data).digest())
        if other is not None:
            digests[other] = bytes(32)
        draft.rebuild([*draft.pieces(), Piece(b"strong_digests", b"".join(digests), 32, 0)])

    return change


def with_codecs(
    name: bytes = b"zstd", *, flags: int = records.SECTION_REQUIRED, count: int | None = None
) -> Change:
    """State a codec, and `count` digests of stored bytes (all: None); no part is stored by it."""

    def change(draft: Draft) -> None:
        numbers = range(draft.sections["parts"].record_count)[:count]
        digests = b"".join(struct.pack("<Q", draft.get("part", n).digest) for n in numbers)
        sections = [Piece(b"codecs", name.ljust(32, b"\0"), 32, flags)]
        if digests:
            sections.append(Piece(b"stored_digests", digests, 8, 0))
        added(*sections)(draft)

    return change


def codec_twice(draft: Draft) -> None:
    """State the same codec twice."""
    with_codecs()(draft)
    more("codecs")(draft)


def own_tensors(count: int = 2, *, shard: int = 0) -> Change:
    """Give the experts of the first part kind a tensor each, with `count` slices."""

    def change(draft: Draft) -> None:
        held = draft.get("part_kind")
        flags = held.flags | records.OWN_TENSORS
        draft.set("part_kind", 0, flags=flags, shard=0, shard_offset=0, stride=0)
        size = records.SliceRecord.LAYOUT.size
        slices = [
            records.SliceRecord(shard, held.shard_offset + n * held.stride).pack()
            for n in range(count)
        ]
        draft.rebuild([*draft.pieces(), Piece(b"slices", b"".join(slices), size, 0)])

    return change
