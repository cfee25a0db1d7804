"""What a source is, as the manifest holds it: no path, no time."""

import hashlib
import os
from typing import Any

from moepack.errors import MachineError, SourceError, is_shortage
from moepack.source.gguf_header import GgufHeader
from moepack.source.shards import Source
from moepack.storage.regular_file import open_regular


def describe_shard(shard: GgufHeader) -> dict[str, Any]:
    """Return a shard's identity: its name, its length, and the digest of its header."""
    try:
        with open(open_regular(shard.path), "rb") as file:
            sha256 = hashlib.sha256()
            left = shard.data_offset
            while left and (piece := file.read(min(left, 1 << 20))):
                sha256.update(piece)
                left -= len(piece)
    except OSError as error:
        kind = MachineError if is_shortage(error) else SourceError
        raise kind(f"cannot read: {error.strerror}", path=shard.path) from None
    return {
        "name": os.path.basename(shard.path).encode("utf-8", "backslashreplace").decode(),
        "length": shard.file_length,
        "header_length": min(shard.data_offset, shard.file_length),
        "header_sha256": sha256.hexdigest(),
    }


def describe_source(source: Source, shards: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the source's identity; `shards` are those of its shards."""
    name = source.value("general.name")
    return {
        "architecture": source.architecture,
        "name": name if isinstance(name, str) else None,
        "shards": shards,
    }
