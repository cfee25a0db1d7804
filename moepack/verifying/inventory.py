"""The records of the index against the rules of the format, and what is to be read where."""

import os
from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple

from moepack import digest
from moepack.errors import PackError
from moepack.format.dense import DenseTensor, ShardBytes
from moepack.format.index import Index
from moepack.format.manifest import Manifest
from moepack.format.records import BlobRecord, PartRecord
from moepack.format.tables import PackedFamily, PartKind
from moepack.verifying.block_sizes import BLOCK_SIZES, stated_length
from moepack.verifying.extents import Extent, Frame, Item, SourceRange
from moepack.verifying.places import Place, Where, check_apart
from moepack.verifying.report import Findings


class Sources(NamedTuple):
    """Says where the bytes of an extent lie in the source; None for what is not compared.

    Each is given the number of the file that holds them, and the record.
    """

    part: Callable[[int, PackedFamily, PartKind, int], SourceRange | None]
    tensor: Callable[[DenseTensor], SourceRange | None]
    shard_bytes: Callable[[ShardBytes], SourceRange | None]


NO_SOURCES = Sources(lambda *_: None, lambda _: None, lambda _: None)


def take(
    index: Index, described: Manifest, sources: Sources, findings: Findings
) -> list[list[Item]]:
    """Check all records; return the sound items of each file by their offsets."""
    inventory = _Inventory(index, described, sources, findings)
    for family in index.families:
        for kind in family.part_kinds:
            inventory.kind(family, kind)
        for expert in range(family.expert_count):
            inventory.expert(family, expert)
    for number in range(index.tensor_count):
        inventory.tensor(number)
    for number in range(index.shard_range_count):
        inventory.shard_bytes(number)
    inventory.ranks()
    inventory.overlaps()
    return inventory.sorted_items()


class _Inventory:
    def __init__(
        self, index: Index, described: Manifest, sources: Sources, findings: Findings
    ) -> None:
        self.index = index
        self.headers = {
            (number, 0, entry.header_length): entry.header_sha256
            for number, entry in enumerate(described.source.shards)
        }
        self.sources = sources
        self.findings = findings
        self.items: list[list[Item]] = [[] for _ in index.files]
        self.places: list[list[Place]] = [[] for _ in index.files]
        self.alignments: dict[int, int] = defaultdict(lambda: 1)
        self.names: set[str] = set()

    def kind(self, family: PackedFamily, kind: PartKind) -> None:
        """Check what a record of a part's kind says against its type, if the packer knew it."""
        if kind.inferred:
            return
        shape = f"{' x '.join(map(str, kind.shape)) or 'one value'} of {kind.type_name}"
        where: Where = {"layer": family.layer, "part": kind.name}
        self.check_type(kind.type_id, kind.type_name, kind.shape, kind.length, shape, where)
        if kind.type_id in BLOCK_SIZES and kind.interleaved_row_count != 1:
            message = f"{kind.type_name} interleaves no rows, the record says "
            message += f"{kind.interleaved_row_count:,}"
            self.findings.add("record", message, **where)

    def check_type(
        self,
        type_id: int,
        type_name: str,
        shape: tuple[int, ...],
        length: int,
        text: str,
        where: Where,
    ) -> None:
        """Check name and length against the block size of the type, where it is known."""
        size = BLOCK_SIZES.get(type_id)
        if size is None:
            return
        if type_name != size.type_name:
            message = f"type {type_id} is {size.type_name}, the record says {type_name}"
            self.findings.add("record", message, **where)
        expected = stated_length(type_id, shape)
        if expected is None:
            message = f"{text} is not in whole blocks of {size.element_count}"
            self.findings.add("record", message, **where)
        elif expected != length:
            message = f"{text} is {expected:,} bytes long, the record says {length:,}"
            self.findings.add("record", message, **where)

    def expert(self, family: PackedFamily, expert: int) -> None:
        where: Where = {"layer": family.layer, "expert": expert}
        number = family.first_blob + expert
        try:
            blob = BlobRecord(*self.index.blob(number))
        except PackError as error:
            self.findings.add_error("record", error, **where)
            return
        if blob.length:
            place = Place(blob.offset, blob.offset + blob.length, "blob", where)
            self.places[blob.file].append(place)
            self.align(blob.file, self.index.header.blob_alignment)
        inside = []
        before: PartRecord | None = None
        for step, kind in enumerate(family.part_kinds):
            first = family.first_part + expert * len(family.part_kinds)
            try:
                part = PartRecord(*self.index.part(first + step, kind))
            except PackError as error:
                self.findings.add_error("record", error, part=kind.name, **where)
                continue
            extent = self.part_extent(family, kind, expert, part)
            extent = extent._replace(strong=self.index.strong_digest(first + step))
            extent = self.with_frame(first + step, kind, extent, part)
            self.second_place(first + step, kind, extent, number)
            if blob.length and self.is_inside(extent, part, blob, before):
                inside.append(extent)
                before = part
                continue
            self.add(part.file, Item(extent.offset, extent.end, number, (extent,)))
            if not blob.length:
                self.check_apart_part(extent, part)
        if blob.length:
            inside.sort(key=lambda extent: extent.offset)
            end = blob.offset + blob.length
            self.add(blob.file, Item(blob.offset, end, number, tuple(inside)))

    def second_place(self, part: int, kind: PartKind, extent: Extent, blob: int) -> None:
        """Add the second place of a part, if it has one."""
        where: Where = {"layer": extent.layer, "expert": extent.expert, "part": extent.part}
        try:
            second = self.index.second_place(part, kind)
        except PackError as error:
            self.findings.add_error("record", error, **where)
            return
        if second is None:
            return
        file, offset = second
        again = extent._replace(offset=offset, source=None, strong=None, frame=None)
        if extent.frame is not None:  # it is the same frame in both places, and decoded once
            again = again._replace(digest=extent.frame.digest)
        self.places[file].append(Place(offset, again.end, "part", where))
        self.add(file, Item(offset, again.end, blob, (again,)))

    def part_extent(
        self, family: PackedFamily, kind: PartKind, expert: int, part: PartRecord
    ) -> Extent:
        return Extent(
            offset=part.offset,
            length=part.stored_length,
            digest=self.index.files[part.file].known(part.digest),
            layer=family.layer,
            expert=expert,
            part=kind.name,
            source=self.sources.part(part.file, family, kind, expert),
        )

    def with_frame(self, number: int, kind: PartKind, extent: Extent, part: PartRecord) -> Extent:
        """Return the extent of a part with its frame; check its stored digest where it has none."""
        stored = self.index.stored_digest(number)
        if part.codec:
            known = None if extent.digest is None else stored
            return extent._replace(frame=Frame(kind.length, known))
        if stored is not None and stored != (extent.digest or 0):
            problem = f"its stored digest is {digest.to_text(stored)}, though it is stored as it is"
            self.find_part(extent, part, problem)
        return extent

    def is_inside(
        self, extent: Extent, part: PartRecord, blob: BlobRecord, before: PartRecord | None
    ) -> bool:
        """Check where a part lies in its blob; `before` is the part before it."""
        end = blob.offset + blob.length
        if part.file != blob.file or not blob.offset <= extent.offset <= end - extent.length:
            name = self.index.files[blob.file].name
            range_text = f"bytes {blob.offset:,} to {end:,} of {name}"
            self.find_part(extent, part, f"lies outside its blob, which is {range_text}")
            return False
        alignment = self.index.header.part_alignment
        if before is not None:
            last = before.offset + before.stored_length
            if extent.end <= before.offset:
                problem = (
                    f"stands before the part before it, which begins at byte {before.offset:,}"
                )
                self.find_part(extent, part, problem)
            elif extent.offset < last:
                self.find_part(
                    extent, part, f"overlaps the part before it, which ends at byte {last:,}"
                )
        if (extent.part or "").endswith(".weight") and extent.offset % alignment:
            self.find_part(extent, part, f"is not aligned to {alignment:,} bytes")
        return True

    def check_apart_part(self, extent: Extent, part: PartRecord) -> None:
        """Check a part of an expert without a blob: it has to lie in a shard."""
        if not self.index.files[part.file].is_shard:
            problem = "lies in no shard, and its expert has no blob"
            self.find_part(extent, part, problem)
        where: Where = {"layer": extent.layer, "expert": extent.expert, "part": extent.part}
        self.places[part.file].append(Place(extent.offset, extent.end, "part", where))

    def find_part(self, extent: Extent, part: PartRecord, problem: str) -> None:
        self.findings.add(
            "record",
            problem,
            layer=extent.layer,
            expert=extent.expert,
            part=extent.part,
            file=self.index.files[part.file].name,
            offset=extent.offset,
        )

    def tensor(self, number: int) -> None:
        try:
            tensor = self.index.tensor(number)
        except PackError as error:
            self.findings.add_error("record", error, file=os.path.basename(self.index.path))
            return
        where: Where = {"tensor": tensor.name}
        if tensor.name in self.names:
            self.findings.add("record", "two tensors have this name", tensor=tensor.name)
        self.names.add(tensor.name)
        if 0 in tensor.shape and tensor.length:
            message = f"it has no elements, and {tensor.length:,} bytes"
            self.findings.add("record", message, tensor=tensor.name)
        elif not tensor.inferred:
            shape = f"{' x '.join(map(str, tensor.shape)) or 'one value'} of {tensor.type_name}"
            place = (tensor.type_id, tensor.type_name, tensor.shape)
            self.check_type(*place, tensor.length, shape, where)
        extent = Extent(
            offset=tensor.offset,
            length=tensor.length,
            digest=self.index.files[tensor.file].known(tensor.digest),
            tensor=tensor.name,
            source=self.sources.tensor(tensor),
            strong=self.index.strong_digest(self.index.part_count + number),
        )
        self.add_dense(tensor.file, extent, self.index.blob_count + number, where)

    def shard_bytes(self, number: int) -> None:
        try:
            held = self.index.shard_range(number)
        except PackError as error:
            self.findings.add_error("record", error, file=os.path.basename(self.index.path))
            return
        extent = Extent(
            offset=held.offset,
            length=held.length,
            digest=held.digest,
            source=self.sources.shard_bytes(held),
            sha256=self.headers.get((held.shard, held.shard_offset, held.length)),
            strong=self.index.strong_digest(
                self.index.part_count + self.index.tensor_count + number
            ),
        )
        self.add_dense(held.file, extent, None, {})

    def add_dense(self, file: int, extent: Extent, number: int | None, where: Where) -> None:
        """Add what is no expert's; the decoder has checked its alignment."""
        what = "bytes of a shard" if number is None else "tensor"
        self.places[file].append(Place(extent.offset, extent.end, what, where))
        self.add(file, Item(extent.offset, extent.end, number, (extent,)))
        self.align(file, self.index.header.tensor_alignment)

    def add(self, file: int, item: Item) -> None:
        self.items[file].append(item)

    def align(self, file: int, alignment: int) -> None:
        """Note what the length of a file has to be a multiple of."""
        self.alignments[file] = max(self.alignments[file], alignment)

    def ranks(self) -> None:
        """Check that ranks are a permutation, and that hotness falls along them."""
        families = self.index.families
        measured = [f.hotness_measured for f in families for _ in range(f.expert_count)]
        before: tuple[bool, int] = (True, 1 << 64)
        for rank in range(self.index.blob_count):
            try:
                number = self.index.blob_at_rank(rank)
            except PackError as error:
                self.findings.add_error("rank", error, file=os.path.basename(self.index.path))
                continue
            try:
                blob = BlobRecord(*self.index.blob(number))
            except PackError:  # found with its expert
                continue
            if blob.rank != rank:
                self.find_rank(
                    f"blob {number:,} stands at rank {rank:,}, its record says {blob.rank:,}"
                )
            hotness = (measured[number], blob.hotness)
            if blob.hotness and not measured[number]:
                self.find_rank(f"blob {number:,} has a hotness, its family was not measured")
            elif hotness > before:
                self.find_rank(f"blob {number:,} at rank {rank:,} is hotter than the one before it")
            before = hotness

    def find_rank(self, message: str) -> None:
        self.findings.add("rank", message, file=os.path.basename(self.index.path))

    def overlaps(self) -> None:
        """Check that nothing overlaps anything, and that files are as long as they may be."""
        for number, file in enumerate(self.index.files):

            def overlaps(place: Place, other: Place, name: str = file.name) -> None:
                article = "another" if place.what == other.what else f"a {other.what}"
                message = f"the {place.what} overlaps {article}, which ends at byte {other.end:,}"
                self.findings.add("record", message, file=name, offset=place.start, **place.where)

            check_apart(self.places[number], overlaps)
            alignment = self.alignments[number]
            if file.has_blobs and file.length % alignment:
                message = f"its length is not aligned: {file.length:,} is no multiple of "
                self.findings.add("record", f"{message}{alignment:,}", file=file.name)

    def sorted_items(self) -> list[list[Item]]:
        for items in self.items:
            items.sort(key=lambda item: (item.start, item.end))
        return self.items
