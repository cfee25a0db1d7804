"""A pack that is planned and not written: its source, its plan, its files and its index.

Whoever writes it, one packer or many workers, writes the same files by it, the same index and the
same manifest.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from moepack.common import digest
from moepack.common.phases import Progress
from moepack.pack.format.source_entry import SourceEntry
from moepack.pack.opening.source_identity import describe_shards, describe_source
from moepack.packing.plan.pack_request import PlannedModel
from moepack.packing.plan.plan import Plan
from moepack.packing.writing import manifest_encoder, strong_digests
from moepack.packing.writing.finished_files import encode_index, on_disk
from moepack.packing.writing.shard_hashes import check_shard_hashes
from moepack.source.shards import Source
from moepack.storage.copying import Copier
from moepack.storage.extents import FinishedFile, NewFile
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
        return None if file is None else on_disk(file, finished)

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

    def check_shard_hashes(self, inputs: Inputs, folder: Path, threads: int) -> None:
        """Compare the shards in the finished pack `folder` with the SHA-256 that the hub states.

        Needed if they did not pass by as a whole, in order. Raises SourceError.
        """
        if self.source.is_remote:
            check_shard_hashes(self.plan, inputs, folder, threads)

    def encode(
        self, finished: Mapping[str, FinishedFile], paths: Sequence[Path], strong: int | None
    ) -> tuple[bytes, bytes]:
        """Return index and manifest of the pack with the files `finished`.

        `strong` threads read the data files at `paths` for strong digests; None leaves them out.
        """
        index = encode_index(self.plan, finished)
        if strong is not None:
            index = strong_digests.add(index, paths, strong)
        return index, manifest_encoder.encode(
            self.plan, self.described, index, strong=strong is not None
        )


def _digest(records: Iterable[Iterable[object]]) -> str:
    """Return the digest of records of whole numbers; all else in them is passed over."""
    numbers = (field for record in records for field in record if isinstance(field, int))
    return digest.to_text(digest.xxh3(array("q", numbers).tobytes()))
