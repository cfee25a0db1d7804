"""A model by its path: a pack, or the shards of a GGUF as they lie, and the headers of both."""

from __future__ import annotations

import os
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moepack.common import digest
from moepack.common.errors import PackError, SourceError, read_failure
from moepack.common.escaping import shell_word
from moepack.common.paths import PathOrPaths, is_remote, path_list, path_texts
from moepack.common.phases import Progress, advancing
from moepack.pack.format import manifest
from moepack.pack.format.contents import IndexContents, as_they_lie
from moepack.pack.format.index import Index
from moepack.pack.format.index_encoder import DigestsByOffset, encode_over_shards
from moepack.pack.format.tables import DataFile
from moepack.pack.opening.source_identity import describe_shards, describe_source
from moepack.pack.reading.directory import named_pack
from moepack.pack.reading.expert_read import digest_error
from moepack.pack.reading.pack import Pack
from moepack.source import gguf_header
from moepack.source.dense import ShardRange, find_dense
from moepack.source.experts import Experts, find_experts, shape_of
from moepack.source.gguf_header import GgufHeader
from moepack.source.shards import Source, open_source
from moepack.storage.extents import Extent, digests_of
from moepack.storage.inputs import Inputs
from moepack.storage.thread_pool import run_each
from moepack.version import TOOL

if TYPE_CHECKING:
    from moepack.pack.format.source_entry import SourceEntry

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
