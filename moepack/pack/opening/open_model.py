"""A model by its path: a pack, or the shards of a GGUF as they lie, and the headers of both.

The identity of a source, as a manifest states it, has no path and no time.
"""

from __future__ import annotations

import hashlib
import os
import re
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from moepack.common import digest
from moepack.common.errors import PackError, SourceError, read_failure
from moepack.common.escaping import shell_word
from moepack.common.paths import PathOrPaths, is_remote, path_list, path_texts
from moepack.common.phases import Progress, advancing
from moepack.common.shape import ModelShape
from moepack.pack.format import manifest, records
from moepack.pack.format.contents import IndexContents, as_they_lie
from moepack.pack.format.index import Index
from moepack.pack.format.index_encoder import DigestsByOffset, encode_over_shards
from moepack.pack.format.source_entry import ExpertsUsed, ShardEntry, SourceEntry, is_file_name
from moepack.pack.format.tables import DataFile
from moepack.pack.reading.directory import named_pack
from moepack.pack.reading.expert_read import digest_error
from moepack.pack.reading.pack import Pack
from moepack.source import gguf_header
from moepack.source.dense import ShardRange, find_dense, header_length
from moepack.source.experts import Experts, find_experts, shape_of
from moepack.source.gguf_header import GgufHeader
from moepack.source.shards import Source, open_source
from moepack.storage.extents import Extent, digests_of
from moepack.storage.input_file import Stamp, open_input
from moepack.storage.inputs import Inputs
from moepack.storage.remote.store import RemoteStamp
from moepack.storage.thread_pool import run_each
from moepack.version import TOOL

THREADS = 4


Model = PathOrPaths | Pack
"""A model that is open, or the path of a pack or of a source, as for `open_model`."""


def open_model(path: PathOrPaths) -> Pack:
    """Open a pack by its directory, or the shards of a GGUF as `open_source` finds them.

    Nothing is written: the index over shards is made in memory. Raises the errors of both.
    """
    pack = named_pack(path)
    return open_shards(path) if pack is None else Pack(pack)


def is_pack(model: Model) -> bool:
    """Return whether a model is a pack, and not the shards of a GGUF."""
    return model.source is None if isinstance(model, Pack) else named_pack(model) is not None


def path_of(model: Model) -> str:
    """Return the path that messages and commands name a model by."""
    return str(model.path if isinstance(model, Pack) else path_list(model)[0])


@contextmanager
def pack_or_source(model: Model) -> Iterator[Pack | Source]:
    """Open a pack, or read the headers of a source alone: it may be elsewhere. Raises their errors.

    A pack is closed at the end of the block, unless it was open before.
    """
    if isinstance(model, Pack):
        yield model.source or model
        return
    path = named_pack(model)
    if path is None:
        yield open_source(model)
    else:
        with Pack(path) as pack:
            yield pack


def read_first_header(pack: Pack) -> tuple[memoryview, GgufHeader]:
    """Return the first shard's header, which has the metadata: its bytes, and decoded.

    Raises PackError if it is missing or damaged.
    """
    return _read_header(pack, 0)


def read_source(pack: Pack) -> Source:
    """Return the source of a whole pack: as it was opened, or by the headers of all its shards.

    The paths in it are of files in the pack. Raises PackError if one is missing or damaged.
    """
    if pack.source is not None:
        return pack.source
    shards = range(len(pack.manifest.source.shards))
    return Source(tuple(_read_header(pack, shard)[1] for shard in shards))


def _read_header(pack: Pack, shard: int) -> tuple[memoryview, GgufHeader]:
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


def open_shards(source: PathOrPaths) -> Pack:
    """Open the shards of a model as a pack. Messages name the shards.

    Raises SourceError for a broken source or one that is elsewhere, MachineError.
    """
    model = open_local_source(source)
    data, described = index_shards(model, find_experts(model))
    index = Index(data, model.shards[0].path)
    return Pack.over_shards(model, index, describe_index(index, described))


def open_local_source(source: PathOrPaths) -> Source:
    """Open a source whose shards are on this machine. Raises SourceError."""
    for name in path_texts(source):
        if is_remote(name):
            word = shell_word(name)
            hint = f"make a pack, which stores the model once: moepack pack {word} -o NAME.moepack"
            hint += f"; or run it, which does so by itself: moepack run {word}"
            raise SourceError("the model is not on this machine", path=name, hint=hint)
    return open_source(source)


def index_shards(
    source: Source,
    experts: Experts,
    *,
    digests: bool = False,
    threads: int = THREADS,
    progress: Progress | None = None,
) -> tuple[bytes, SourceEntry]:
    """Return the bytes of an index over the shards, and their identity.

    With `digests` the shards are read whole, and the index has the digest of each part; without,
    their headers alone are read. `progress` is called as by `describe_shards`. Raises SourceError
    for shards that have no experts or are changed meanwhile.
    """
    contents = as_they_lie(experts, find_dense(source, experts))
    contents.check_limits(len(source.shards))
    computed = _digests(source, _ranges(contents, digests), threads, progress)
    count = len(source.shards)
    files = [
        DataFile(
            f"shard-{number:05}-of-{count:05}.gguf", shard.file_length, True, has_digests=digests
        )
        for number, shard in enumerate(source.shards, 1)
    ]
    index = encode_over_shards(contents, files, computed)
    described = describe_source(source, shape_of(source, experts), describe_shards(source))
    with source.inputs():
        pass  # all of them are as they were
    return index, described


def describe_index(
    index: Index, described: SourceEntry, hotness: dict[str, Any] | None = None
) -> bytes:
    """Return the manifest of an index over shards; `hotness` is as the manifest states it."""
    entry = manifest.describe_index(index.data)
    return manifest.encode(
        manifest.Manifest(
            tool=TOOL,
            is_whole=True,
            source=described,
            layout={"name": "shards"},
            hotness=hotness,
            layers=None,
            index_entry=entry,
            files=tuple(manifest.FileEntry(file.name, file.length) for file in index.files),
        )
    )


def _ranges(contents: IndexContents, everything: bool) -> Iterator[ShardRange]:
    """Yield what is digested: headers and the like, or with `everything` all that is not zero."""
    assert contents.dense is not None
    yield from contents.dense.other_ranges
    if everything:
        for shard, tensor in contents.dense.tensors:
            yield ShardRange(shard, tensor.offset, tensor.length)
        for template in contents.templates:
            for part in template.parts:
                for expert in range(template.family.expert_count):
                    yield ShardRange(*part.at(expert), part.length)


def _digests(
    source: Source, ranges: Iterator[ShardRange], threads: int, progress: Progress | None
) -> DigestsByOffset:
    by_shard: dict[int, list[Extent]] = defaultdict(list)
    for shard, offset, length in sorted(ranges):
        if length:
            by_shard[shard].append(Extent(offset, length, shard, offset))
    total = sum(extent.length for extents in by_shard.values() for extent in extents)

    def digest_shard(shard: int, advanced: Callable[[int], None]) -> array[int]:
        path = Path(source.shards[shard].path)
        try:
            return digests_of(path, by_shard[shard], advanced, follows_link=True)
        except OSError as error:
            raise read_failure(error, path, SourceError) from None

    digests = run_each(digest_shard, list(by_shard), threads, advancing(progress, total))
    return {
        (shard, extent.offset): computed
        for (shard, extents), of_shard in zip(by_shard.items(), digests, strict=True)
        for extent, computed in zip(extents, of_shard, strict=True)
    }


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
