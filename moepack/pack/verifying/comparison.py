"""The index against the source: missing tensors, shapes and origins.

It knows the source by the verifier's own witness alone.
"""

import os
from collections.abc import Iterator

from moepack.common.sizes import gaps
from moepack.pack.format.dense import DenseTensor
from moepack.pack.format.tables import PartKind
from moepack.pack.verifying.block_sizes import BLOCK_SIZES
from moepack.pack.verifying.checked_pack import CheckedPack, Gap, Where
from moepack.pack.verifying.shard_sha256 import sha256_of
from moepack.pack.verifying.witness import PartSlices, WalkedTensor, Witness


class SourceComparison:
    """A comparison of a pack with the headers of a source.

    `changed_headers` are the names of shards whose length or header is not as it was packed;
    `same_files` maps the numbers of files that are shards of this very source to the numbers of the
    shards. With another model no bytes are compared.
    """

    def __init__(self, pack: CheckedPack, witness: Witness) -> None:
        self.pack = pack
        self.witness = witness
        self.shard_paths = [shard.path for shard in witness.shards]
        self.changed_headers: list[str] = []
        before = len(pack.findings.all)
        self._check_shards()
        self._check_parts()
        self._check_tensors()
        kinds = {finding.kind for finding in pack.findings.all[before:]}
        all_changed = len(self.changed_headers) >= len(witness.shards)
        self.is_another_model = all_changed and bool(kinds & {"shape", "missing", "surplus"})
        self.same_files = {} if self.is_another_model else dict(self._same_files())

    @property
    def is_split_otherwise(self) -> bool:
        """Whether the source has another number of shards than the pack was made from."""
        return len(self.witness.shards) != len(self.pack.manifest.source.shards)

    def gaps(self) -> Iterator[Gap]:
        """Yield the ranges of the shards that no tensor takes and the pack does not hold."""
        covered = [
            [(tensor.start, tensor.start + tensor.length) for tensor in shard.tensors]
            for shard in self.witness.shards
        ]
        for record in self.pack.shard_ranges.values():
            if record.shard < len(covered):
                end = record.shard_offset + record.length
                covered[record.shard].append((record.shard_offset, end))
        for number, shard in enumerate(self.witness.shards):
            for start, end in gaps(0, shard.length, sorted(covered[number])):
                yield Gap(number, start, min(end, shard.length))

    def source_of(
        self, file: int, length: int, shard: int | None, offset: int, where: Where
    ) -> tuple[int, int] | None:
        """Return shard and offset of the bytes to compare a range with, None for none.

        If it did not come from there, by `shard` and `offset` in the index, that is a finding.
        """
        origin = None if shard is None else (shard, offset)
        place = self._place(length, origin, where)
        if place is None:
            return None
        if origin is not None and origin != place:
            message = f"it came from byte {origin[1]:,} of shard {origin[0]:,}, by the index; it "
            message += f"lies at byte {place[1]:,} of shard {place[0]:,}"
            self.pack.findings.add("origin", message, **where)
        is_itself = self.same_files.get(file) == place[0]
        return None if self.is_another_model or is_itself else place

    def _place(
        self, length: int, origin: tuple[int, int] | None, where: Where
    ) -> tuple[int, int] | None:
        """Return the place in the source of a part, a tensor, or other bytes of a shard."""
        if "part" in where:
            slices = self.witness.parts.get((where["layer"], where["part"]))
            if slices is None or slices.length != length:
                return None
            expert = where["expert"]
            return slices.places[expert] if expert < len(slices.places) else None
        if "tensor" in where:
            tensor = self.witness.dense.get(where["tensor"])
            if tensor is None or tensor.length != length:
                return None
            return tensor.shard, tensor.start
        shards = self.witness.shards
        if origin is None or origin[0] >= len(shards):
            return None
        return origin if origin[1] + length <= shards[origin[0]].length else None

    def _check_shards(self) -> None:
        described, shards = self.pack.manifest.source.shards, self.witness.shards
        findings = self.pack.findings
        if self.is_split_otherwise:
            message = f"the source has {len(shards):,} shards, the pack was made from "
            findings.add("source", message + f"{len(described):,}")
            self.changed_headers = [os.path.basename(shard.path) for shard in shards]
            return
        for entry, shard in zip(described, shards, strict=True):
            name = os.path.basename(shard.path)
            before = len(findings.all)
            if shard.length != entry.length:
                message = f"it is {shard.length:,} bytes long, it was {entry.length:,}"
                findings.add("source", message, file=name)
            if sha256_of(shard.path, entry.header_length) != entry.header_sha256:
                message = "its header is not that of the shard that was packed"
                findings.add("source", message, file=name)
            elif entry.header_length != shard.header_length:
                message = f"its header is {shard.header_length:,} bytes long, the manifest says "
                findings.add("source", message + f"{entry.header_length:,}", file=name)
            if len(findings.all) > before:
                self.changed_headers.append(name)

    def _check_parts(self) -> None:
        findings, layers = self.pack.findings, self.pack.manifest.layers
        packed = {
            (family.layer, kind.name): (kind, family.expert_count)
            for family in self.pack.index.families
            for kind in family.part_kinds
        }
        for key in packed.keys() | self.witness.parts.keys():
            where: Where = {"layer": key[0], "part": key[1]}
            if key not in self.witness.parts:
                findings.add("surplus", "the source has no such part", **where)
            elif key in packed:
                slices = self.witness.parts[key]
                self._check_shape(_text(*packed[key]), _text(slices, len(slices.places)), where)
            elif layers is None or key[0] in layers:
                findings.add("missing", "the source has this part", **where)
        for layer in set(layers or ()) - {layer for layer, _ in packed}:
            findings.add("missing", "the manifest lists this layer", layer=layer)

    def _check_tensors(self) -> None:
        if "tensors" not in self.pack.index.directory.sections:
            return
        packed = {tensor.name: tensor for tensor in self.pack.tensors.values()}
        for name in packed.keys() | self.witness.dense.keys():
            if name not in self.witness.dense:
                message = "the source has no such dense tensor"
                self.pack.findings.add("surplus", message, tensor=name)
            elif name not in packed:
                self.pack.findings.add("missing", "the source has this dense tensor", tensor=name)
            else:
                ours, theirs = _text(packed[name]), _text(self.witness.dense[name])
                self._check_shape(ours, theirs, {"tensor": name})

    def _check_shape(self, ours: str, theirs: str, where: Where) -> None:
        if ours != theirs:
            message = f"it is {ours}; the source has {theirs}"
            self.pack.findings.add("shape", message, **where)

    def _same_files(self) -> Iterator[tuple[int, int]]:
        for file, path in enumerate(self.pack.paths):
            for number, shard in enumerate(self.witness.shards):
                try:
                    is_shard = self.pack.index.files[file].is_shard
                    if is_shard and os.path.samefile(path, shard.path):
                        yield file, number
                except OSError:
                    break


def _text(
    record: PartKind | PartSlices | DenseTensor | WalkedTensor, count: int | None = None
) -> str:
    """Describe a part of `count` experts, or a tensor."""
    experts = "" if count is None else f"{count:,} experts of "
    size = BLOCK_SIZES.get(record.type_id)
    name = size.type_name if size else f"type {record.type_id}"
    shape = " x ".join(map(str, record.shape)) or "one value"
    return f"{experts}{shape} {name}, {record.length:,} bytes"
