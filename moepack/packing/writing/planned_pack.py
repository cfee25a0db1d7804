"""A pack that is planned and not written: its source, its plan, its files and its index.

Whoever writes it, one packer or many workers, writes the same files by it, the same index and the
same manifest.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Self

from moepack.common import digest
from moepack.common.phases import Progress
from moepack.pack.format import manifest
from moepack.pack.format.index_encoder import IndexWriter
from moepack.pack.format.source_entry import SourceEntry
from moepack.pack.format.tables import DataFile
from moepack.pack.opening.open_model import describe_shards, describe_source
from moepack.pack.reading.shard_map import ShardMap
from moepack.pack.verifying.shard_sha256 import sha256_of_restored
from moepack.packing.plan.pack_request import PlannedModel
from moepack.packing.plan.plan import DENSE_NAME, Plan
from moepack.packing.writing import strong_digests
from moepack.source.shards import Source
from moepack.storage.copying import Copier
from moepack.storage.extents import Extent, FinishedFile, NewFile
from moepack.storage.inputs import Inputs
from moepack.version import TOOL


@dataclass(frozen=True)
class PlannedPack:
    """A source, its identity as the manifest will state it, and the plan of a pack of it."""

    source: Source
    described: SourceEntry
    plan: Plan

    @classmethod
    def describe(
        cls,
        model: PlannedModel,
        *,
        sha256: bool = False,
        threads: int = 1,
        progress: Progress | None = None,
    ) -> Self:
        """Return a planned model with the identity of its source, as `describe_shards` reads it."""
        shards = describe_shards(model.source, sha256=sha256, threads=threads, progress=progress)
        described = describe_source(model.source, model.shape, shards)
        return cls(model.source, described, model.plan)

    @cached_property
    def files(self) -> dict[str, NewFile]:
        """The data files by name."""
        return {file.name: file for file in self.plan.new_files()}

    def identity(self, *, has_stamps: bool) -> dict[str, Any]:
        """Return the identity of the input, as JSON: packs of equal ones have the same files.

        On one machine the shards' stamps can be a part of it.
        """
        plan = self.plan
        shards = zip(self.described.shards, self.source.shards, strict=True)
        return {
            "tool": TOOL,
            "source": [
                [entry.header_sha256, *(header.stamp if has_stamps else [entry.length])]
                for entry, header in shards
            ],
            "dense": None if plan.dense_file is None else _digest(plan.dense_file.extents()),
            "layout": plan.layout.to_json(),
            "hotness": plan.hotness_to_json(),
            # Two hotnesses may look alike.
            "order": _digest((*blob, plan.counts.get(blob, -1)) for blob in plan.order),
            "layers": None if plan.layers is None else list(plan.layers),
        }

    def on_disk(self, finished: FinishedFile) -> NewFile | None:
        """Return a finished file with its digests; None if it cannot be one of these."""
        file = self.files.get(finished.name)
        if file is None or len(finished.digests) != sum(1 for _ in file.extents()):
            return None
        return file._replace(extents=partial(_with_digests, file, finished.digests))

    def inputs(self) -> Inputs:
        """Return the shards, to be opened; each must be as it was when its header was read."""
        return self.source.inputs()

    def write(
        self,
        names: Collection[str],
        folder: Path,
        inputs: Inputs,
        threads: int,
        advanced: Callable[[int], None],
        finished: Callable[[FinishedFile], None],
    ) -> None:
        """Write and sync the data files `names` in `folder`; call `finished` after each.

        `advanced` is called with the bytes done since its last call, from one thread at a time.
        Each file is locked until `finished` has returned.
        """
        files = [file for name, file in self.files.items() if name in names]
        copier = Copier(folder, inputs, advanced, by_input=self.source.is_remote)
        copier.write(files, threads, finished)

    def check_shard_hashes(self, folder: Path, threads: int) -> None:
        """Compare the shards in the finished pack `folder` with the SHA-256 that the hub states.

        While a model is copied from its start to its end, its bytes pass by in order and are
        hashed. If files of an interrupted run are taken over, they do not. Raises SourceError,
        PackError for a file that ends early, and MachineError.
        """
        if not (self.source.is_remote and self.plan.is_whole):
            return
        shards: list[list[Extent]] = [[] for _ in self.source.shards]
        for number, file in enumerate(self.files.values()):
            for extent in file.extents():
                piece = Extent(extent.input_offset, extent.length, number, extent.offset)
                shards[extent.input].append(piece)
        maps = [
            ShardMap(header.path, header.file_length, tuple(sorted(pieces)))
            for header, pieces in zip(self.source.shards, shards, strict=True)
        ]
        paths = [folder / name for name in self.files]
        with self.inputs() as inputs:
            hashes = sha256_of_restored(paths, maps, threads, lambda done, total: None)
            for number, sha256 in enumerate(hashes):
                inputs.check_sha256(number, sha256)

    def encode(
        self, finished: Mapping[str, FinishedFile], paths: Sequence[Path] = (), strong: int = 0
    ) -> tuple[bytes, bytes]:
        """Return index and manifest of the pack with the files `finished`.

        With `strong` they have strong digests, which so many threads compute from the data files at
        `paths`.
        """
        index = self._encode_index(finished)
        if strong:
            index = strong_digests.add(index, paths, strong)
        entry = manifest.describe_index(index)
        if strong:
            entry = entry._replace(sha256=hashlib.sha256(index).hexdigest())
        return index, manifest.encode(self.to_manifest(entry))

    def to_manifest(self, index: manifest.IndexEntry) -> manifest.Manifest:
        """Return the manifest of the pack, with that entry of its index."""
        plan = self.plan
        return manifest.Manifest(
            tool=TOOL,
            is_whole=plan.is_whole,
            source=self.described,
            layout=plan.layout.to_json(),
            hotness=plan.hotness_to_json(),
            layers=None if plan.layers is None else list(plan.layers),
            index_entry=index,
            files=tuple(manifest.FileEntry(f.name, f.length) for f in self.files.values()),
        )

    def _encode_index(self, finished: Mapping[str, FinishedFile]) -> bytes:
        plan = self.plan
        writer = IndexWriter(plan, [DataFile(f.name, f.length) for f in self.files.values()])
        for number, file in enumerate(plan.files):
            start, digests = 0, iter(finished[file.name].digests)
            for key in file.blobs:
                template = plan.templates[key.template]
                writer.put_blob(key, start, template.length, number)
                for part_number, offset in enumerate(template.offsets_in_blob):
                    writer.put_part(key, part_number, number, start + offset, next(digests))
                start += template.length
        if plan.dense_file is not None:
            number, digests = len(plan.files), iter(finished[DENSE_NAME].digests)
            ranges = [(number, offset, next(digests)) for offset in plan.dense_file.range_offsets]
            tensors = [(number, offset, next(digests)) for offset in plan.dense_file.tensor_offsets]
            writer.put_dense(ranges, tensors)
        return writer.finish()


def _digest(records: Iterable[Iterable[object]]) -> str:
    """Return the digest of records of whole numbers; all else in them is passed over."""
    numbers = (field for record in records for field in record if isinstance(field, int))
    return digest.to_text(digest.xxh3(array("q", numbers).tobytes()))


def _with_digests(file: NewFile, digests: Sequence[int]) -> Iterator[Extent]:
    for extent, digest_of_extent in zip(file.extents(), digests, strict=True):
        yield extent._replace(digest=digest_of_extent)
