"""The facts that `inspect`, `locate` and `extract` print, as text or as JSON.

JSON has the same fields in the same order. Lengths and offsets are bytes, an offset counts from the
start of the file unless its name says otherwise, and shapes are one expert's in GGUF order. None is
unknown.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moepack.pack.format.source_entry import SourceEntry
from moepack.pack.format.tables import DataFile, PackedFamily
from moepack.source.parameters import Parameters
from moepack.traces.hotness.coverage import Coverage

_MAX_COUNT = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class ShardFacts:
    """One file of a source."""

    path: str
    length: int
    tensor_count: int
    alignment: int


@dataclass(frozen=True, slots=True)
class PartFacts:
    """A part of each expert of a family; `inferred` if only a gap proves its length."""

    name: str
    type: str
    type_id: int
    shape: tuple[int, ...]
    length: int
    inferred: bool


@dataclass(frozen=True, slots=True)
class FamilyFacts:
    """The experts of all layers in which they are alike."""

    family: str
    layers: tuple[int, ...]
    expert_count: int
    bytes_per_expert: int
    parts: tuple[PartFacts, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFacts:
    """A source: its shards, experts and sizes."""

    kind: str = "source"
    architecture: str | None
    name: str | None
    shards: tuple[ShardFacts, ...]
    layers: tuple[int, ...]
    mtp_layers: tuple[int, ...]
    experts_used: int | tuple[int, ...] | None
    families: tuple[FamilyFacts, ...]
    expert_length: int
    dense_length: int
    parameters: Parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class MirrorFacts:
    """The mirror of a pack: its folder, and the bytes in it of the pack's data files.

    `hottest` is the requested length, None for all experts. `problem` says why it is not read, None
    if it is; `length` is None if its content is unknown.
    """

    path: Path
    length: int | None
    data_length: int
    hottest: int | None
    problem: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialFacts:
    """The share of a partial pack that is on this machine: experts, and bytes with the dense part.

    `layers` are those with all of their experts here, `missing_layers` those with none of them.
    Whatever is not here is read from `origin`.
    """

    origin: str
    expert_count: int
    all_expert_count: int
    layers: tuple[int, ...]
    missing_layers: tuple[int, ...]
    length: int


@dataclass(frozen=True, slots=True)
class PackMirrorFacts:
    """The mirror of the pack at `path`; None if it has none."""

    path: str
    mirror: MirrorFacts | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PackFacts:
    """A pack: its files, experts and sizes, and its source.

    `layout` and `hotness` are provenance as the manifest has it: whatever stands there is no error.
    `dense_length` is None if it holds experts alone. An index over shards has no data of its own:
    there `padding_length` and `padding_share` are None.
    """

    kind: str = "pack"
    tool: str
    is_whole: bool
    layout: Mapping[str, Any]
    source: SourceEntry
    hotness: Mapping[str, Any] | None
    coverage: Coverage | None
    layers: tuple[int, ...]
    selected_layers: tuple[int, ...] | None
    order: str
    blob_alignment: int
    part_alignment: int
    blob_count: int
    part_count: int
    files: tuple[DataFile, ...]
    families: tuple[PackedFamily, ...]
    index_length: int
    data_length: int
    expert_length: int
    dense_length: int | None
    payload_length: int
    padding_length: int | None
    padding_share: float | None
    mirror: MirrorFacts | None
    partial: PartialFacts | None

    @property
    def layout_name(self) -> str | None:
        """The name of the layout; None if the manifest has no text there."""
        name = self.layout.get("name")
        return name if isinstance(name, str) else None

    def hotness_count(self, name: str) -> int | None:
        """Return a count of `hotness`, such as `token_count`; None if the manifest has none."""
        count = None if self.hotness is None else self.hotness.get(name)
        return count if type(count) is int and 0 <= count <= _MAX_COUNT else None


@dataclass(frozen=True, slots=True)
class PlacedPartFacts:
    """One part of one expert, and its place."""

    name: str
    type: str
    shape: tuple[int, ...]
    path: Path
    offset: int
    offset_in_blob: int | None
    length: int
    digest: str | None


@dataclass(frozen=True, slots=True)
class BlobFacts:
    """The places of an expert's blob and of its parts; without a blob, of the parts alone."""

    layer: int
    expert: int
    family: str
    path: Path | None
    offset: int | None
    length: int
    rank: int
    hotness: int | None
    parts: tuple[PlacedPartFacts, ...]


@dataclass(frozen=True, slots=True)
class ExtractFacts:
    """A blob or part that was written to a file; `part` is None for a whole blob."""

    layer: int
    expert: int
    part: str | None
    path: str
    length: int
