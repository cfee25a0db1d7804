"""An index over the shards of a model as they lie: nothing is copied, and a reader reads slices.

The directory gets index, manifest, and a link to each shard. The links are all that knows where the
shards are: the format itself knows no paths, and a copy that follows links is a pack by itself.
"""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from moepack.errors import SourceError, read_failure, write_failure
from moepack.format import manifest
from moepack.format.tables import DataFile
from moepack.packing.chosen_hotness import load_hotness
from moepack.packing.index_encoder import PlaceDigests, encode_over_shards
from moepack.packing.layout import Layout
from moepack.packing.packer import TOOL, Progress
from moepack.packing.plan import Plan, make
from moepack.packing.source_identity import describe_shards, describe_source
from moepack.packing.target_directory import check_existing
from moepack.paths import PathOrPaths
from moepack.reading.pack import Pack
from moepack.source.dense import find_dense
from moepack.source.experts import find_experts, shape_of
from moepack.source.shards import Source, open_source
from moepack.storage.atomic import make_folder, publish, sync_directory, write_synced
from moepack.storage.extents import Extent
from moepack.storage.inputs import InputFile, Inputs
from moepack.storage.lock import lock
from moepack.storage.regular_file import remove
from moepack.storage.stored_extents import digests_of
from moepack.storage.thread_pool import run_each

if TYPE_CHECKING:
    from moepack.hotness.model import Hotness

AS_IT_LIES = Layout(
    name="shards",
    description="the shards of the source, as they lie",
    group="layer",
    file_name="",
    max_length=None,
    order="source",
    blob_alignment=1,
    projections=("gate_up", "gate", "up", "down", "attn_v"),
    part_alignment=1,
    small_alignment=1,
    tensor_alignment=1,
)

_LINK_NAME = re.compile(r"shard-\d{5,}-of-\d{5,}\.gguf", re.ASCII)
_TEMPORARY_NAME = f"{manifest.NAME}.tmp"


@dataclass(frozen=True, slots=True)
class IndexSummary:
    """An index over shards: what it covers, in bytes and counts; `has_digests` of parts."""

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
    threads: int = 4,
    progress: Progress | None = None,
) -> IndexSummary:
    """Write an index over the shards of a model into the new directory `target`.

    Nothing is copied; the shards must stay where they are, and as they are. With `digests` they are
    read whole, and a reader can check what it reads; without, it can check their headers alone.
    `progress` is called with the bytes done since its last call and with those to do in all, from
    one thread at a time.

    Raises SourceError, TraceError, RequestError or MachineError, by whose fault it is.
    """
    model = open_source(source)
    experts = find_experts(model)
    shape = shape_of(model, experts)
    plan = make(
        experts,
        AS_IT_LIES,
        dense=find_dense(model, experts),
        hotness=load_hotness(hotness, shape),
    )
    names = _link_names(len(model.shards))
    files = tuple(
        DataFile(name, shard.file_length, is_shard=True, has_digests=digests)
        for name, shard in zip(names, model.shards, strict=True)
    )
    found = _digests(model, plan, digests, threads, progress)
    index = encode_over_shards(plan, files, found)
    described = manifest.Manifest(
        tool=TOOL,
        is_whole=True,
        source=describe_source(model, shape, describe_shards(model)),
        layout={"name": AS_IT_LIES.name},
        hotness=plan.hotness_to_json(),
        layers=None,
        index_entry=manifest.describe_index(index),
        files=tuple(manifest.FileEntry(file.name, file.length) for file in files),
    )
    _check_unchanged(model)
    with _new_directory(Path(target)) as path:
        for name, shard in zip(names, model.shards, strict=True):
            (path / name).symlink_to(_link_target(path, Path(shard.path)))
        write_synced(path / manifest.INDEX_NAME, index)
        temporary = path / _TEMPORARY_NAME
        write_synced(temporary, manifest.encode(described))
        sync_directory(path)
        publish(temporary, path / manifest.NAME)
    return IndexSummary(
        path=os.fspath(target),
        layers=plan.source_layers,
        blob_count=len(plan.order),
        measured_blob_count=plan.measured_blob_count if plan.hotness else None,
        files=files,
        index_length=len(index),
        expert_length=plan.expert_length,
        dense_length=plan.dense_length or 0,
        has_digests=digests,
    )


def open_as_they_lie(source: PathOrPaths) -> Pack:
    """Open the shards of a model as a pack, with an index that is nowhere on disk afterwards.

    Messages name the shards. Raises as `index_model`.
    """
    shards = [Path(shard.path) for shard in open_source(source).shards]
    with tempfile.TemporaryDirectory(prefix="moepack-") as temporary:
        folder = Path(temporary, "index")
        index_model(shards, folder)
        return Pack(folder, shards=shards)


def _link_names(count: int) -> list[str]:
    return [f"shard-{number:05}-of-{count:05}.gguf" for number in range(1, count + 1)]


def _link_target(path: Path, shard: Path) -> str:
    """Return what the link to a shard says: a relative path, so that both can be moved together."""
    # The folders' real paths, since a link is followed from there; a link to a shard stays one.
    return os.path.relpath(shard.parent.resolve() / shard.name, path.resolve())


@contextlib.contextmanager
def _new_directory(path: Path) -> Iterator[Path]:
    """Make the directory; remove what was put there where the block ends early.

    Where a process was killed before that, the next one does it. One at a time writes there.
    """
    try:
        created = make_folder(path)
        with _locked(path):
            _remove_unfinished(path)
            check_existing(path, resume=False)
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


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        lock(descriptor, os.path.realpath(folder))
        yield
    finally:
        os.close(descriptor)


def _remove_unfinished(folder: Path) -> None:
    """Remove the leftovers of a killed `index_model`, if nothing else is in the folder.

    Links to shards come first and go last: where there is none, what is there is somebody else's.
    """
    names = set(os.listdir(folder)) - {"lost+found"}
    links = {name for name in names if _LINK_NAME.fullmatch(name) and (folder / name).is_symlink()}
    if links and names - links <= {manifest.INDEX_NAME, _TEMPORARY_NAME}:
        for name in (*(names - links), *links):
            remove(folder / name)


def _check_unchanged(source: Source) -> None:
    with Inputs([InputFile(shard.path, shard.stamp) for shard in source.shards], SourceError):
        pass


def _digests(
    source: Source, plan: Plan, everything: bool, threads: int, progress: Progress | None
) -> PlaceDigests:
    """Digest what is to be known of each shard: its other ranges, or all of it."""
    by_shard: dict[int, list[Extent]] = defaultdict(list)
    for extent in sorted(_extents(plan, everything)):
        if extent.length:
            by_shard[extent.input].append(extent)
    total = sum(extent.length for extents in by_shard.values() for extent in extents)

    def advanced(length: int) -> None:
        if progress is not None:
            progress(length, total)

    def digest_shard(shard: int, advanced: Callable[[int], None]) -> array[int]:
        path = Path(os.path.realpath(source.shards[shard].path))
        try:
            return digests_of(path, by_shard[shard], advanced)
        except OSError as error:
            raise read_failure(error, path, SourceError) from None

    digests = run_each(digest_shard, list(by_shard), threads, advanced)
    return {
        (shard, extent.offset): known
        for shard, of_shard in zip(by_shard, digests, strict=True)
        for extent, known in zip(by_shard[shard], of_shard, strict=True)
    }


def _extents(plan: Plan, everything: bool) -> Iterator[Extent]:
    """Yield what is digested, at the offsets where it lies in its shard."""
    assert plan.dense is not None
    for (shard, offset, length), _ in plan.dense.other_ranges:
        yield Extent(offset, length, shard, offset)
    if not everything:
        return
    for (shard, tensor), _ in plan.dense.tensors:
        yield Extent(tensor.offset, tensor.length, shard, tensor.offset)
    for template in plan.templates:
        for part in template.parts:
            for expert in range(template.family.expert_count):
                shard, offset = part.slices.at(expert)
                yield Extent(offset, part.length, shard, offset)
