"""The headers of the source's shards, as a whole pack keeps them."""

from __future__ import annotations

import os

from moepack import digest
from moepack.errors import PackError
from moepack.format.dense import ShardBytes
from moepack.reading.pack import Pack
from moepack.source import gguf_header
from moepack.source.gguf_header import GgufHeader
from moepack.source.shards import Source
from moepack.storage.inputs import InputFile, Inputs


def first_header(pack: Pack) -> tuple[memoryview, GgufHeader]:
    """Return the bytes of the first shard's header, which has the metadata, and what they say.

    Raises PackError where it is missing or damaged.
    """
    return _read(pack, _held(pack, 0))


def source_of(pack: Pack) -> Source:
    """Return the source of a whole pack, by the headers of all its shards.

    The paths in it are of files in the pack. Raises PackError where one is missing or damaged.
    """
    shards = range(len(pack.manifest.source.shards))
    return Source(tuple(_read(pack, _held(pack, shard))[1] for shard in shards))


def _held(pack: Pack, shard: int) -> ShardBytes:
    ranges = pack.index.shard_bytes()
    held = next((held for held in ranges if held.shard == shard and not held.shard_offset), None)
    if held is None:
        which = "the first shard" if not shard else f"shard {shard + 1}"
        raise PackError(f"the header of {which} is missing", path=pack.index.path)
    return held


def _read(pack: Pack, held: ShardBytes) -> tuple[memoryview, GgufHeader]:
    path = pack.file_paths[held.file]
    with Inputs([InputFile(str(path))], PackError) as inputs:
        data = inputs.read(0, held.offset, held.length)
    computed = digest.of(data)
    if computed != held.digest:
        raise PackError(
            "the bytes do not have the digest in the index",
            path=path,
            place=f"header of shard {held.shard + 1} at byte {held.offset:,}",
            expected=digest.to_text(held.digest),
            found=digest.to_text(computed),
            hint="run `moepack verify` on the pack",
        )
    shard = pack.manifest.source.shards[held.shard]
    return memoryview(data), gguf_header.parse(data, os.fspath(path), shard.length)
