"""The index: where every part of every expert lies (FORMAT.md, "The index").

This is the decoder that the reader and the verifier share. `Index` checks header, sections and
tables of files, families and part kinds when it is made; blobs and parts, of which there may be
millions, are checked one by one when they are looked up. It opens no file: it is given the bytes.
"""

import math
import re
from mmap import mmap
from typing import NamedTuple

from moepack import digest
from moepack.errors import PackError
from moepack.format import records
from moepack.format.names import is_plain_name
from moepack.sizes import align

_NAME = re.compile(r"[A-Za-z0-9._-]+\Z", re.ASCII)


class DataFile(NamedTuple):
    """A file that holds blobs: plain name and length in bytes."""

    name: str
    length: int


class PartKind(NamedTuple):
    """What a part is, the same for every expert of its family in one layer.

    `shape` is one expert's, in GGUF order (contiguous axis first); `length` is bytes, without
    padding; `inferred` says that the type was unknown to the packer and the length was proven by
    the gap between tensors.
    """

    name: str
    type_id: int
    type_name: str
    shape: tuple[int, ...]
    length: int
    inferred: bool
    interleaved_row_count: int


class PackedFamily(NamedTuple):
    """The experts of one kind in one layer, and where their records begin."""

    layer: int
    name: str
    expert_count: int
    part_kinds: tuple[PartKind, ...]
    hotness_measured: bool
    first_blob: int
    first_part: int


class Index:
    """A decoded index.bin.

    `data` is the whole index, mapped or read; it must outlive the Index. `path` is for messages.
    Raises PackError when a rule of the format is broken.
    """

    def __init__(self, data: bytes | mmap, path: str) -> None:
        self.path = path
        self._data = data
        self.header = self._check_header()
        self._check_sections()
        self._check_gaps()
        self.files = self._read_files()
        self.families = self._read_families()
        self.stored_digest: int = records.TRAILER.unpack_from(data, len(data) - 8)[0]

    @property
    def blob_count(self) -> int:
        """How many blobs there are over all layers."""
        return self.header.blob_count

    def computed_digest(self) -> int:
        """Compute the digest of everything before the trailer."""
        with memoryview(self._data) as view:
            return digest.of(view[: -records.TRAILER.size])

    def blob(self, number: int) -> tuple[int, int, int, int, int]:
        """Return the fields of a BlobRecord, checked against the rules of the format.

        A plain tuple: engines look up thousands a second, and naming the fields is half the time.
        """
        header = self.header
        offset = header.blobs_offset + number * records.BLOB.size
        record = records.BLOB.unpack_from(self._data, offset)
        start, length, _, rank, file = record
        if (
            file >= header.file_count
            or start + length > self.files[file].length
            or start % header.blob_alignment
            or length % header.blob_alignment
            or rank >= header.blob_count
            or not length
        ):
            raise self._bad_blob(number, record)
        return record

    def part(self, number: int, kind: PartKind) -> tuple[int, int, int, int, int, int]:
        """Return the fields of a PartRecord of `kind`, checked against the rules of the format."""
        offset = self.header.parts_offset + number * records.PART.size
        record = records.PART.unpack_from(self._data, offset)
        self._check_part(number, kind, record)
        return record

    def parts(
        self, first: int, kinds: tuple[PartKind, ...]
    ) -> list[tuple[int, int, int, int, int, int]]:
        """Return what `part` does, of the parts from `first` on, which are of `kinds` in order."""
        offset = self.header.parts_offset + first * records.PART.size
        table = self._data[offset : offset + len(kinds) * records.PART.size]
        parts = list(records.PART.iter_unpack(table))
        for number, kind in enumerate(kinds):
            self._check_part(first + number, kind, parts[number])
        return parts

    def _check_part(
        self, number: int, kind: PartKind, record: tuple[int, int, int, int, int, int]
    ) -> None:
        start, stored_length, _, file, codec, reserved = record
        if (
            file >= len(self.files)
            or codec
            or reserved
            or stored_length != kind.length
            or start + stored_length > self.files[file].length
        ):
            raise self._bad_part(number, record, kind)

    def blob_at_rank(self, rank: int) -> int:
        """Return the number of the blob that has `rank`; 0 is the hottest."""
        offset = self.header.ranks_offset + rank * records.RANK.size
        number: int = records.RANK.unpack_from(self._data, offset)[0]
        if number >= self.blob_count:
            raise self._error(f"rank {rank}", "no such blob", f"< {self.blob_count}", number)
        return number

    def _error(
        self, place: str, problem: str, expected: object = None, found: object = None
    ) -> PackError:
        return PackError(problem, path=self.path, place=place, expected=expected, found=found)

    def _check_header(self) -> records.Header:
        data = self._data
        smallest = records.Header.LAYOUT.size + records.TRAILER.size
        if len(data) < smallest:
            raise self._error("header", "the index is cut short", f">= {smallest} bytes", len(data))
        header = records.Header.unpack(data, 0)
        if header.magic != records.MAGIC:
            raise self._error("magic", "not a moepack index", records.MAGIC, header.magic)
        if header.format_version != records.FORMAT_VERSION:
            raise PackError(
                "unknown format version",
                path=self.path,
                place="format_version",
                expected=records.FORMAT_VERSION,
                found=header.format_version,
                hint="read it with a newer moepack",
            )
        self._check_features(header.required_features)
        if header.header_length != records.Header.LAYOUT.size:
            expected = records.Header.LAYOUT.size
            raise self._error("header_length", "wrong length", expected, header.header_length)
        if header.index_length != len(data):
            raise self._error("index_length", "wrong length", header.index_length, len(data))
        if header.reserved:
            raise self._error("header", "reserved bytes are not zero")
        return header

    def _check_features(self, required: int) -> None:
        unknown = required & ~records.KNOWN_FEATURES
        if not unknown:
            return
        bits = [bit for bit in range(64) if unknown >> bit & 1]
        names = [records.FEATURE_NAMES.get(1 << bit, f"bit {bit}") for bit in bits]
        raise PackError(
            f"needs features that this reader does not know: {', '.join(names)}",
            path=self.path,
            place="required_features",
            hint="read it with a newer moepack",
        )

    def _check_sections(self) -> None:
        header = self.header
        limits = {
            "file_count": records.MAX_FILES,
            "family_count": records.MAX_FAMILIES,
            "part_kind_count": records.MAX_PART_KINDS,
            "blob_count": records.MAX_BLOBS,
            "part_count": records.MAX_BLOBS * records.MAX_PARTS_IN_BLOB,
        }
        for name, limit in limits.items():
            count = getattr(header, name)
            if not 1 <= count <= limit:
                raise self._error(name, "out of bounds", f"1 to {limit}", count)
        for name in ("blob_alignment", "part_alignment"):
            alignment = getattr(header, name)
            if alignment.bit_count() != 1 or alignment > records.MAX_ALIGNMENT:
                expected = f"a power of two up to {records.MAX_ALIGNMENT}"
                raise self._error(name, "not an alignment", expected, alignment)
        *offsets, length = records.section_offsets(*(getattr(header, name) for name in limits))
        names = ("files", "families", "part_kinds", "blobs", "parts", "ranks")
        for section, offset in zip(names, offsets, strict=True):
            stated = getattr(header, f"{section}_offset")
            if stated != offset:
                raise self._error(f"{section}_offset", "wrong offset", offset, stated)
        if header.index_length != length:
            raise self._error("index_length", "does not fit the counts", length, len(self._data))
        if header.part_alignment > header.blob_alignment:
            most = f"<= {header.blob_alignment}"
            raise self._error("part_alignment", "above the blobs'", most, header.part_alignment)

    def _check_gaps(self) -> None:
        """Check that the bytes between sections are zero."""
        header = self.header
        ends = (
            header.files_offset + header.file_count * records.FileRecord.LAYOUT.size,
            header.families_offset + header.family_count * records.FamilyRecord.LAYOUT.size,
            header.part_kinds_offset + header.part_kind_count * records.PartKindRecord.LAYOUT.size,
            header.blobs_offset + header.blob_count * records.BLOB.size,
            header.parts_offset + header.part_count * records.PART.size,
            header.ranks_offset + header.blob_count * records.RANK.size,
        )
        for end in ends:
            if any(self._data[end : align(end, records.SECTION_ALIGNMENT)]):
                raise self._error(f"byte {end}", "bytes between sections are not zero")

    def _read_files(self) -> tuple[DataFile, ...]:
        size = records.FileRecord.LAYOUT.size
        files = []
        for number in range(self.header.file_count):
            place = f"file {number}"
            record = records.FileRecord.unpack(self._data, self.header.files_offset + number * size)
            name = self._text(record.name, place)
            if not is_plain_name(name):
                raise self._error(place, "not a plain file name", found=repr(name))
            if record.kind != records.FILE_IN_PACK or record.reserved or any(record.reserved_more):
                raise self._error(place, "unknown kind of file", records.FILE_IN_PACK, record.kind)
            if record.length > records.MAX_LENGTH:
                raise self._error(
                    place, "length out of bounds", f"<= {records.MAX_LENGTH}", record.length
                )
            files.append(DataFile(name, record.length))
        if len({file.name.lower() for file in files}) != len(files):
            raise self._error("files", "two files have the same name")
        return tuple(files)

    def _read_families(self) -> tuple[PackedFamily, ...]:
        size = records.FamilyRecord.LAYOUT.size
        families = []
        kind_number = blob_number = part_number = 0
        for number in range(self.header.family_count):
            place = f"family {number}"
            offset = self.header.families_offset + number * size
            record = records.FamilyRecord.unpack(self._data, offset)
            self._check_family(record, place, (blob_number, kind_number, part_number))
            kinds = self._read_part_kinds(record, place)
            name = self._name(record.name, place)
            measured = bool(record.flags & records.HOTNESS_MEASURED)
            family = PackedFamily(
                layer=record.layer,
                name=name,
                expert_count=record.expert_count,
                part_kinds=kinds,
                hotness_measured=measured,
                first_blob=record.first_blob,
                first_part=record.first_part,
            )
            families.append(family)
            kind_number += record.parts_per_blob
            blob_number += record.expert_count
            part_number += record.expert_count * record.parts_per_blob
        counts = (kind_number, blob_number, part_number)
        header = self.header
        expected = (header.part_kind_count, header.blob_count, header.part_count)
        if counts != expected:
            raise self._error("families", "counts do not add up to the header's", expected, counts)
        self._check_family_order(families)
        return tuple(families)

    def _check_family_order(self, families: list[PackedFamily]) -> None:
        keys = [(family.layer, family.name) for family in families]
        layers = [family.layer for family in families]
        if len(set(keys)) != len(keys) or layers != sorted(layers):
            raise self._error("families", "not ordered by layer, or one stands twice")

    def _check_family(
        self, record: records.FamilyRecord, place: str, firsts: tuple[int, int, int]
    ) -> None:
        if not 1 <= record.expert_count <= records.MAX_EXPERTS:
            expected = f"1 to {records.MAX_EXPERTS}"
            raise self._error(place, "expert_count out of bounds", expected, record.expert_count)
        if not 1 <= record.parts_per_blob <= records.MAX_PARTS_IN_BLOB:
            expected = f"1 to {records.MAX_PARTS_IN_BLOB}"
            raise self._error(
                place, "parts_per_blob out of bounds", expected, record.parts_per_blob
            )
        stated = (record.first_blob, record.first_part_kind, record.first_part)
        if stated != firsts:
            raise self._error(place, "first records are not the next ones", firsts, stated)
        last_kind = record.first_part_kind + record.parts_per_blob
        if last_kind > self.header.part_kind_count:
            limit = self.header.part_kind_count
            raise self._error(place, "more part kinds than the index holds", limit, last_kind)
        if record.flags & ~records.HOTNESS_MEASURED:
            raise self._error(place, "unknown flags", records.HOTNESS_MEASURED, record.flags)

    def _read_part_kinds(self, family: records.FamilyRecord, place: str) -> tuple[PartKind, ...]:
        size = records.PartKindRecord.LAYOUT.size
        kinds = []
        for number in range(family.parts_per_blob):
            offset = self.header.part_kinds_offset + (family.first_part_kind + number) * size
            record = records.PartKindRecord.unpack(self._data, offset)
            kinds.append(self._part_kind(record, f"{place}: part {number}"))
        if len({kind.name for kind in kinds}) != len(kinds):
            raise self._error(place, "two parts have the same name")
        return tuple(kinds)

    def _part_kind(self, record: records.PartKindRecord, place: str) -> PartKind:
        name = self._name(record.name, place)
        count = record.dimension_count
        if count > 2:
            raise self._error(place, "dimension_count out of bounds", "0 to 2", count)
        axes = (record.ne0, record.ne1)
        shape = axes[:count]
        if any(axes[count:]) or 0 in shape or math.prod(shape) > records.MAX_LENGTH:
            raise self._error(place, f"not a shape of {count} dimensions", found=axes)
        if not 1 <= record.length <= records.MAX_LENGTH:
            raise self._error(
                place, "length out of bounds", f"1 to {records.MAX_LENGTH}", record.length
            )
        if record.flags & ~records.TYPE_INFERRED:
            raise self._error(place, "unknown flags", records.TYPE_INFERRED, record.flags)
        inferred = bool(record.flags & records.TYPE_INFERRED)
        type_name = self._name(record.type_name, place)
        rows = record.interleaved_row_count
        return PartKind(name, record.type_id, type_name, shape, record.length, inferred, rows)

    def _name(self, field: bytes, place: str) -> str:
        name = self._text(field, place)
        if not _NAME.match(name):
            raise self._error(place, "not a name", "letters, digits, '.', '_', '-'", repr(name))
        return name

    def _text(self, field: bytes, place: str) -> str:
        text, _, padding = field.partition(b"\0")
        if not text or len(text) == len(field) or any(padding):
            raise self._error(place, "a name is empty or not padded with NUL", found=field[:80])
        try:
            return text.decode()
        except UnicodeDecodeError:
            raise self._error(place, "a name is not UTF-8", found=text[:80]) from None

    def _bad_blob(self, number: int, record: tuple[int, ...]) -> PackError:
        header = self.header
        expected = (
            f"a file below {header.file_count}, a range inside it in multiples of "
            f"{header.blob_alignment}, a rank below {header.blob_count}"
        )
        return self._error(f"blob {number}", "record out of bounds", expected, record)

    def _bad_part(self, number: int, record: tuple[int, ...], kind: PartKind) -> PackError:
        expected = (
            f"a file below {self.header.file_count}, {kind.length} stored bytes inside it, codec 0"
        )
        place = f"part {number} ({kind.name})"
        return self._error(place, "record out of bounds", expected, record)
