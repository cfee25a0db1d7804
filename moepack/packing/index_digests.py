"""Put digests into an index that was written before they were known."""

import struct
from collections.abc import Mapping

from moepack import digest
from moepack.format import records
from moepack.format.index import Index
from moepack.packing.units import PieceKey

_DIGEST = struct.Struct("<Q")
_IN_PART = 16
"""Where the digest is in a record of a part."""


def with_digests(draft: bytes, digests: Mapping[PieceKey, int], path: str) -> bytes:
    """Return an index with `digests`, by file number and offset in it, of all that has bytes."""
    data = bytearray(draft)
    directory = Index(draft, path).directory
    parts = directory["parts"]
    for number in range(parts.record_count):
        at = parts.at(number)
        part = records.PartRecord(*records.PART.unpack_from(data, at))
        _DIGEST.pack_into(data, at + _IN_PART, digests[PieceKey(part.file, part.offset)])
    for name, kind in (
        ("tensors", records.TensorRecord),
        ("shard_bytes", records.ShardBytesRecord),
    ):
        section = directory[name]
        for number in range(section.record_count):
            at = section.at(number)
            record = kind.unpack(data, at)
            known = (
                digests[PieceKey(record.file, record.offset)] if record.length else digest.of(b"")
            )
            packed = record._replace(digest=known).pack()
            data[at : at + len(packed)] = packed
    body = memoryview(data)[: -records.TRAILER.size]
    trailer = records.TRAILER.pack(digest.of(body))
    return bytes(body) + trailer
