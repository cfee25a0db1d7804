"""The index against the source: missing tensors, shapes and origins.

It knows the source by the verifier's own witness alone.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from moepack.common.sizes import gaps
from moepack.pack.format.dense import DenseTensor
from moepack.pack.format.index import Index
from moepack.pack.format.manifest import Manifest
from moepack.pack.format.records import ShardBytesRecord
from moepack.pack.format.tables import PackedFamily, PartKind
from moepack.pack.verifying.block_sizes import BLOCK_SIZES
from moepack.pack.verifying.extents import Where, readable
from moepack.pack.verifying.report import Findings
from moepack.pack.verifying.scan import Gap
from moepack.pack.verifying.shard_sha256 import sha256_of
from moepack.pack.verifying.witness import PartKey, PartSlices, WalkedTensor, Witness


@dataclass
class SourceComparison:
    """One comparison, made at once as far as that needs no bytes but the headers'.

    `same_files` maps the numbers of the index's files that are shards of this very source to the
    numbers of the shards. `changed_headers` are the names of shards whose length or header is not
    as it was packed.
    """

    index: Index
    manifest: Manifest
    witness: Witness
    paths: Sequence[Path]
    findings: Findings

    def __post_init__(self) -> None:
        self.same_files = _same_files(self.index, self.paths, self.witness)
        self.changed_headers: list[str] = []
        before = len(self.findings.all)
        self._check_shards()
        self._check_parts()
        self._check_tensors()
        kinds = {finding.kind for finding in self.findings.all[before:]}
        all_changed = len(self.changed_headers) >= len(self.witness.shards)
        self.is_another_model = all_changed and bool(kinds & {"shape", "missing", "surplus"})

    @property
    def is_split_otherwise(self) -> bool:
        """Whether the source has another number of shards than the pack was made from."""
        return len(self.witness.shards) != len(self.manifest.source.shards)

    def gaps(self) -> Iterator[Gap]:
        """Yield the ranges of the shards that no tensor takes and the pack does not hold."""
        covered = [
            [(tensor.start, tensor.start + tensor.length) for tensor in shard.tensors]
            for shard in self.witness.shards
        ]
        for _, record in readable(self.index.shard_range, self.index.shard_range_count):
            if record.shard < len(covered):
                end = record.shard_offset + record.length
                covered[record.shard].append((record.shard_offset, end))
        for number, shard in enumerate(self.witness.shards):
            for start, end in gaps(0, shard.length, sorted(covered[number])):
                yield Gap((number, start, min(end, shard.length)))

    def _check_shards(self) -> None:
        """Compare the lengths and headers of the shards with the manifest's."""
        described, shards = self.manifest.source.shards, self.witness.shards
        if self.is_split_otherwise:
            message = f"the source has {len(shards):,} shards, the pack was made from "
            self.findings.add("source", message + f"{len(described):,}")
            self.changed_headers = [os.path.basename(shard.path) for shard in shards]
            return
        for entry, shard in zip(described, shards, strict=True):
            name = os.path.basename(shard.path)
            before = len(self.findings.all)
            if shard.length != entry.length:
                message = f"it is {shard.length:,} bytes long, it was {entry.length:,}"
                self.findings.add("source", message, file=name)
            if sha256_of(shard.path, entry.header_length) != entry.header_sha256:
                message = "its header is not that of the shard that was packed"
                self.findings.add("source", message, file=name)
            elif entry.header_length != shard.header_length:
                message = f"its header is {shard.header_length:,} bytes long, the manifest says "
                self.findings.add("source", message + f"{entry.header_length:,}", file=name)
            if len(self.findings.all) > before:
                self.changed_headers.append(name)

    def _check_parts(self) -> None:
        layers = self.manifest.layers
        packed = {
            PartKey(family.layer, kind.name): (family, kind)
            for family in self.index.families
            for kind in family.part_kinds
        }
        for key, slices in self.witness.parts.items():
            if key in packed:
                self._check_part(*packed[key], slices, key._asdict())
            elif layers is None or key.layer in layers:
                self.findings.add("missing", "the source has this part", **key._asdict())
        for key in packed.keys() - self.witness.parts:
            self.findings.add("surplus", "the source has no such part", **key._asdict())
        for layer in set(layers or ()) - {key.layer for key in packed}:
            self.findings.add("missing", "the manifest lists this layer", layer=layer)

    def _check_part(
        self, family: PackedFamily, kind: PartKind, slices: PartSlices, where: Where
    ) -> None:
        count = family.expert_count
        ours, theirs = _text(kind, count), _text(slices, len(slices.starts))
        if ours != theirs:
            self.findings.add("shape", f"it is {ours}; the source has {theirs}", **where)
            return
        for expert, origin in readable(lambda n: self.index.origin(family, kind, n), count):
            actual = slices.shards[expert], slices.starts[expert]
            self._check_origin(origin, actual, where | {"expert": expert})

    def _check_tensors(self) -> None:
        if "tensors" not in self.index.directory.sections:
            return
        names = set()
        for _, tensor in readable(self.index.tensor, self.index.tensor_count):
            names.add(tensor.name)
            where: Where = {"tensor": tensor.name}
            theirs = self.witness.dense.get(tensor.name)
            if theirs is None:
                self.findings.add("surplus", "the source has no such dense tensor", **where)
            elif _text(tensor) != _text(theirs):
                message = f"it is {_text(tensor)}; the source has {_text(theirs)}"
                self.findings.add("shape", message, **where)
            else:
                origin, actual = (tensor.shard, tensor.shard_offset), (theirs.shard, theirs.start)
                self._check_origin(origin, actual, where)
        for name in self.witness.dense.keys() - names:
            self.findings.add("missing", "the source has this dense tensor", tensor=name)

    def _check_origin(self, ours: tuple[int, int], theirs: tuple[int, int], where: Where) -> None:
        """Compare two origins: the number of the shard, the offset there."""
        if ours != theirs:
            message = f"it came from byte {ours[1]:,} of shard {ours[0]:,}, by the index; it lies "
            message += f"at byte {theirs[1]:,} of shard {theirs[0]:,}"
            self.findings.add("origin", message, **where)

    def part_source(
        self, file: int, family: PackedFamily, kind: PartKind, expert: int
    ) -> tuple[int, int] | None:
        """Return shard and offset to compare a part in a file with; None for none."""
        slices = self.witness.parts.get(PartKey(family.layer, kind.name))
        if slices is None or slices.length != kind.length or expert >= len(slices.starts):
            return None
        return self._source(file, slices.shards[expert], slices.starts[expert])

    def tensor_source(self, tensor: DenseTensor) -> tuple[int, int] | None:
        """Return shard and offset to compare a dense tensor with; None for none."""
        theirs = self.witness.dense.get(tensor.name)
        if theirs is None or theirs.length != tensor.length:
            return None
        return self._source(tensor.file, theirs.shard, theirs.start)

    def range_source(self, record: ShardBytesRecord) -> tuple[int, int] | None:
        """Return shard and offset to compare bytes of a shard with; None for none."""
        shards = self.witness.shards
        if record.shard >= len(shards):
            return None
        if record.shard_offset + record.length > shards[record.shard].length:
            return None
        return self._source(record.file, record.shard, record.shard_offset)

    def _source(self, file: int, shard: int, offset: int) -> tuple[int, int] | None:
        """Return a place in the source; None if the bytes of the pack lie in that very shard."""
        return None if self.same_files.get(file) == shard else (shard, offset)


def _text(
    record: PartKind | PartSlices | DenseTensor | WalkedTensor, count: int | None = None
) -> str:
    """Describe a part of `count` experts, or a tensor."""
    experts = "" if count is None else f"{count:,} experts of "
    size = BLOCK_SIZES.get(record.type_id)
    name = size.type_name if size else f"type {record.type_id}"
    shape = " x ".join(map(str, record.shape)) or "one value"
    return f"{experts}{shape} {name}, {record.length:,} bytes"


def _same_files(index: Index, paths: Sequence[Path], witness: Witness) -> Mapping[int, int]:
    same = {}
    for file, path in enumerate(paths):
        for number, shard in enumerate(witness.shards):
            try:
                if index.files[file].is_shard and os.path.samefile(path, shard.path):
                    same[file] = number
            except OSError:
                break
    return same
