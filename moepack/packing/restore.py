"""Restore: the original shards of a whole pack, bit for bit.

The index says where each byte of a shard lies in the pack, so nothing of GGUF is known here.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from moepack.errors import PackError, RequestError
from moepack.format import manifest
from moepack.format.index import Index
from moepack.format.source_entry import ShardEntry
from moepack.format.tables import DataFile
from moepack.packing.in_place import restore_in_place, settle
from moepack.packing.unfinished import is_unfinished
from moepack.reading.pack import Pack
from moepack.reading.shard_map import ShardMap, map_shards
from moepack.storage.atomic import make_folder
from moepack.storage.extents import Extent, NewFile
from moepack.storage.pack_files import is_pack
from moepack.storage.whole_files import Progress, write_whole_files

_PIECE_LENGTH = 1 << 20


@dataclass(frozen=True, slots=True)
class RestoreSummary:
    """The shards that were restored, and how; lengths in bytes.

    `cloned_length` is shared with the pack, `kept_length` was there from an interrupted run.
    `sha256_count` is how many shards were compared with a SHA-256 that was known, `has_digests`
    says that every part was compared with its digest. With `is_in_place` the pack was turned into
    the shards, and is gone.
    """

    path: str
    files: tuple[DataFile, ...]
    length: int
    cloned_length: int
    kept_length: int
    sha256_count: int
    has_digests: bool = True
    is_in_place: bool = False


def restore(
    pack: str | os.PathLike[str],
    target: str | os.PathLike[str] | None = None,
    *,
    in_place: bool = False,
    resume: bool = False,
    force: bool = False,
    recover: bool = False,
    threads: int = 4,
    progress: Progress | None = None,
) -> RestoreSummary:
    """Write the shards that a whole pack was made from into the folder `target`.

    Every part whose digest is known is compared with it on the way, each shard's header with its
    SHA-256, and a shard whose SHA-256 is known with that.
    Ranges are shared with the pack where the file system can. With `resume` an interrupted run is
    continued, with `force` files of the shards' names are replaced. `progress` is called with the
    bytes done since its last call and with those to do in all, from one thread at a time.

    With `in_place` the pack is turned into the shards, with room for little more than a layer, and
    is gone then. So is one that is made in place and unfinished, in any case; its shards go back to
    where they were where no `target` is given. With `recover` that works without its journal too:
    `target` is needed then.

    Raises PackError where the pack is not whole or its bytes are not right, RequestError for files
    that are there already, MachineError for a machine that cannot.
    """
    if settle(Path(pack)) and not Path(pack, manifest.NAME).exists():
        raise RequestError("the shards are where they belong already", path=pack)
    if in_place or is_unfinished(Path(pack)):
        return _restore_in_place(
            pack, target, force=force, recover=recover, threads=threads, progress=progress
        )
    if target is None:
        raise RequestError("no folder is given for the shards", hint="name one with `target`")
    folder = Path(target)
    if is_pack(folder):
        problem = "a pack, not a folder for shards"
        raise RequestError(problem, path=target, hint="name a folder that is new or empty")
    with Pack(pack) as opened:
        shards = map_shards(opened)
        entries = {entry.name: entry for entry in opened.manifest.source.shards}
        has_digests = all(file.has_digests for file in opened.index.files)
        make_folder(folder)
        result = write_whole_files(
            folder,
            [
                NewFile(shard.name, shard.length, partial(_extents, shard, opened.index))
                for shard in shards
            ],
            opened.file_paths,
            check=partial(_check_sha256, entries),
            resume=resume,
            force=force,
            threads=threads,
            progress=progress,
        )
    return RestoreSummary(
        path=os.fspath(target),
        files=tuple(DataFile(shard.name, shard.length) for shard in shards),
        length=result.length,
        cloned_length=result.cloned_length,
        kept_length=result.kept_length,
        has_digests=has_digests,
        sha256_count=sum(entry.sha256 is not None for entry in entries.values()),
    )


def _restore_in_place(
    pack: str | os.PathLike[str],
    target: str | os.PathLike[str] | None,
    *,
    force: bool,
    recover: bool,
    threads: int,
    progress: Progress | None,
) -> RestoreSummary:
    done = restore_in_place(
        pack, target, force=force, recover=recover, threads=threads, progress=progress
    )
    entries = {entry.name: entry for entry in done.entries}
    for entry, home in zip(done.entries, done.homes, strict=True):
        _check_sha256(entries, Path(home), entry.name)
    length = sum(entry.length for entry in done.entries)
    return RestoreSummary(
        path=os.path.dirname(done.homes[0]),
        files=tuple(DataFile(entry.name, entry.length) for entry in done.entries),
        length=length,
        cloned_length=0,
        kept_length=length - done.carried_length,
        sha256_count=sum(entry.sha256 is not None for entry in done.entries),
        is_in_place=True,
    )


def _extents(shard: ShardMap, index: Index) -> Iterable[Extent]:
    """Yield what a shard consists of.

    Where the pack has the shard as it is, the bytes between pieces are those that stand there.
    """
    first = shard.pieces[0]  # the header
    as_it_is = first.file if index.files[first.file].is_shard else None
    position = 0
    for piece in shard.pieces:
        if as_it_is is not None and piece.shard_offset > position:
            yield Extent(position, piece.shard_offset - position, as_it_is, position)
        place = (piece.shard_offset, piece.length, piece.file, piece.offset)
        yield Extent(*place, piece.digest, piece.label, piece.frame_length)
        position = piece.end
    if as_it_is is not None and shard.length > position:
        yield Extent(position, shard.length - position, as_it_is, position)


def _check_sha256(entries: dict[str, ShardEntry], path: Path, name: str) -> None:
    """Compare a restored shard and its header with what the manifest says; raise PackError."""
    entry = entries[name]
    _compare(path, "the header of the restored shard", entry.header_sha256, entry.header_length)
    if entry.sha256 is not None:
        _compare(path, "the restored shard", entry.sha256, entry.length)


def _compare(path: Path, what: str, expected: str, length: int) -> None:
    """Compare the first `length` bytes of a restored shard with their SHA-256."""
    sha256 = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        while piece := file.read(min(length, _PIECE_LENGTH)):
            sha256.update(piece)
            length -= len(piece)
    if sha256.hexdigest() != expected:
        raise PackError(
            f"{what} does not have the SHA-256 of the source",
            path=path,
            expected=expected,
            found=sha256.hexdigest(),
            hint="every part is as it was packed: the source was damaged then, or its SHA-256 was"
            f" stated wrongly; the shard is kept as {path.name}",
        )
