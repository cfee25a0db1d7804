"""The headers of the source's shards, as a whole pack keeps them."""

from __future__ import annotations

import os

from moepack.common import digest
from moepack.common.errors import PackError
from moepack.pack.reading.expert_read import digest_error
from moepack.pack.reading.pack import Pack
from moepack.source import gguf_header
from moepack.source.gguf_header import GgufHeader
from moepack.source.shards import Source
from moepack.storage.inputs import Inputs


def read_first_header(pack: Pack) -> tuple[memoryview, GgufHeader]:
    """Return the first shard's header, which has the metadata: its bytes, and decoded.

    Raises PackError if it is missing or damaged.
    """
    return _read(pack, 0)


def read_source(pack: Pack) -> Source:
    """Return the source of a whole pack: as it was opened, or by the headers of all its shards.

    The paths in it are of files in the pack. Raises PackError if one is missing or damaged.
    """
    if pack.source is not None:
        return pack.source
    shards = range(len(pack.manifest.source.shards))
    return Source(tuple(_read(pack, shard)[1] for shard in shards))


def _read(pack: Pack, shard: int) -> tuple[memoryview, GgufHeader]:
    ranges = pack.index.shard_bytes()
    header = next((one for one in ranges if one.shard == shard and not one.shard_offset), None)
    if header is None:
        which = "the first shard" if not shard else f"shard {shard + 1}"
        raise PackError(f"the header of {which} is missing", path=pack.index.path)
    path = pack.file_paths[header.file]
    with Inputs([path], PackError) as inputs:
        data = inputs.read(0, header.offset, header.length)
    computed = digest.xxh3(data)
    if computed != header.digest:
        place = f"header of shard {shard + 1} at byte {header.offset:,}"
        raise digest_error(path, place, header.digest, computed)
    length = pack.manifest.source.shards[shard].length
    return memoryview(data), gguf_header.parse(data, os.fspath(path), length)
