"""Restore: the original shards of a whole pack, bit for bit.

The index has the position of each byte of a shard in the pack, so nothing of GGUF is known here.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from moepack.common.errors import PackError, RequestError
from moepack.common.pack_files import is_pack
from moepack.common.phases import DigestCounts, Progress
from moepack.common.share import Share
from moepack.pack.format.index import Index
from moepack.pack.format.source_entry import ShardEntry
from moepack.pack.format.tables import DataFile
from moepack.pack.reading.pack import Pack
from moepack.pack.reading.shard_map import ShardMap, map_shards
from moepack.pack.verifying.shard_sha256 import sha256_of
from moepack.packing.in_place.in_place import restore_in_place, settle
from moepack.packing.in_place.unfinished import is_unfinished, is_whole_pack
from moepack.storage.atomic import make_folder
from moepack.storage.extents import Extent, NewFile
from moepack.storage.whole_files import WholeFilesResult, write_whole_files


@dataclass(frozen=True, slots=True)
class RestoreSummary:
    """The shards that were restored, and how; lengths in bytes.

    `kept_length` is from an interrupted run. `sha256_count` shards were compared with a known
    SHA-256; `digests` counts the bytes that were compared with their digests. If it `is_in_place`,
    the pack was turned into the shards.
    """

    path: str
    files: tuple[DataFile, ...]
    length: int
    kept_length: int
    sha256_count: int
    digests: DigestCounts
    is_in_place: bool = False


def restore(
    pack: str | os.PathLike[str],
    target: str | os.PathLike[str] | None = None,
    *,
    in_place: bool = False,
    resume: bool = False,
    force: bool = False,
    recover: bool = False,
    part: str | tuple[int, int] | None = None,
    threads: int = 4,
    progress: Progress | None = None,
) -> RestoreSummary:
    """Write the shards of a whole pack into the folder `target`.

    Parts, headers and whole shards are compared with the digests and SHA-256 that the pack records.
    With `resume` an interrupted run is
    continued, with `force` files of the shards' names are replaced. `progress` is called with the
    bytes done since its last call and the total, from one thread at a time.

    With `in_place` the pack is turned into the shards, in little more extra space than a layer. An
    unfinished pack made in place always is; without a `target` its shards return to their folder,
    as do those of a pack that is whole but for leftovers of its making. With `recover` this works
    without its journal, but needs `target`.

    With `part`, such as `3/16` or (3, 16), only that share of the shards is written, for a job on
    each of many machines.

    Raises PackError if the pack is not whole or its bytes are wrong, RequestError for existing
    files, MachineError for faults of the machine.
    """
    is_begun = _is_begun(Path(pack), threads, goes_back=target is None or in_place or recover)
    if target is None and not is_begun:
        raise RequestError("no folder was given for the shards", hint="name one with `target`")
    if (in_place or is_begun) and part is not None:
        raise RequestError("shards are made in place by one process", argument="in_place")
    if in_place or is_begun:
        shards, moved_length, digests = restore_in_place(
            pack, target, force=force, recover=recover, threads=threads, progress=progress
        )
        for path, entry in shards.items():
            _check_sha256(entry, Path(path))
        length = sum(entry.length for entry in shards.values())
        return RestoreSummary(
            path=os.path.dirname(next(iter(shards))),
            files=tuple(DataFile(entry.name, entry.length) for entry in shards.values()),
            length=length,
            kept_length=length - moved_length,
            sha256_count=sum(entry.sha256 is not None for entry in shards.values()),
            digests=digests,
            is_in_place=True,
        )
    assert target is not None
    if is_pack(Path(target)):
        problem = "a pack, not a folder for shards"
        raise RequestError(problem, path=target, hint="name a folder that is new or empty")
    with Pack(pack) as opened:
        opened.require_complete()
        maps = map_shards(opened)
        if part is not None:
            names = Share(part).names({mapped.name: mapped.length for mapped in maps})
            maps = tuple(mapped for mapped in maps if mapped.name in names)
        make_folder(target)
        result = _write(opened, maps, Path(target), resume, force, threads, progress)
        entries = {entry.name: entry for entry in opened.manifest.source.shards}
        return RestoreSummary(
            path=os.fspath(target),
            files=tuple(DataFile(mapped.name, mapped.length) for mapped in maps),
            length=result.length,
            kept_length=result.kept_length,
            digests=result.digests,
            sha256_count=sum(entries[mapped.name].sha256 is not None for mapped in maps),
        )


def _is_begun(pack: Path, threads: int, *, goes_back: bool) -> bool:
    """Return whether an interrupted run in place is continued.

    Leftovers beside a whole pack know where its shards were, which matters if it `goes_back`.
    Raises RequestError if the shards are whole.
    """
    if is_unfinished(pack) and is_whole_pack(pack):
        return goes_back
    if settle(pack, threads):
        raise RequestError("the shards are already where they belong", path=pack)
    return is_unfinished(pack)


def _write(
    pack: Pack,
    maps: Sequence[ShardMap],
    folder: Path,
    resume: bool,
    force: bool,
    threads: int,
    progress: Progress | None,
) -> WholeFilesResult:
    entries = {entry.name: entry for entry in pack.manifest.source.shards}
    return write_whole_files(
        folder,
        [NewFile(m.name, m.length, partial(_extents, m, pack.index)) for m in maps],
        pack.file_paths,
        check=lambda path, name: _check_sha256(entries[name], path),
        resume=resume,
        force=force,
        threads=threads,
        progress=progress,
    )


def _extents(shard: ShardMap, index: Index) -> Iterable[Extent]:
    """Yield the extents of a shard.

    If the pack has the shard as it is, the bytes between pieces are those that stand there.
    """
    first = shard.pieces[0]  # the header
    as_it_is = first.input if index.files[first.input].is_shard else None
    position = 0
    for piece in shard.pieces:
        if as_it_is is not None and piece.offset > position:
            yield Extent(position, piece.offset - position, as_it_is, position)
        yield piece
        position = piece.end
    if as_it_is is not None and shard.length > position:
        yield Extent(position, shard.length - position, as_it_is, position)


def _check_sha256(entry: ShardEntry, path: Path) -> None:
    """Compare a restored shard and its header with the manifest; raise PackError."""
    checks = [("the header of the restored shard", entry.header_sha256, entry.header_length)]
    if entry.sha256 is not None:
        checks.append(("the restored shard", entry.sha256, entry.length))
    for name, expected, length in checks:
        sha256 = sha256_of(os.fspath(path), length)
        if sha256 != expected:
            raise PackError(
                f"{name} does not have the SHA-256 of the source",
                path=path,
                expected=expected,
                found=sha256,
                hint="every part is as it was packed: the source was already damaged, or its stated"
                f" SHA-256 was wrong; the shard is kept as {path.name}",
            )
