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

from moepack.errors import MachineError, PackError
from moepack.format.tables import DataFile
from moepack.packing.whole_files import Progress, write_whole_files
from moepack.reading.pack import Pack
from moepack.reading.shard_map import ShardMap, map_shards
from moepack.storage.extents import Extent, NewFile

_PIECE_LENGTH = 1 << 20


@dataclass(frozen=True, slots=True)
class RestoreSummary:
    """The shards that were restored, and how; lengths in bytes.

    `cloned_length` is shared with the pack, `kept_length` was there from an interrupted run.
    `sha256_count` is how many shards were compared with a SHA-256 that was known, `has_digests`
    says that every part was compared with its digest.
    """

    path: str
    files: tuple[DataFile, ...]
    length: int
    cloned_length: int
    kept_length: int
    sha256_count: int
    has_digests: bool = True


def restore(
    pack: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    resume: bool = False,
    force: bool = False,
    threads: int = 4,
    progress: Progress | None = None,
) -> RestoreSummary:
    """Write the shards that a whole pack was made from into the folder `target`.

    Every part whose digest is known is compared with it on the way, and a shard whose SHA-256 is
    known with that.
    Ranges are shared with the pack where the file system can. With `resume` an interrupted run is
    continued, with `force` files of the shards' names are replaced. `progress` is called with the
    bytes done since its last call and with those to do in all, from one thread at a time.

    Raises PackError where the pack is not whole or its bytes are not right, RequestError for files
    that are there already, MachineError for a machine that cannot.
    """
    folder = Path(target)
    with Pack(pack) as opened:
        shards = map_shards(opened)
        _check_names(opened, shards)
        sha256s = {entry.name: entry.sha256 for entry in opened.manifest.source.shards}
        has_digests = all(file.has_digests for file in opened.index.files)
        _make(folder)
        result = write_whole_files(
            folder,
            [NewFile(shard.name, shard.length, partial(_extents, shard)) for shard in shards],
            opened.file_paths,
            check=partial(_check_sha256, sha256s),
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
        sha256_count=sum(sha256 is not None for sha256 in sha256s.values()),
    )


def _extents(shard: ShardMap) -> Iterable[Extent]:
    for piece in shard.pieces:
        place = (piece.shard_offset, piece.length, piece.file, piece.offset)
        yield Extent(*place, piece.digest, piece.label)


def _check_names(pack: Pack, shards: tuple[ShardMap, ...]) -> None:
    names = {shard.name for shard in shards}
    if len(names) != len(shards):
        problem = "two shards of the source had the same name"
        raise PackError(problem, path=pack.path, place="source.shards")


def _make(folder: Path) -> None:
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise MachineError(f"cannot create: {error.strerror}", path=folder) from None


def _check_sha256(sha256s: dict[str, str | None], path: Path, name: str) -> None:
    """Compare a restored shard with what its source stated; raise PackError where it differs."""
    expected = sha256s[name]
    if expected is None:
        return
    sha256 = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        while piece := file.read(_PIECE_LENGTH):
            sha256.update(piece)
    if sha256.hexdigest() != expected:
        raise PackError(
            "the restored shard does not have the SHA-256 of the source",
            path=path,
            expected=expected,
            found=sha256.hexdigest(),
            hint="every part is as it was packed: the source was damaged then, or its SHA-256 was"
            f" stated wrongly; the shard is kept as {path.name}",
        )
