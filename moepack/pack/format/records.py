"""The fixed-width records of index.bin and their limits (FORMAT.md, "The index").

Each class has the fields of a record, in the order of the bytes, and the struct below it their
little-endian form. What the numbers must satisfy is checked by the decoders; nothing here opens a
file. A section's records may be longer than these: fields of later versions follow.
"""

import struct
from typing import NamedTuple

from moepack.common.errors import ErrorCode, PackError

MAGIC = b"MOEPACK\0"
FORMAT_VERSION = 1

SECTION_ALIGNMENT = 64
TRAILER = struct.Struct("<Q")
RANK = struct.Struct("<I")

# A reader that keeps to these limits opens any pack, hostile ones too, in little more time than it
# takes to read the index once.
MAX_INDEX_LENGTH = 1 << 30
MAX_DIRECTORY_END = 1 << 16
MAX_SECTIONS = 256
MAX_RECORD_LENGTH = 1 << 16
MAX_FILES = 1 << 13
MAX_FAMILIES = 1 << 12
MAX_PART_KINDS = 1 << 15
MAX_PARTS_IN_BLOB = 64
MAX_LAYERS = 1 << 16
MAX_EXPERTS = 1 << 16
MAX_BLOBS = 1 << 22
MAX_PARTS = 1 << 24
MAX_TENSORS = 1 << 20
MAX_SHARDS = 1 << 12
MAX_ALIGNMENT = 1 << 30
MAX_LENGTH = (1 << 63) - 1

CODEC_RAW = 0
"""Of a part or a tensor: its bytes are stored as they are."""

DATA_FILE = 0
SHARD_FILE = 1

SECTION_REQUIRED = 1 << 0
WITHOUT_DIGESTS = 1 << 0
"""Of a file: its parts and tensors have no digest. Shard bytes always have one."""
HOTNESS_MEASURED = 1 << 0
TYPE_INFERRED = 1 << 0
OWN_TENSORS = 1 << 1


def later_format(
    problem: str, path: str, place: str, expected: object = None, actual: object = None
) -> PackError:
    """Return the error for a feature of later versions of the format."""
    error = PackError(problem, path=path, place=place, expected=expected, found=actual)
    error.hint, error.code = "read it with a newer moepack", ErrorCode.UNKNOWN_FORMAT
    return error


def unknown_version(version: object, path: str) -> PackError:
    """Return the error for an index or a manifest of another version."""
    return later_format("unknown format version", path, "format_version", FORMAT_VERSION, version)


class Header(NamedTuple):
    """The first 56 bytes, with the directory of sections after them; alignments are bytes."""

    magic: bytes
    format_version: int
    header_length: int
    index_length: int
    section_count: int
    section_record_length: int
    blob_alignment: int
    part_alignment: int
    tensor_alignment: int


HEADER = struct.Struct("<8s II Q II QQQ")


class SectionRecord(NamedTuple):
    """A section: its name, its offset from the start of index.bin, its count of records."""

    name: bytes
    offset: int
    record_count: int
    record_length: int
    flags: int


SECTION = struct.Struct("<24s QQ II")


class FileRecord(NamedTuple):
    """A data file: its plain name (NUL padded), its length in bytes, its kind."""

    name: bytes
    length: int
    kind: int
    flags: int


FILE = struct.Struct("<256s Q II")


class FamilyRecord(NamedTuple):
    """One family of one layer: where its blobs, part kinds and parts begin in their tables."""

    layer: int
    expert_count: int
    parts_per_blob: int
    flags: int
    first_blob: int
    first_part_kind: int
    first_part: int
    name: bytes


FAMILY = struct.Struct("<IIII II Q 32s")


class PartKindRecord(NamedTuple):
    """A kind of part of every expert of a family, and where its slices lay in the source."""

    name: bytes
    type_id: int
    flags: int
    dimension_count: int
    interleaved_row_count: int
    ne0: int
    ne1: int
    length: int
    type_name: bytes
    shard: int
    first_slice: int
    shard_offset: int
    stride: int


PART_KIND = struct.Struct("<64s IIII QQ Q 24s II QQ")


class BlobRecord(NamedTuple):
    """Where one expert lies: offset and padded length in bytes, hotness, rank, file number."""

    offset: int
    length: int
    hotness: int
    rank: int
    file: int


BLOB = struct.Struct("<QQQII")


class PartRecord(NamedTuple):
    """Where one part lies: offset and length in bytes, digest, file number; codec is CODEC_RAW."""

    offset: int
    stored_length: int
    digest: int
    file: int
    codec: int


PART = struct.Struct("<QQQII")


class SliceRecord(NamedTuple):
    """Where the slice of one expert lay that had a tensor of its own."""

    shard: int
    shard_offset: int


SLICE = struct.Struct("<QQ")


class TensorRecord(NamedTuple):
    """A dense tensor: type and shape, where it lies, and where it lay in the source."""

    name: bytes
    type_name: bytes
    type_id: int
    flags: int
    dimension_count: int
    file: int
    ne0: int
    ne1: int
    ne2: int
    ne3: int
    length: int
    offset: int
    stored_length: int
    digest: int
    shard: int
    codec: int
    shard_offset: int


TENSOR = struct.Struct("<256s 24s IIII QQQQ QQQQ II Q")


class ShardBytesRecord(NamedTuple):
    """Bytes of a shard that are no tensor's: its header, or padding that is not zero."""

    shard: int
    file: int
    shard_offset: int
    length: int
    offset: int
    digest: int


SHARD_BYTES = struct.Struct("<II QQQQ")


STRONG_DIGEST = struct.Struct("<32s")

RECORD_LENGTHS = {
    "files": FILE.size,
    "families": FAMILY.size,
    "part_kinds": PART_KIND.size,
    "blobs": BLOB.size,
    "parts": PART.size,
    "ranks": RANK.size,
    "slices": SLICE.size,
    "tensors": TENSOR.size,
    "shard_bytes": SHARD_BYTES.size,
    "strong_digests": STRONG_DIGEST.size,
}
"""The sections of this version, in the order in which they are written, and their records."""

COUNTS = {
    "files": (1, MAX_FILES),
    "families": (1, MAX_FAMILIES),
    "part_kinds": (1, MAX_PART_KINDS),
    "blobs": (1, MAX_BLOBS),
    "parts": (1, MAX_PARTS),
    "ranks": (1, MAX_BLOBS),
    "slices": (0, MAX_PARTS),
    "tensors": (0, MAX_TENSORS),
    "shard_bytes": (0, MAX_TENSORS),
    "strong_digests": (1, MAX_PARTS + 2 * MAX_TENSORS),
}
"""The least and the largest count of records of each section."""

FIRST_SECTIONS = ("files", "families", "part_kinds")
"""These stand first: with the directory they say where everything else is."""
REQUIRED_SECTIONS = (*FIRST_SECTIONS, "blobs", "parts", "ranks")
"""The sections that every index has, and that a writer flags as required."""
