"""A pack whose index and manifest a test edits, with all digests made right again."""

import json
import struct
from pathlib import Path
from typing import Any

from moepack import digest
from moepack.format import manifest, records
from moepack.format.index import Index

_LAYOUTS: dict[str, tuple[struct.Struct, Any]] = {
    "files": (records.FileRecord.LAYOUT, records.FileRecord),
    "families": (records.FamilyRecord.LAYOUT, records.FamilyRecord),
    "part_kinds": (records.PartKindRecord.LAYOUT, records.PartKindRecord),
    "blobs": (records.BLOB, records.BlobRecord),
    "parts": (records.PART, records.PartRecord),
    "slices": (records.SliceRecord.LAYOUT, records.SliceRecord),
    "tensors": (records.TensorRecord.LAYOUT, records.TensorRecord),
    "shard_bytes": (records.ShardBytesRecord.LAYOUT, records.ShardBytesRecord),
}


class IndexEdit:
    """The pack at `path`; `save` writes what was changed.

    `body` is the manifest's JSON. Records are named by their section and their number there.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.data = bytearray((path / "index.bin").read_bytes())
        self.directory = Index(bytes(self.data), "index.bin").directory
        self.body: dict[str, Any] = json.loads((path / "manifest.json").read_bytes())

    def get(self, section: str, number: int) -> Any:
        layout, record = _LAYOUTS[section]
        return record(*layout.unpack_from(self.data, self.directory[section].at(number)))

    def set(self, section: str, number: int, **fields: Any) -> None:
        """Change fields of a record, and make sure that something changed."""
        before = self.get(section, number)
        after = before._replace(**fields)
        assert tuple(after) != tuple(before)
        _LAYOUTS[section][0].pack_into(self.data, self.directory[section].at(number), *after)

    def set_rank(self, rank: int, number: int) -> None:
        records.RANK.pack_into(self.data, self.directory["ranks"].at(rank), number)

    def lengthen(self, file: int, data: bytes) -> None:
        """Append to a data file, and say so everywhere."""
        length = self.get("files", file).length + len(data)
        self.set("files", file, length=length)
        self.body["files"][file]["length"] = length
        with open(self.path / self.body["files"][file]["name"], "ab") as held:
            held.write(data)

    def save(self) -> None:
        body = memoryview(self.data)[:-8]
        records.TRAILER.pack_into(self.data, len(body), digest.of(body))
        (self.path / "index.bin").write_bytes(self.data)
        self.body["index"] = manifest.describe_index(bytes(self.data)).to_json()
        self.save_manifest()

    def save_manifest(self) -> None:
        self.body.pop("manifest_digest", None)
        (self.path / "manifest.json").write_bytes(sealed(json.dumps(self.body, indent=2)))


def sealed(text: str) -> bytes:
    """Add the digest to a manifest that lacks it."""
    signed = text[: text.rindex("\n}")].encode()
    return signed + f',\n  "manifest_digest": "{digest.to_text(digest.of(signed))}"\n}}\n'.encode()
