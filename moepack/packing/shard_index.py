"""An index over the shards of a model as they lie: nothing is copied, and a reader reads slices.

The directory gets index, manifest, and a link to each shard. The links alone know where the shards
are: the format itself knows no paths, and a copy that follows links is a pack by itself.
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

from moepack.common.errors import SourceError, read_failure, write_failure
from moepack.common.escaping import shell_word
from moepack.common.paths import PathOrPaths, path_texts
from moepack.common.phases import Progress, advancing
from moepack.common.remote_path import is_remote
from moepack.pack.format import manifest
from moepack.pack.format.tables import DataFile
from moepack.pack.reading.pack import Pack
from moepack.packing.plan.chosen_hotness import load_hotness
from moepack.packing.plan.layout import Layout
from moepack.packing.plan.plan import Plan, make
from moepack.packing.plan.source_identity import describe_shards, describe_source
from moepack.packing.writing import manifest_encoder
from moepack.packing.writing.commit import TEMPORARY_NAME, commit
from moepack.packing.writing.index_encoder import DigestsByOffset, encode_over_shards
from moepack.packing.writing.target_directory import check_existing
from moepack.source.dense import find_dense
from moepack.source.experts import find_experts, shape_of
from moepack.source.shards import Source, open_source
from moepack.storage.atomic import make_folder
from moepack.storage.extents import Extent, digests_of
from moepack.storage.inputs import Inputs
from moepack.storage.lock import locked_folder
from moepack.storage.regular_file import remove
from moepack.storage.thread_pool import run_each

if TYPE_CHECKING:
    from moepack.traces.hotness.model import Hotness

_AS_IT_LIES = Layout(
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
    threads: int = 4,
    progress: Progress | None = None,
) -> IndexSummary:
    """Write an index over the shards of a model into the new directory `target`.

    Nothing is copied; the shards must not be moved or changed. With `digests` they are
    read whole, and a reader can check the bytes of experts; without, their headers alone.
    `progress` is called with the bytes done since its last call and with those to do in all, from
    one thread at a time.

    Raises SourceError, TraceError, RequestError or MachineError, by whose fault it is.
    """
    _require_files(source)
    model = open_source(source)
    experts = find_experts(model)
    shape = shape_of(model, experts)
    dense = find_dense(model, experts)
    plan = make(experts, _AS_IT_LIES, dense=dense, hotness=load_hotness(hotness, shape))
    count = len(model.shards)
    files = tuple(
        DataFile(
            f"shard-{number:05}-of-{count:05}.gguf", shard.file_length, True, has_digests=digests
        )
        for number, shard in enumerate(model.shards, 1)
    )
    index = encode_over_shards(plan, files, _digests(model, plan, digests, threads, progress))
    described = describe_source(model, shape, describe_shards(model))
    data = manifest_encoder.encode(plan, described, index, layout={"name": _AS_IT_LIES.name})
    paths, stamps = zip(*((shard.path, shard.stamp) for shard in model.shards), strict=True)
    with Inputs(paths, SourceError, stamps=stamps):
        pass  # all of them are as they were
    with _new_directory(Path(target)) as path:
        for file, header in zip(files, model.shards, strict=True):
            # A relative path, so that both can be moved together; from the folders' real paths,
            # since a link is followed from there. A link to a shard stays one.
            shard = Path(header.path)
            link = os.path.relpath(shard.parent.resolve() / shard.name, path.resolve())
            (path / file.name).symlink_to(link)
        commit(path, manifest.INDEX_NAME, index, data)
    return IndexSummary(
        path=os.fspath(target),
        layers=plan.source_layers,
        blob_count=len(plan.order),
        measured_blob_count=plan.measured_blob_count,
        files=files,
        index_length=len(index),
        expert_length=plan.expert_length,
        dense_length=plan.dense_length or 0,
        has_digests=digests,
    )


def _require_files(source: PathOrPaths) -> None:
    for name in path_texts(source):
        if is_remote(name):
            word = shell_word(name)
            hint = f"make a pack, which stores the model once: moepack pack {word} -o NAME.moepack"
            hint += f"; or run it, which does so by itself: moepack run {word}"
            raise SourceError("the model is not on this machine", path=name, hint=hint)


def open_as_they_lie(source: PathOrPaths) -> Pack:
    """Open the shards of a model as a pack, with an index that is nowhere on disk afterwards.

    Messages name the shards. Raises as `index_model`.
    """
    _require_files(source)
    shards = [Path(shard.path) for shard in open_source(source).shards]
    with tempfile.TemporaryDirectory(prefix="moepack-") as temporary:
        folder = Path(temporary, "index")
        index_model(shards, folder)
        return Pack(folder, shards=shards)


@contextlib.contextmanager
def _new_directory(path: Path) -> Iterator[Path]:
    """Make the directory; remove all that was put there if the block ends early.

    If a process was killed before that, the next one does it. One at a time writes there.
    """
    try:
        created = make_folder(path)
        with locked_folder(path):
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


def _remove_unfinished(folder: Path) -> None:
    """Remove the leftovers of a killed `index_model`, if nothing else is in the folder.

    Links to shards come first and go last: a folder without one is somebody else's.
    """
    names = set(os.listdir(folder)) - {"lost+found"}
    links = {name for name in names if _LINK_NAME.fullmatch(name) and (folder / name).is_symlink()}
    if links and names - links <= {manifest.INDEX_NAME, TEMPORARY_NAME}:
        for name in (*(names - links), *links):
            remove(folder / name)


def _digests(
    source: Source, plan: Plan, everything: bool, threads: int, progress: Progress | None
) -> DigestsByOffset:
    """Digest the other ranges of each shard, or with `everything` parts and tensors as well."""
    by_shard: dict[int, list[Extent]] = defaultdict(list)
    for shard, offset, length in sorted(_ranges(plan, everything)):
        if length:
            by_shard[shard].append(Extent(offset, length, shard, offset))
    total = sum(extent.length for extents in by_shard.values() for extent in extents)

    def digest_shard(shard: int, advanced: Callable[[int], None]) -> array[int]:
        path = Path(os.path.realpath(source.shards[shard].path))
        try:
            return digests_of(path, by_shard[shard], advanced)
        except OSError as error:
            raise read_failure(error, path, SourceError) from None

    digests = run_each(digest_shard, list(by_shard), threads, advancing(progress, total))
    return {
        (shard, extent.offset): computed
        for (shard, extents), of_shard in zip(by_shard.items(), digests, strict=True)
        for extent, computed in zip(extents, of_shard, strict=True)
    }


def _ranges(plan: Plan, everything: bool) -> Iterator[tuple[int, int, int]]:
    """Yield shard, offset and length of all that is digested."""
    assert plan.dense is not None
    if not everything:
        yield from (shard_range for shard_range, _ in plan.dense.other_ranges)
        return
    for file in plan.new_files():
        for extent in file.extents():
            yield extent.input, extent.input_offset, extent.length
