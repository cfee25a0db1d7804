"""The fixed-width records of index.bin and their limits (FORMAT.md, "The index").

Each class is one record of the format: its fields stand in the order of the bytes, `LAYOUT` is
their little-endian form, and `pack`/`unpack` are a pair. What the numbers must satisfy is checked
by `index`; nothing here opens a file.
"""

import struct
from typing import Any, ClassVar, NamedTuple, Self

from moepack.sizes import align

MAGIC = b"MOEPACK\0"
FORMAT_VERSION = 1

EXTERNAL_FILES = 1 << 0
CODECS = 1 << 1
FEATURE_NAMES = {EXTERNAL_FILES: "external files", CODECS: "codecs"}
KNOWN_FEATURES = 0
"""The required features that this version reads. The named ones are reserved for later ones."""

SECTION_ALIGNMENT = 64
TRAILER = struct.Struct("<Q")
RANK = struct.Struct("<I")

# A reader that keeps to these opens any pack, hostile ones too, within a second and 100 MB.
MAX_FILES = 1 << 13
MAX_FAMILIES = 1 << 12
MAX_PART_KINDS = 1 << 15
MAX_PARTS_IN_BLOB = 64
MAX_EXPERTS = 1 << 16
MAX_BLOBS = 1 << 24
MAX_ALIGNMENT = 1 << 30
MAX_LENGTH = (1 << 63) - 1

CODEC_RAW = 0
FILE_IN_PACK = 0

HOTNESS_MEASURED = 1 << 0
TYPE_INFERRED = 1 << 0


class Record:
    """What all records share: bytes out, bytes in."""

    LAYOUT: ClassVar[struct.Struct]

    def pack(self) -> bytes:
        """Return the record's bytes, `LAYOUT.size` of them."""
        return self.LAYOUT.pack(*self)  # type: ignore[misc]

    @classmethod
    def unpack(cls, data: Any, offset: int) -> Self:
        """Read the record that starts at `offset` of `data`."""
        return cls(*cls.LAYOUT.unpack_from(data, offset))


class _Header(NamedTuple):
    magic: bytes
    format_version: int
    header_length: int
    required_features: int
    optional_features: int
    index_length: int
    file_count: int
    family_count: int
    part_kind_count: int
    blob_count: int
    part_count: int
    files_offset: int
    families_offset: int
    part_kinds_offset: int
    blobs_offset: int
    parts_offset: int
    ranks_offset: int
    blob_alignment: int
    part_alignment: int
    reserved: int


class Header(Record, _Header):
    """The first 128 bytes; offsets count from the start of index.bin, alignments are bytes."""

    LAYOUT = struct.Struct("<8s II QQQ IIII Q QQQQQQ II Q")


class _FileRecord(NamedTuple):
    name: bytes
    length: int
    kind: int
    reserved: int
    reserved_more: bytes


class FileRecord(Record, _FileRecord):
    """A data file: its plain name (NUL padded), its length in bytes, where it lies (`kind`)."""

    LAYOUT = struct.Struct("<256s Q I I 16s")


class _FamilyRecord(NamedTuple):
    layer: int
    expert_count: int
    parts_per_blob: int
    flags: int
    first_blob: int
    first_part_kind: int
    first_part: int
    name: bytes


class FamilyRecord(Record, _FamilyRecord):
    """One family of one layer: where its blobs, part kinds and parts begin in their tables."""

    LAYOUT = struct.Struct("<IIII II Q 32s")


class _PartKindRecord(NamedTuple):
    name: bytes
    type_id: int
    flags: int
    dimension_count: int
    interleaved_row_count: int
    ne0: int
    ne1: int
    length: int
    type_name: bytes


class PartKindRecord(Record, _PartKindRecord):
    """What one part is for every expert of a family: name, GGML type, shape, length in bytes."""

    LAYOUT = struct.Struct("<64s IIII QQ Q 24s")


class BlobRecord(NamedTuple):
    """Where one expert lies: offset and padded length in bytes, hotness, rank, file number."""

    offset: int
    length: int
    hotness: int
    rank: int
    file: int


BLOB = struct.Struct("<QQQII")


class PartRecord(NamedTuple):
    """Where one part lies: offset and stored length in bytes, digest, file number, codec."""

    offset: int
    stored_length: int
    digest: int
    file: int
    codec: int
    reserved: int


PART = struct.Struct("<QQQIHH")


def section_offsets(
    file_count: int, family_count: int, part_kind_count: int, blob_count: int, part_count: int
) -> tuple[int, int, int, int, int, int, int]:
    """Return the offsets of the six sections, in order, and the length of the whole index.

    The layout of the sections follows from the counts alone, so that a reader can check the
    header's offsets instead of trusting them.
    """
    sizes = (
        file_count * FileRecord.LAYOUT.size,
        family_count * FamilyRecord.LAYOUT.size,
        part_kind_count * PartKindRecord.LAYOUT.size,
        blob_count * BLOB.size,
        part_count * PART.size,
        blob_count * RANK.size,
    )
    offsets = []
    position = Header.LAYOUT.size
    for size in sizes:
        offsets.append(position)
        position = align(position + size, SECTION_ALIGNMENT)
    files, families, kinds, blobs, parts, ranks = offsets
    return files, families, kinds, blobs, parts, ranks, position + TRAILER.size
