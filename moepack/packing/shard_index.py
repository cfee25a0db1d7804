"""An index over the shards of a model as they lie: nothing is copied, and a reader reads slices.

The directory gets index, manifest, and a link to each shard. Only the links have paths, the format
has none, so a copy that follows links is a pack by itself.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from moepack.common.errors import write_failure
from moepack.common.paths import PathOrPaths
from moepack.common.phases import Progress
from moepack.pack.format import manifest
from moepack.pack.format.index import Index
from moepack.pack.format.tables import DataFile
from moepack.pack.opening.open_model import THREADS, describe_index, index_shards, open_local_source
from moepack.packing.plan.blob_hotness import load_hotness
from moepack.packing.ranking import describe_hotness, rank
from moepack.packing.writing.commit import TEMPORARY_NAME, commit
from moepack.packing.writing.target import OwnFolder, check_existing
from moepack.source.experts import find_experts, shape_of
from moepack.storage.atomic import make_folder
from moepack.storage.folders import locked_folder
from moepack.storage.regular_file import remove

if TYPE_CHECKING:
    from moepack.traces.hotness.model import Hotness

_LINK_NAME = re.compile(r"shard-\d{5,}-of-\d{5,}\.gguf", re.ASCII)


@dataclass(frozen=True, slots=True)
class IndexSummary:
    """An index over shards, in bytes and counts; `has_digests` of parts."""

    path: str
    layers: tuple[int, ...]
    blob_count: int
    measured_blob_count: int | None
    files: tuple[DataFile, ...]
    index_length: int
    expert_length: int
    dense_length: int
    has_digests: bool


def index_model(
    source: PathOrPaths,
    target: str | os.PathLike[str],
    *,
    hotness: str | os.PathLike[str] | Hotness | None = None,
    digests: bool = False,
    threads: int = THREADS,
    progress: Progress | None = None,
) -> IndexSummary:
    """Write an index over the shards of a model into the new directory `target`.

    Nothing is copied; the shards must not be moved or changed. With `digests` the whole shards are
    read, and readers can check the bytes of experts; without, only their headers are read.
    `progress` is called with the bytes done since its last call and the total, from one thread at a
    time.

    Raises SourceError, TraceError, RequestError or MachineError, by whose fault it is.
    """
    model = open_local_source(source)
    experts = find_experts(model)
    shape = shape_of(model, experts)
    chosen = load_hotness(hotness, shape)
    data, described = index_shards(
        model, experts, digests=digests, threads=threads, progress=progress
    )
    if chosen is not None:
        data = rank(Index(data, manifest.INDEX_NAME), chosen)
    index = Index(data, manifest.INDEX_NAME)
    ranking = None if chosen is None else describe_hotness(chosen, index)
    with _new_directory(Path(target)) as path:
        for file, header in zip(index.files, model.shards, strict=True):
            # A relative path, so that both can be moved together; from the folders' real paths,
            # since a link is followed from there. A link to a shard stays one.
            shard = Path(header.path)
            link = os.path.relpath(shard.parent.resolve() / shard.name, path.resolve())
            (path / file.name).symlink_to(link)
        commit(path, manifest.INDEX_NAME, data, describe_index(index, described, ranking))
    return IndexSummary(
        path=os.fspath(target),
        layers=shape.layers,
        blob_count=index.blob_count,
        measured_blob_count=None if ranking is None else ranking["measured_blob_count"],
        files=tuple(index.files),
        index_length=len(data),
        expert_length=shape.expert_length,
        dense_length=shape.dense_length or 0,
        has_digests=digests,
    )


@contextlib.contextmanager
def _new_directory(path: Path) -> Iterator[Path]:
    """Make the directory for one writer; remove everything written there if the block fails.

    After a kill the next writer removes it.
    """
    try:
        created = make_folder(path)
        with locked_folder(path):
            _remove_unfinished(path)
            check_existing(OwnFolder(path), resume=False)
            try:
                yield path
            except BaseException:
                with contextlib.suppress(OSError):
                    remove(path / manifest.NAME)
                    _remove_unfinished(path)
                    if created:
                        path.rmdir()
                raise
    except OSError as error:
        raise write_failure(error, path) from None


def _remove_unfinished(folder: Path) -> None:
    """Remove the leftovers of a killed `index_model`, if nothing else is in the folder.

    Links to shards come first and go last: a folder without one is somebody else's.
    """
    names = set(os.listdir(folder)) - {"lost+found"}
    links = {name for name in names if _LINK_NAME.fullmatch(name) and (folder / name).is_symlink()}
    if links and names - links <= {manifest.INDEX_NAME, TEMPORARY_NAME}:
        for name in (*(names - links), *links):
            remove(folder / name)
