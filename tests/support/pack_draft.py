"""A pack that a test takes apart, changes and puts together again, with all digests made right."""

import hashlib
import json
import shutil
import struct
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, NamedTuple, ParamSpec

import pytest

from moepack.common import digest
from moepack.pack.format import records
from moepack.pack.format.manifest import PAGE_LENGTH
from tests.support.gguf_builder import F32, moe
from tests.support.models import pack_model

COUNTS = {(0, 0): 5, (0, 1): 9, (1, 0): 7, (1, 1): 0}
KINDS: dict[str, tuple[str, struct.Struct, Any]] = {
    "file": ("files", records.FILE, records.FileRecord),
    "family": ("families", records.FAMILY, records.FamilyRecord),
    "part_kind": ("part_kinds", records.PART_KIND, records.PartKindRecord),
    "blob": ("blobs", records.BLOB, records.BlobRecord),
    "part": ("parts", records.PART, records.PartRecord),
    "slice": ("slices", records.SLICE, records.SliceRecord),
    "tensor": ("tensors", records.TENSOR, records.TensorRecord),
    "shard_bytes": ("shard_bytes", records.SHARD_BYTES, records.ShardBytesRecord),
    "header": ("", records.HEADER, records.Header),
    "section": ("", records.SECTION, records.SectionRecord),
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


def name_of(piece: Piece) -> str:
    return piece.name.rstrip(b"\0").decode()


def lengthened(piece: Piece, more: bytes) -> Piece:
    """Return a section with `more` at the end of each of its records."""
    length = piece.record_length
    starts = range(0, len(piece.data), length)
    data = b"".join(piece.data[at : at + length] + more for at in starts)
    return piece._replace(data=data, record_length=length + len(more))


class Draft:
    """A pack with an index and a manifest to change; `save` makes all digests right again.

    A `compact` manifest has a line for each key and no more.
    """

    def __init__(self, path: Path, *, compact: bool = False) -> None:
        self.path = path
        self.compact = compact
        self.body: dict[str, Any] = json.loads((path / "manifest.json").read_bytes())
        self.index = bytearray((path / self.body["index"]["name"]).read_bytes())

    @property
    def header(self) -> records.Header:
        return records.Header._make(records.HEADER.unpack_from(self.index, 0))

    @property
    def sections(self) -> dict[str, records.SectionRecord]:
        """The records of the directory, by name."""
        size = records.SECTION.size
        entries = [
            records.SectionRecord._make(
                records.SECTION.unpack_from(self.index, records.HEADER.size + n * size)
            )
            for n in range(self.header.section_count)
        ]
        return {section.name.rstrip(b"\0").decode(): section for section in entries}

    def number_of(self, section: str) -> int:
        """Return the number of a section's record in the directory."""
        return list(self.sections).index(section)

    def at(self, kind: str, number: int) -> int:
        """Return the offset of a record."""
        if kind == "header":
            return 0
        if kind == "section":
            return records.HEADER.size + number * records.SECTION.size
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

    def read(self, record: Any) -> bytes:
        """Return the bytes of a part, a tensor or bytes of a shard, by its record."""
        length: int = record._asdict().get("stored_length") or record.length
        return self.bytes_at(record.file, record.offset, length)

    def bytes_at(self, file: int, offset: int, length: int) -> bytes:
        with open(self.path / self.body["files"][file]["name"], "rb") as data_file:
            data_file.seek(offset)
            return data_file.read(length)

    def write(self, file: int, offset: int, data: bytes) -> None:
        """Write into a data file."""
        with open(self.path / self.body["files"][file]["name"], "r+b") as data_file:
            data_file.seek(offset)
            data_file.write(data)

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
                section.name,
                bytes(self.index[section.offset :][: section.record_count * section.record_length]),
                section.record_length,
                section.flags,
            )
            for section in self.sections.values()
        ]

    def rebuild(
        self, pieces: list[Piece], *, header_more: bytes = b"", section_more: bytes = b""
    ) -> None:
        """Put an index together again, with a longer header and a longer directory if asked."""
        header_length = records.HEADER.size + len(header_more)
        record_length = records.SECTION.size + len(section_more)
        position = _aligned(header_length + len(pieces) * record_length)
        directory, body = b"", b""
        for name, data, length, flags in pieces:
            count = len(data) // length
            directory += records.SECTION.pack(
                *records.SectionRecord(name, position, count, length, flags)
            )
            directory += section_more
            body += data + bytes(_aligned(len(data)) - len(data))
            position += _aligned(len(data))
        header = self.header._replace(
            header_length=header_length,
            section_count=len(pieces),
            section_record_length=record_length,
            index_length=position + 8,
        )
        start = records.HEADER.pack(*header) + header_more + directory
        self.index = bytearray(start + bytes(_aligned(len(start)) - len(start)) + body + bytes(8))

    def save(self) -> None:
        """Write index and manifest, with all digests made right."""
        trailer = digest.xxh3(bytes(self.index[:-8]))
        self.index[-8:] = struct.pack("<Q", trailer)
        (self.path / self.body["index"]["name"]).write_bytes(self.index)
        entry = self.body["index"] | {
            "digest": digest.to_text(trailer),
            "length": len(self.index),
        }
        pages = [self.index[at : at + PAGE_LENGTH] for at in range(0, len(self.index), PAGE_LENGTH)]
        entry["pages"] = {
            "length": PAGE_LENGTH,
            "digests": [digest.to_text(digest.xxh3(page)) for page in pages],
        }
        self.body["index"] = entry
        self.save_manifest()

    def save_manifest(self) -> None:
        """Write the manifest, with its own digest made right."""
        self.body.pop("manifest_digest", None)
        text = json.dumps(self.body, indent=2)
        if self.compact:
            lines = (
                f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in self.body.items()
            )
            text = "{\n" + ",\n".join(lines) + "\n}"
        (self.path / "manifest.json").write_bytes(sealed(text))


def _aligned(length: int) -> int:
    return -(-length // 64) * 64


def sealed(text: str) -> bytes:
    """Add the digest to a manifest that lacks it."""
    signed = text[: text.rindex("\n}")].encode("utf-8", "surrogatepass")
    return (
        signed + f',\n  "manifest_digest": "{digest.to_text(digest.xxh3(signed))}"\n}}\n'.encode()
    )


class Rule(NamedTuple):
    """One broken rule: how, and the place and the problem that the reader's error names."""

    name: str
    breaks: Callable[[Draft], object]
    place: str
    problem: str

    @property
    def words(self) -> str:
        """The words of the message."""
        return f"{self.place}: {self.problem}"


P = ParamSpec("P")
Change = Callable[[Draft], None]


def later(function: Callable[Concatenate[Draft, P], object]) -> Callable[P, Change]:
    """Let a function be called without its draft, and return the change to be made to one."""

    @wraps(function)
    def with_arguments(*arguments: P.args, **options: P.kwargs) -> Change:
        def change(draft: Draft) -> None:
            function(draft, *arguments, **options)

        return change

    return with_arguments


def header(**fields: Any) -> Change:
    return lambda draft: draft.set("header", **fields)


def record(kind: str, number: int, /, **fields: Any) -> Change:
    return lambda draft: draft.set(kind, number, **fields)


@later
def moved(draft: Draft, kind: str, number: int, /, **steps: int) -> None:
    """Add to fields of a record."""
    before = draft.get(kind, number)
    draft.set(kind, number, **{name: getattr(before, name) + n for name, n in steps.items()})


@later
def shifted(draft: Draft, kind: str, number: int, /, **multiples: float) -> None:
    """Add multiples of the blobs' alignment to fields of a record."""
    alignment = draft.header.blob_alignment
    steps = {name: int(times * alignment) for name, times in multiples.items()}
    moved(kind, number, **steps)(draft)


def section(name: str, /, **fields: Any) -> Change:
    """Change the record of a section in the directory."""
    return lambda draft: draft.set("section", draft.number_of(name), **fields)


@later
def all_of(draft: Draft, *changes: Callable[[Draft], object]) -> None:
    for each in changes:
        each(draft)


def renamed(name: str) -> Change:
    """Give a file another name, in the index alone."""
    return record("file", 1, name=name.encode())


@later
def resized(draft: Draft, change: int, *, in_header: bool) -> None:
    """Make the index longer or shorter, and say so in its header or not."""
    end = len(draft.index) - 8
    draft.index[end:end] = bytes(max(0, change))
    del draft.index[end + min(0, change) : end]
    if in_header:
        draft.set("header", index_length=len(draft.index))


@later
def stated(draft: Draft, /, **values: Any) -> None:
    """Change keys of the manifest."""
    assert {key: draft.body[key] for key in values} != values
    draft.body |= values


@later
def without(draft: Draft, name: str) -> None:
    """Leave a section out."""
    draft.rebuild([piece for piece in draft.pieces() if name_of(piece) != name])


def added(*pieces: Piece) -> Change:
    """Add sections at the end."""
    return lambda draft: draft.rebuild([*draft.pieces(), *pieces])


@later
def replaced(draft: Draft, name: str, /, **fields: Any) -> None:
    """Give a section other bytes, record lengths or flags."""
    before = draft.pieces()
    new = [piece._replace(**fields) if name_of(piece) == name else piece for piece in before]
    assert new != before
    draft.rebuild(new)


@later
def fewer(draft: Draft, name: str) -> None:
    """Leave out the last record of a section."""
    piece = next(piece for piece in draft.pieces() if name_of(piece) == name)
    replaced(name, data=piece.data[: -piece.record_length])(draft)


@later
def more(draft: Draft, name: str) -> None:
    """Repeat the last record of a section."""
    piece = next(piece for piece in draft.pieces() if name_of(piece) == name)
    replaced(name, data=piece.data + piece.data[-piece.record_length :])(draft)


def counted(name: str, count: int) -> Change:
    """State another count of a section's records, in the directory alone."""
    return section(name, record_count=count)


def pushed(name: str, step: int) -> Change:
    """Move a section, in the directory alone."""
    return lambda draft: moved("section", draft.number_of(name), offset=step)(draft)


@later
def cut_to(draft: Draft, length: int) -> None:
    """Cut the index off."""
    del draft.index[length:]


@later
def dirty_gap(draft: Draft, before: str) -> None:
    """Write into the bytes before a section, or before the trailer."""
    sections = draft.sections
    end = sections[before].offset if before in sections else len(draft.index) - 8
    ends = [one.offset + one.record_count * one.record_length for one in sections.values()]
    assert end not in ends, "nothing lies between"
    draft.index[end - 1] = 1


def move_part(draft: Draft, number: int, step: int) -> None:
    """Move a part with its bytes, and leave zeros behind."""
    part, content = draft.get("part", number), draft.read(draft.get("part", number))
    draft.write(part.file, part.offset, bytes(len(content)))
    draft.write(part.file, part.offset + step, content)
    draft.set("part", number, offset=part.offset + step)


def set_rank(draft: Draft, rank: int, number: int) -> None:
    at = draft.sections["ranks"].offset + 4 * rank
    draft.index[at : at + 4] = struct.pack("<I", number)


def without_blobs(draft: Draft, *, kind: int = records.SHARD_FILE) -> None:
    """Make the first file a shard, in which the parts of both of its blobs lie apart."""
    if kind != draft.get("file", 0).kind:
        draft.set("file", 0, kind=kind)
    for number in range(2):
        draft.set("blob", number, offset=0, length=0)


@later
def strong_digests(draft: Draft, *, other: int | None = None) -> None:
    """Add the SHA-256 of all parts, tensors and shard bytes; of record `other` it is wrong."""
    digests = [
        hashlib.sha256(draft.read(draft.get(kind, number))).digest()
        for kind in ("part", "tensor", "shard_bytes")
        if KINDS[kind][0] in draft.sections
        for number in range(draft.sections[KINDS[kind][0]].record_count)
    ]
    if other is not None:
        digests[other] = bytes(32)
    draft.rebuild([*draft.pieces(), Piece(b"strong_digests", b"".join(digests), 32, 0)])


@later
def own_tensors(draft: Draft, count: int = 2, *, shard: int = 0) -> None:
    """Give the experts of the first part kind a tensor each, with `count` slices."""
    kind = draft.get("part_kind")
    flags = kind.flags | records.OWN_TENSORS
    draft.set("part_kind", 0, flags=flags, shard=0, shard_offset=0, stride=0)
    size = records.SLICE.size
    slices = [
        records.SLICE.pack(*records.SliceRecord(shard, kind.shard_offset + n * kind.stride))
        for n in range(count)
    ]
    draft.rebuild([*draft.pieces(), Piece(b"slices", b"".join(slices), size, 0)])
