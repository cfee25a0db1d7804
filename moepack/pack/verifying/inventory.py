"""The records of the index against the rules of the format, and the ranges to be read."""

import math
import os
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from moepack.common.errors import PackError
from moepack.common.sizes import count_text
from moepack.pack.format import records
from moepack.pack.format.dense import DenseTensor
from moepack.pack.format.index import Index
from moepack.pack.format.manifest import Manifest
from moepack.pack.format.records import BlobRecord, PartRecord
from moepack.pack.format.tables import PackedFamily, PartKind
from moepack.pack.verifying.block_sizes import BLOCK_SIZES, stated_length
from moepack.pack.verifying.comparison import SourceComparison
from moepack.pack.verifying.extents import CheckedRange, Item, Place, Where, overlaps
from moepack.pack.verifying.report import Findings


def list_items(
    index: Index, described: Manifest, comparison: SourceComparison | None, findings: Findings
) -> list[list[Item]]:
    """Check all records; return the sound items of each file by their offsets.

    The bytes of these are to be compared with the source of `comparison`.
    """
    inventory = _Inventory(index, described, comparison, findings)
    for family in index.families:
        for kind in family.part_kinds:
            inventory.check_kind(family, kind)
        for expert in range(family.expert_count):
            inventory.add_expert(family, expert)
    for number in range(index.tensor_count):
        inventory.add_tensor(number)
    for number in range(index.shard_range_count):
        inventory.add_shard_bytes(number)
    inventory.check_ranks()
    inventory.check_files()
    return [sorted(items, key=lambda item: (item.start, item.end)) for items in inventory.items]


@dataclass
class _Inventory:
    index: Index
    described: Manifest
    comparison: SourceComparison | None
    findings: Findings

    def __post_init__(self) -> None:
        self.index_file = {"file": os.path.basename(self.index.path)}
        self.headers = {
            (number, 0, entry.header_length): entry.header_sha256
            for number, entry in enumerate(self.described.source.shards)
        }
        self.items: list[list[Item]] = [[] for _ in self.index.files]
        self.places: list[list[Place]] = [[] for _ in self.index.files]
        self.alignments: dict[int, int] = defaultdict(lambda: 1)
        self.names: set[str] = set()

    def check_kind(self, family: PackedFamily, kind: PartKind) -> None:
        """Check the record of a part's kind against its type, if the packer knew it."""
        if kind.inferred:
            return
        where: Where = {"layer": family.layer, "part": kind.name}
        self.check_type(kind, where)
        size, row_count = BLOCK_SIZES.get(kind.type_id), math.prod(kind.shape[1:])
        if size is None:
            return
        if size.tail:
            message = (
                f"{size.type_name} has bytes at the end of a tensor, so no part is of this type"
            )
            self.findings.add("record", message, **where)
        elif kind.interleaved_row_count != size.rows:
            message = f"{size.type_name} stores {count_text(size.rows, 'row')} as one unit, "
            message += f"the record says {kind.interleaved_row_count:,}"
            self.findings.add("record", message, **where)
        elif row_count % size.rows:
            message = f"{count_text(row_count, 'row')} of {size.type_name}, which stores "
            message += f"{size.rows} as one unit"
            self.findings.add("record", message, **where)

    def check_type(self, record: PartKind | DenseTensor, where: Where) -> None:
        """Check name and length against the block size of the type, if it is known."""
        size = BLOCK_SIZES.get(record.type_id)
        if size is None:
            return
        text = f"{' x '.join(map(str, record.shape)) or 'one value'} of {record.type_name}"
        if record.type_name != size.type_name:
            message = f"type {record.type_id} is {size.type_name}, the record says "
            self.findings.add("record", message + record.type_name, **where)
        expected = stated_length(record.type_id, record.shape)
        if expected is None:
            message = f"{text} is not in whole blocks of {size.element_count}"
            self.findings.add("record", message, **where)
        elif expected != record.length:
            message = f"{text} is {expected:,} bytes long, the record says {record.length:,}"
            self.findings.add("record", message, **where)

    def add_expert(self, family: PackedFamily, expert: int) -> None:
        number = family.first_blob + expert
        where: Where = {"layer": family.layer, "expert": expert}
        try:
            blob = BlobRecord(*self.index.blob(number))
        except PackError as error:
            self.findings.add_error("record", error, **where)
            return
        inside: list[CheckedRange] = []
        before: PartRecord | None = None
        for part, checked in self.parts(family, expert):
            if blob.length and self.is_inside(checked, part, blob, before):
                inside.append(checked)
                before = part
                continue
            self.add(part.file, number, checked)
            if not blob.length:
                if not self.index.files[part.file].is_shard:
                    self.find(checked, part.file, "lies in no shard, and its expert has no blob")
                self.occupy(part.file, checked, "part")
        if blob.length:
            end = blob.offset + blob.length
            self.places[blob.file].append(Place(blob.offset, end, "blob", where))
            self.align(blob.file, self.index.header.blob_alignment)
            inside.sort(key=lambda checked: checked.offset)
            self.items[blob.file].append(Item(blob.offset, end, number, tuple(inside)))

    def parts(self, family: PackedFamily, expert: int) -> Iterator[tuple[PartRecord, CheckedRange]]:
        """Yield the sound parts of an expert."""
        first = family.first_part + expert * len(family.part_kinds)
        for number, kind in enumerate(family.part_kinds, start=first):
            where: Where = {"layer": family.layer, "expert": expert, "part": kind.name}
            try:
                part = PartRecord(*self.index.part(number, kind))
            except PackError as error:
                self.findings.add_error("record", error, **where)
                continue
            source = None
            if self.comparison is not None:
                source = self.comparison.part_source(part.file, family, kind, expert)
            checked = CheckedRange(
                offset=part.offset,
                length=kind.length,
                digest=self.index.files[part.file].known(part.digest),
                where=where,
                source=source,
                strong=self.index.strong_digest(number),
            )
            yield part, checked

    def is_inside(
        self, checked: CheckedRange, part: PartRecord, blob: BlobRecord, before: PartRecord | None
    ) -> bool:
        """Check where a part lies in its blob; `before` is the part before it."""
        end = blob.offset + blob.length
        if part.file != blob.file or not blob.offset <= checked.offset <= end - checked.length:
            name = self.index.files[blob.file].name
            problem = f"lies outside its blob, which is bytes {blob.offset:,} to {end:,} of {name}"
            self.find(checked, part.file, problem)
            return False
        if before is not None:
            last = before.offset + before.stored_length
            if checked.end <= before.offset:
                problem = "stands before the part before it, which begins at byte "
                self.find(checked, part.file, f"{problem}{before.offset:,}")
            elif checked.offset < last:
                problem = f"overlaps the part before it, which ends at byte {last:,}"
                self.find(checked, part.file, problem)
        alignment = self.index.header.part_alignment
        if checked.where["part"].endswith(".weight") and checked.offset % alignment:
            self.find(checked, part.file, f"is not aligned to {alignment:,} bytes")
        return True

    def find(self, checked: CheckedRange, file: int, problem: str) -> None:
        name = self.index.files[file].name
        self.findings.add("record", problem, **checked.where, file=name, offset=checked.offset)

    def add_tensor(self, number: int) -> None:
        try:
            tensor = self.index.tensor(number)
        except PackError as error:
            self.findings.add_error("record", error, **self.index_file)
            return
        where: Where = {"tensor": tensor.name}
        if tensor.name in self.names:
            self.findings.add("record", "two tensors have this name", **where)
        self.names.add(tensor.name)
        if (0 in tensor.shape) != (tensor.length == 0):
            elements = "no" if 0 in tensor.shape else f"{math.prod(tensor.shape):,}"
            message = f"it has {elements} elements, and {tensor.length:,} bytes"
            self.findings.add("record", message, **where)
        elif not tensor.inferred:
            self.check_type(tensor, where)
        checked = CheckedRange(
            offset=tensor.offset,
            length=tensor.length,
            digest=self.index.files[tensor.file].known(tensor.digest),
            where=where,
            source=self.comparison.tensor_source(tensor) if self.comparison else None,
            strong=self.index.strong_digest(self.index.part_count + number),
        )
        self.add_dense(tensor.file, self.index.blob_count + number, checked, "tensor")

    def add_shard_bytes(self, number: int) -> None:
        try:
            record = self.index.shard_range(number)
        except PackError as error:
            self.findings.add_error("record", error, **self.index_file)
            return
        strong_number = self.index.part_count + self.index.tensor_count + number
        checked = CheckedRange(
            offset=record.offset,
            length=record.length,
            digest=record.digest,
            where={},
            source=self.comparison.range_source(record) if self.comparison else None,
            sha256=self.headers.get((record.shard, record.shard_offset, record.length)),
            strong=self.index.strong_digest(strong_number),
        )
        self.add_dense(record.file, None, checked, "bytes of a shard")

    def add_dense(self, file: int, number: int | None, checked: CheckedRange, noun: str) -> None:
        """Add a range that is no expert's; the decoder has checked its alignment."""
        self.occupy(file, checked, noun)
        self.add(file, number, checked)
        self.align(file, self.index.header.tensor_alignment)

    def add(self, file: int, number: int | None, checked: CheckedRange) -> None:
        """Add an item of one range."""
        self.items[file].append(Item(checked.offset, checked.end, number, (checked,)))

    def occupy(self, file: int, checked: CheckedRange, noun: str) -> None:
        """Reserve the place of a range: nothing else may lie there."""
        self.places[file].append(Place(checked.offset, checked.end, noun, checked.where))

    def align(self, file: int, alignment: int) -> None:
        """Raise the alignment that the length of a file must have."""
        self.alignments[file] = max(self.alignments[file], alignment)

    def check_ranks(self) -> None:
        """Check that ranks are a permutation, and that hotness falls along them."""
        families = self.index.families
        measured = [f.hotness_measured for f in families for _ in range(f.expert_count)]
        before: tuple[bool, int] = (True, 1 << 64)
        for rank in range(self.index.blob_count):
            try:
                number = self.index.blob_at_rank(rank)
            except PackError as error:
                self.findings.add_error("rank", error, **self.index_file)
                continue
            try:
                blob = BlobRecord(*self.index.blob(number))
            except PackError:  # found with its expert
                continue
            if blob.rank != rank:
                message = f"blob {number:,} stands at rank {rank:,}, its record says {blob.rank:,}"
                self.findings.add("rank", message, **self.index_file)
            if blob.hotness > records.MAX_LENGTH:
                message = f"blob {number:,} has a hotness of {blob.hotness:,}, "
                message += f"more than {records.MAX_LENGTH:,}"
                self.findings.add("rank", message, **self.index_file)
            hotness = (measured[number], blob.hotness)
            if blob.hotness and not measured[number]:
                message = f"blob {number:,} has a hotness, its family was not measured"
                self.findings.add("rank", message, **self.index_file)
            elif hotness > before:
                message = f"blob {number:,} at rank {rank:,} is hotter than the one before it"
                self.findings.add("rank", message, **self.index_file)
            before = hotness

    def check_files(self) -> None:
        """Check that nothing overlaps anything, and that the lengths of files are aligned."""
        for number, file in enumerate(self.index.files):
            for place, other in overlaps(self.places[number]):
                article = "another" if place.noun == other.noun else f"a {other.noun}"
                message = f"the {place.noun} overlaps {article}, which ends at byte {other.end:,}"
                where = {"file": file.name, "offset": place.start}
                self.findings.add("record", message, **where, **place.where)
            alignment = self.alignments[number]
            if not file.is_shard and file.length % alignment:
                message = f"its length is not aligned: {file.length:,} is no multiple of "
                self.findings.add("record", f"{message}{alignment:,}", file=file.name)
