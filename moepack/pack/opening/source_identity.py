"""The identity of a source, as the manifest states it: no path, no time."""

import hashlib
import os
import re
from collections import defaultdict
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from moepack.common.errors import SourceError, read_failure
from moepack.common.phases import Progress, advancing
from moepack.common.shape import ModelShape
from moepack.pack.format import records
from moepack.pack.format.source_entry import ExpertsUsed, ShardEntry, SourceEntry, is_file_name
from moepack.source.dense import header_length
from moepack.source.gguf_header import GgufHeader
from moepack.source.shards import Source
from moepack.storage.input_file import Stamp, open_input
from moepack.storage.remote.store import RemoteStamp
from moepack.storage.thread_pool import run_each


def describe_shards(
    source: Source, *, sha256: bool = False, threads: int = 1, progress: Progress | None = None
) -> tuple[ShardEntry, ...]:
    """Return the identity of each shard: name, length, digest of its header, SHA-256 if known.

    With `sha256` the shards are read whole to compute it; without, it is known if the hub's cache
    states it. Several `threads` read, and `progress` is called with the bytes read since its last
    call and with those to read in all, from one thread at a time. Raises SourceError for a shard
    that cannot be read, or has a name that a manifest has no room for.
    """
    total = sum(shard.file_length for shard in source.shards)

    def describe(shard: GgufHeader, advanced: Callable[[int], None]) -> ShardEntry:
        return describe_shard(shard, sha256, advanced)

    advance = advancing(progress if sha256 else None, total)
    return tuple(run_each(describe, source.shards, threads, advance))


def describe_shard(
    shard: GgufHeader, sha256: bool = False, advanced: Callable[[int], None] = lambda _: None
) -> ShardEntry:
    """Return a shard's identity, as `describe_shards` does."""
    name = os.path.basename(shard.path).encode("utf-8", "backslashreplace").decode()
    if not is_file_name(name):
        raise SourceError("the name is too long to store", path=shard.path, hint="rename the shard")
    length = header_length(shard)
    header = hashlib.sha256()
    try:
        with closing(open_input(shard.path)) as file:
            whole_sha256 = _stated_sha256(shard.path, file.stamp)
            for piece in file.stream(0, length):
                header.update(piece)
                advanced(len(piece))
            if sha256 and (whole_sha256 is None or file.descriptor is not None):
                whole = header.copy()
                for piece in file.stream(length, shard.file_length - length):
                    whole.update(piece)
                    advanced(len(piece))
                whole_sha256 = whole.hexdigest()
    except OSError as error:
        raise read_failure(error, shard.path, SourceError) from None
    return ShardEntry(
        name=name,
        length=shard.file_length,
        header_length=length,
        header_sha256=header.hexdigest(),
        sha256=whole_sha256,
    )


def _stated_sha256(path: str, stamp: Stamp) -> str | None:
    """Return the SHA-256 that the hub states, or its cache.

    A file there is a link to `blobs/` and its SHA-256.
    """
    if isinstance(stamp, RemoteStamp):
        return stamp.sha256
    target = Path(os.path.realpath(path))
    is_stated = target.parent.name == "blobs" and re.fullmatch("[0-9a-f]{64}", target.name)
    return target.name if is_stated else None


def describe_source(
    source: Source, shape: ModelShape, shards: tuple[ShardEntry, ...]
) -> SourceEntry:
    """Return the source's identity; `shards` are those of its shards."""
    name = source.value("general.name")
    length = source.model_value("context_length")
    is_length = type(length) is int and 0 <= length <= records.MAX_LENGTH
    return SourceEntry(
        architecture=source.architecture,
        name=name if isinstance(name, str) else None,
        experts_used=_experts_used(shape),
        context_length=length if is_length else None,
        mtp_layers=list(shape.mtp_layers),
        shards=shards,
    )


def _experts_used(shape: ModelShape) -> dict[str, ExpertsUsed]:
    """Return by family how many experts a token uses: one number if all layers agree."""
    by_layer: dict[str, dict[int, int]] = defaultdict(dict)
    for family in shape.families:
        if family.experts_used is not None:
            by_layer[family.name][family.layer] = family.experts_used
    return {
        name: min(counts.values())
        if len(set(counts.values())) == 1
        else [counts.get(layer) for layer in range(max(counts) + 1)]
        for name, counts in by_layer.items()
    }
