"""What a source is, as the manifest holds it: no path, no time."""

import hashlib
import os
import re
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

from moepack.errors import SourceError, read_failure
from moepack.format import records
from moepack.format.source_entry import ExpertsUsed, ShardEntry, SourceEntry, is_file_name
from moepack.shape import ModelShape
from moepack.source.dense import header_length
from moepack.source.gguf_header import GgufHeader
from moepack.source.shards import Source
from moepack.storage.regular_file import open_regular
from moepack.storage.thread_pool import run_each

Progress = Callable[[int, int], None]


def describe_shards(
    source: Source, *, sha256: bool = False, threads: int = 1, progress: Progress | None = None
) -> tuple[ShardEntry, ...]:
    """Return the identity of each shard, as `describe_shard` does.

    With `sha256` several `threads` read, and `progress` is called with the bytes read since its
    last call and with those to read in all, from one thread at a time.
    """
    if not sha256:
        return tuple(map(describe_shard, source.shards))
    total = sum(shard.file_length for shard in source.shards)

    def advanced(length: int) -> None:
        if progress is not None:
            progress(length, total)

    def describe(shard: GgufHeader, advanced: Callable[[int], None]) -> ShardEntry:
        return describe_shard(shard, sha256=True, advanced=advanced)

    return tuple(run_each(describe, source.shards, threads, advanced))


def describe_shard(
    shard: GgufHeader, *, sha256: bool = False, advanced: Callable[[int], None] = lambda _: None
) -> ShardEntry:
    """Return a shard's identity: name, length, digest of its header, SHA-256 where it is known.

    With `sha256` the whole file is read to compute it; without, it is known where the hub's cache
    states it. `advanced` is called with the bytes read since its last call. Raises SourceError for
    a shard that cannot be read, or has a name that a manifest has no room for.
    """
    name = os.path.basename(shard.path).encode("utf-8", "backslashreplace").decode()
    if not is_file_name(name):
        raise SourceError("too long a name to note", path=shard.path, hint="rename the shard")
    length = header_length(shard)
    try:
        with open(open_regular(shard.path), "rb") as file:
            of_header = hashlib.sha256()
            of_all = of_header
            left = length
            while left and (piece := file.read(min(left, 1 << 20))):
                of_header.update(piece)
                left -= len(piece)
                advanced(len(piece))
            if sha256:
                of_all = of_header.copy()
                while piece := file.read(1 << 20):
                    of_all.update(piece)
                    advanced(len(piece))
    except OSError as error:
        raise read_failure(error, shard.path, SourceError) from None
    return ShardEntry(
        name=name,
        length=shard.file_length,
        header_length=length,
        header_sha256=of_header.hexdigest(),
        sha256=of_all.hexdigest() if sha256 else _stated_sha256(shard.path),
    )


def _stated_sha256(path: str) -> str | None:
    """Return what a hub's cache says: there a file is a link to `blobs/` and its SHA-256."""
    target = Path(os.path.realpath(path))
    is_stated = target.parent.name == "blobs" and re.fullmatch("[0-9a-f]{64}", target.name)
    return target.name if is_stated else None


def describe_source(
    source: Source, shape: ModelShape, shards: tuple[ShardEntry, ...]
) -> SourceEntry:
    """Return the source's identity; `shards` are those of its shards."""
    name = source.value("general.name")
    context_length = source.model_value("context_length")
    return SourceEntry(
        architecture=source.architecture,
        name=name if isinstance(name, str) else None,
        experts_used=_experts_used(shape),
        context_length=context_length if _is_count(context_length) else None,
        mtp_layers=list(shape.mtp_layers),
        shards=shards,
    )


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value <= records.MAX_LENGTH


def _experts_used(shape: ModelShape) -> dict[str, ExpertsUsed]:
    """Say by family how many experts a token uses: one number where all layers agree."""
    by_layer: dict[str, dict[int, int]] = defaultdict(dict)
    for family in shape.families:
        if family.experts_used is not None:
            by_layer[family.name][family.layer] = family.experts_used
    used: dict[str, ExpertsUsed] = {}
    for name, counts in by_layer.items():
        numbers = set(counts.values())
        in_order = [counts.get(layer) for layer in range(max(counts) + 1)]
        used[name] = numbers.pop() if len(numbers) == 1 else in_order
    return used
