"""The index against the source: what the one has and the other has not, and what came from where.

It knows the source by the verifier's own witness alone.
"""

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from moepack.errors import PackError, SourceError, read_failure
from moepack.format.dense import DenseTensor, ShardBytes
from moepack.format.index import Index
from moepack.format.manifest import Manifest
from moepack.format.tables import PackedFamily, PartKind
from moepack.storage.regular_file import open_regular
from moepack.verifying.block_sizes import BLOCK_SIZES
from moepack.verifying.extents import SourceRange
from moepack.verifying.inventory import Sources
from moepack.verifying.places import Where
from moepack.verifying.report import Findings
from moepack.verifying.scan import Gap
from moepack.verifying.witness import DenseSlice, PartKey, PartSlices, Witness

_PIECE_LENGTH = 1 << 20


class Comparison:
    """One comparison; `check` does it, as far as that needs no bytes but the headers'.

    `same_files` maps the numbers of the index's files that are shards of this very source to the
    numbers of the shards. `changed_headers` are the names of shards that are not as they were
    packed by length or header.
    """

    def __init__(
        self,
        index: Index,
        described: Manifest,
        witness: Witness,
        paths: Sequence[Path],
        findings: Findings,
    ) -> None:
        self.index = index
        self.manifest = described
        self.witness = witness
        self.findings = findings
        self.same_files = _same_files(index, paths, witness)
        self.changed_headers: list[str] = []
        self.is_another_model = False

    @property
    def is_split_otherwise(self) -> bool:
        """Whether the source has another number of shards than the pack was made from."""
        return len(self.witness.shards) != len(self.manifest.source.shards)

    def check(self) -> None:
        """Compare shards, tensors, shapes and origins; leave whether it is another model."""
        before = len(self.findings.all)
        self._shards()
        self._parts()
        self._tensors()
        kinds = {finding.kind for finding in self.findings.all[before:]}
        all_changed = len(self.changed_headers) >= len(self.witness.shards)
        self.is_another_model = all_changed and bool(kinds & {"shape", "missing", "surplus"})

    def sources(self) -> Sources:
        """Say where bytes lie in the source by the witness; nothing of another model is."""
        return Sources(self._part_source, self._tensor_source, self._range_source)

    def gaps(self) -> Iterator[Gap]:
        """Yield the ranges of the shards that no tensor takes and the pack does not hold."""
        held: list[list[tuple[int, int]]] = [
            [(tensor.start, tensor.start + tensor.length) for tensor in shard.tensors]
            for shard in self.witness.shards
        ]
        for number in range(self.index.shard_range_count):
            try:
                found = self.index.shard_range(number)
            except PackError:
                continue
            if found.shard < len(held):
                end = found.shard_offset + found.length
                held[found.shard].append((found.shard_offset, end))
        for number, shard in enumerate(self.witness.shards):
            position = 0
            for start, end in sorted(held[number]):
                if start > position:
                    yield Gap((number, position, min(start, shard.length)))
                position = max(position, end)
            if position < shard.length:
                yield Gap((number, position, shard.length))

    def _shards(self) -> None:
        """Compare the shards' lengths and headers with what the pack was made from."""
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

    def _parts(self) -> None:
        layers = self.manifest.layers
        held = {
            PartKey(family.layer, kind.name): (family, kind)
            for family in self.index.families
            for kind in family.part_kinds
        }
        for key, slices in self.witness.parts.items():
            where: Where = {"layer": key.layer, "part": key.part}
            if key in held:
                self._part(*held[key], slices, where)
            elif layers is None or key.layer in layers:
                self.findings.add("missing", "the source has this part", **where)
        for key in held:
            if key not in self.witness.parts:
                message = "the source has no such part"
                self.findings.add("surplus", message, layer=key.layer, part=key.part)
        for layer in sorted(set(layers or ()) - {key.layer for key in held}):
            self.findings.add("missing", "the manifest lists this layer", layer=layer)

    def _part(self, family: PackedFamily, kind: PartKind, slices: PartSlices, where: Where) -> None:
        ours = _text(kind.type_id, kind.shape, kind.length, family.expert_count)
        theirs = _text(slices.type_id, slices.shape, slices.length, len(slices.starts))
        if ours != theirs:
            self.findings.add("shape", f"it is {ours}; the source has {theirs}", **where)
            return
        for expert in range(family.expert_count):
            try:
                shard, offset = self.index.origin(family, kind, expert)
            except PackError:
                continue  # found already
            if (shard, offset) != (slices.shards[expert], slices.starts[expert]):
                message = f"it came from byte {offset:,} of shard {shard:,}, by the index; it lies "
                message += f"at byte {slices.starts[expert]:,} of shard {slices.shards[expert]:,}"
                self.findings.add("origin", message, expert=expert, **where)

    def _tensors(self) -> None:
        if "tensors" not in self.index.directory.sections:
            return
        held = set()
        for number in range(self.index.tensor_count):
            try:
                tensor = self.index.tensor(number)
            except PackError:
                continue
            held.add(tensor.name)
            theirs = self.witness.dense.get(tensor.name)
            if theirs is None:
                message = "the source has no such dense tensor"
                self.findings.add("surplus", message, tensor=tensor.name)
            else:
                self._tensor(tensor, theirs)
        for name in self.witness.dense.keys() - held:
            self.findings.add("missing", "the source has this dense tensor", tensor=name)

    def _tensor(self, tensor: DenseTensor, theirs: DenseSlice) -> None:
        texts = [_text(item.type_id, item.shape, item.length) for item in (tensor, theirs)]
        if texts[0] != texts[1]:
            message = f"it is {texts[0]}; the source has {texts[1]}"
            self.findings.add("shape", message, tensor=tensor.name)
        elif (tensor.shard, tensor.shard_offset) != (theirs.shard, theirs.start):
            message = f"it came from byte {tensor.shard_offset:,} of shard {tensor.shard:,}, by "
            message += f"the index; it lies at byte {theirs.start:,} of shard {theirs.shard:,}"
            self.findings.add("origin", message, tensor=tensor.name)

    def _part_source(
        self, file: int, family: PackedFamily, kind: PartKind, expert: int
    ) -> SourceRange | None:
        slices = self.witness.parts.get(PartKey(family.layer, kind.name))
        if slices is None or slices.length != kind.length or expert >= len(slices.starts):
            return None
        return self._source(file, slices.shards[expert], slices.starts[expert])

    def _tensor_source(self, tensor: DenseTensor) -> SourceRange | None:
        theirs = self.witness.dense.get(tensor.name)
        if theirs is None or theirs.length != tensor.length:
            return None
        return self._source(tensor.file, theirs.shard, theirs.start)

    def _range_source(self, held: ShardBytes) -> SourceRange | None:
        shards = self.witness.shards
        if held.shard >= len(shards):
            return None
        if held.shard_offset + held.length > shards[held.shard].length:
            return None
        return self._source(held.file, held.shard, held.shard_offset)

    def _source(self, file: int, shard: int, offset: int) -> SourceRange | None:
        """Return a range of the source, None where the file that holds the bytes is that shard."""
        return None if self.same_files.get(file) == shard else SourceRange(shard, offset)


def _text(
    type_id: int, shape: tuple[int, ...], length: int, expert_count: int | None = None
) -> str:
    """Say what a part or tensor is, in words."""
    experts = "" if expert_count is None else f"{expert_count:,} experts of "
    size = BLOCK_SIZES.get(type_id)
    name = size.type_name if size else f"type {type_id}"
    return f"{experts}{' x '.join(map(str, shape)) or 'one value'} {name}, {length:,} bytes"


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


def sha256_of(path: str, length: int | None = None) -> str:
    """Return the SHA-256 of the first `length` bytes of a shard, of all where it is None.

    Raises SourceError and MachineError.
    """
    sha256 = hashlib.sha256()
    try:
        with open(open_regular(path), "rb", buffering=0) as file:
            left = os.fstat(file.fileno()).st_size if length is None else length
            while left > 0 and (piece := file.read(min(left, _PIECE_LENGTH))):
                sha256.update(piece)
                left -= len(piece)
    except OSError as error:
        raise read_failure(error, path, SourceError) from None
    return sha256.hexdigest()
