"""Summaries of a pack, whether it is written or planned."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from moepack.common.paths import is_remote
from moepack.common.phases import DigestCounts
from moepack.pack.format.tables import DataFile
from moepack.pack.reading.pack import Pack
from moepack.packing.plan.plan import Plan
from moepack.storage.folders import free_space


@dataclass(frozen=True, slots=True)
class InPlaceFacts:
    """The needs of packing in place: units, the bytes of the largest, the bytes that must be free.

    `shards` are the files that are removed on the way, `refusals` the reasons against it.
    """

    shards: tuple[DataFile, ...]
    unit_count: int
    unit_length: int
    extra_length: int
    refusals: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PackSummary:
    """A pack, or with `dry_run` a planned one; lengths in bytes.

    `order` of blobs on disk is `hotness` or `source`. `selected_layers` is None if no layer was
    left out; a pack `is_whole` if it has all of the source. `dense_length` is None for experts
    alone, `measured_blob_count` without hotness, which covers that many blobs. `free_space` is the
    target's before writing, None in a store. `written_length` bytes of data files were written in
    `seconds`, and `resumed_file_count` files were finished before; all three are None for a dry
    run. Finished files are read again: `digests` counts their bytes, and `damaged_files` were
    changed since, and written anew. After a part of a pack `missing_file_count` files have to be
    written before the commit. If it `is_finished`, the same pack was there before, and `digests`
    counts its bytes.
    """

    layout: str
    order: str
    layers: tuple[int, ...]
    selected_layers: tuple[int, ...] | None
    is_whole: bool
    blob_count: int
    measured_blob_count: int | None
    hotness_token_count: int | None
    file_count: int
    files: tuple[DataFile, ...]
    index_length: int
    data_length: int
    expert_length: int
    dense_length: int | None
    payload_length: int
    padding_length: int
    padding_share: float
    path: str
    dry_run: bool
    free_space: int | None
    written_length: int | None = None
    resumed_file_count: int | None = None
    seconds: float | None = None
    missing_file_count: int | None = None
    digests: DigestCounts = field(default_factory=DigestCounts)
    damaged_files: tuple[str, ...] = ()
    is_finished: bool = False
    in_place: InPlaceFacts | None = None


class WrittenFiles(NamedTuple):
    """The fields of a `PackSummary` that writing adds."""

    written_length: int
    resumed_file_count: int
    missing_file_count: int | None = None
    digests: DigestCounts = DigestCounts()
    damaged_files: tuple[str, ...] = ()


def from_plan(plan: Plan, target: str | os.PathLike[str], dry_run: bool) -> PackSummary:
    """Return the summary of a planned pack."""
    padding_length = plan.data_length - plan.payload_length
    files = tuple(DataFile(file.name, file.length) for file in plan.new_files())
    return PackSummary(
        layout=plan.layout.name,
        order=plan.sorted_by,
        layers=plan.layers_with_experts,
        selected_layers=plan.layers,
        is_whole=plan.is_whole,
        blob_count=len(plan.order),
        measured_blob_count=plan.measured_blob_count,
        hotness_token_count=plan.hotness.token_count if plan.hotness else None,
        file_count=len(files),
        files=files,
        index_length=plan.index_length,
        data_length=plan.data_length,
        expert_length=plan.expert_length,
        dense_length=plan.dense_length,
        payload_length=plan.payload_length,
        padding_length=padding_length,
        padding_share=padding_length / plan.data_length,
        path=os.fspath(target),
        dry_run=dry_run,
        free_space=None if is_remote(target) else free_space(Path(target)),
    )


def from_pack(path: str | os.PathLike[str]) -> PackSummary:
    """Return the summary of a whole pack that is there."""
    with Pack(path) as pack:
        index, described, shape = pack.index, pack.manifest, pack.shape
        hotness = described.hotness or {}
        other_length = sum(shard_range.length for shard_range in index.shard_bytes())
        payload_length = shape.expert_length + (shape.dense_length or 0) + other_length
        data_length = sum(file.length for file in index.files)
        padding_length = data_length - payload_length
        return PackSummary(
            layout=str(described.layout.get("name")),
            order=described.blob_order,
            layers=shape.layers,
            selected_layers=None if described.layers is None else tuple(described.layers),
            is_whole=described.is_whole,
            blob_count=index.blob_count,
            measured_blob_count=hotness.get("measured_blob_count"),
            hotness_token_count=hotness.get("token_count"),
            file_count=len(index.files),
            files=index.files,
            index_length=index.header.index_length,
            data_length=data_length,
            expert_length=shape.expert_length,
            dense_length=shape.dense_length,
            payload_length=payload_length,
            padding_length=padding_length,
            padding_share=padding_length / data_length,
            path=os.fspath(path),
            dry_run=False,
            free_space=None if is_remote(path) else free_space(Path(path)),
        )
