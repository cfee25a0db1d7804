"""The records of the index against the rules of the format, and the ranges to be read."""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter

from moepack.common.errors import PackError
from moepack.common.sizes import count_text, ranges_text
from moepack.pack.format import manifest, records
from moepack.pack.format.dense import DenseTensor
from moepack.pack.format.records import BlobRecord, ShardBytesRecord
from moepack.pack.format.source_entry import ShardEntry
from moepack.pack.format.tables import PackedFamily, PartKind
from moepack.pack.verifying.block_sizes import BLOCK_SIZES, stated_length
from moepack.pack.verifying.checked_pack import (
    CheckedPack,
    CheckedRange,
    Segment,
    Where,
    overlaps,
)
from moepack.pack.verifying.comparison import SourceComparison


def list_segments(pack: CheckedPack, comparison: SourceComparison | None) -> list[list[Segment]]:
    """Check all records; return the sound blobs, tensors and other bytes of each file, in order.

    Their bytes are to be compared with the source of `comparison`.
    """
    inventory = _Inventory(pack, comparison)
    for family in pack.index.families:
        for kind in family.part_kinds:
            inventory.check_kind(family, kind)
        for expert in range(family.expert_count):
            inventory.add_expert(family, expert)
    for number, tensor in pack.tensors.items():
        inventory.add_tensor(number, tensor)
    for number, record in pack.shard_ranges.items():
        inventory.add_shard_bytes(number, record)
    inventory.check_ranks()
    inventory.check_files()
    return [sorted(segments, key=lambda one: (one.start, one.end)) for segments in inventory.files]


class _Inventory:
    def __init__(self, pack: CheckedPack, comparison: SourceComparison | None) -> None:
        self.pack = pack
        self.index = pack.index
        self.source_of = _no_source if comparison is None else comparison.source_of
        self.headers = {
            (number, 0, entry.header_length): entry.header_sha256
            for number, entry in enumerate(pack.manifest.source.shards)
        }
        self.files: list[list[Segment]] = [[] for _ in self.index.files]
        self.places: list[list[CheckedRange]] = [[] for _ in self.index.files]
        self.alignments = [1] * len(self.index.files)
        self.names: set[str] = set()
        self.has_strong = bool(self.index.directory["strong_digests"].record_count)

    def find(self, message: str, kind: str = "record", **where: object) -> None:
        self.pack.findings.add(kind, message, **where)

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
            end = "has bytes at the end of a tensor, so no part is of this type"
            self.find(f"{size.type_name} {end}", **where)
        elif kind.interleaved_row_count != size.rows:
            message = f"{size.type_name} stores {count_text(size.rows, 'row')} as one unit, "
            self.find(f"{message}the record says {kind.interleaved_row_count:,}", **where)
        elif row_count % size.rows:
            message = f"{count_text(row_count, 'row')} of {size.type_name}, which stores "
            self.find(f"{message}{size.rows} as one unit", **where)

    def check_type(self, record: PartKind | DenseTensor, where: Where) -> None:
        """Check name and length against the block size of the type, if it is known."""
        size = BLOCK_SIZES.get(record.type_id)
        if size is None:
            return
        text = f"{' x '.join(map(str, record.shape)) or 'one value'} of {record.type_name}"
        if record.type_name != size.type_name:
            message = f"type {record.type_id} is {size.type_name}, the record says "
            self.find(message + record.type_name, **where)
        expected = stated_length(record.type_id, record.shape)
        if expected is None:
            self.find(f"{text} is not in whole blocks of {size.element_count}", **where)
        elif expected != record.length:
            message = f"{text} is {expected:,} bytes long, the record says {record.length:,}"
            self.find(message, **where)

    def add_expert(self, family: PackedFamily, expert: int) -> None:
        number = family.first_blob + expert
        where: Where = {"layer": family.layer, "expert": expert}
        try:
            blob = BlobRecord(*self.index.blob(number))
        except PackError as error:
            self.pack.findings.add_error("record", error, **where)
            return
        inside: list[CheckedRange] = []
        for part in self.parts(family, expert):
            if not blob.length:
                if not self.index.files[part.file].is_shard:
                    self.find_in_file(part, "lies in no shard, and its expert has no blob")
                self.add(number, part)
            elif self.is_inside(part, blob, inside[-1] if inside else None):
                inside.append(part)
            else:
                self.files[part.file].append(_segment(number, part))
        if blob.length:
            end = blob.offset + blob.length
            place = (blob.file, blob.offset, blob.length, "blob", where)
            self.places[blob.file].append(CheckedRange(*place, None, None, None, 0, None))
            self.align(blob.file, self.index.header.blob_alignment)
            inside.sort(key=lambda part: part.offset)
            self.files[blob.file].append(
                Segment(blob.file, blob.offset, end, tuple(inside), number)
            )

    def parts(self, family: PackedFamily, expert: int) -> Iterator[CheckedRange]:
        first = family.first_part + expert * len(family.part_kinds)
        for number, kind in enumerate(family.part_kinds, start=first):
            where: Where = {"layer": family.layer, "expert": expert, "part": kind.name}
            shard, shard_offset = None, 0
            try:
                shard, shard_offset = self.index.origin(family, kind, expert)
            except PackError as error:
                self.pack.findings.add_error("origin", error, **where)
            try:
                offset, length, digest, file, _ = self.index.part(number, kind)
            except PackError as error:
                self.pack.findings.add_error("record", error, **where)
                continue
            yield CheckedRange(
                file=file,
                offset=offset,
                length=length,
                noun="part",
                where=where,
                digest=self.index.files[file].known(digest),
                strong=self.strong(number),
                shard=shard,
                shard_offset=shard_offset,
                source=self.source_of(file, length, shard, shard_offset, where),
            )

    def strong(self, number: int) -> bytes | None:
        # The section need not be looked up for each of millions of parts.
        return self.index.strong_digest(number) if self.has_strong else None

    def is_inside(self, part: CheckedRange, blob: BlobRecord, before: CheckedRange | None) -> bool:
        """Check where a part lies in its blob; `before` is the part before it."""
        end = blob.offset + blob.length
        if part.file != blob.file or not blob.offset <= part.offset <= end - part.length:
            name = self.index.files[blob.file].name
            extent = f"bytes {blob.offset:,} to {end:,} of {name}"
            self.find_in_file(part, f"lies outside its blob, which is {extent}")
            return False
        if before is not None and part.end <= before.offset:
            problem = "stands before the part before it, which begins at byte "
            self.find_in_file(part, f"{problem}{before.offset:,}")
        elif before is not None and part.offset < before.end:
            problem = f"overlaps the part before it, which ends at byte {before.end:,}"
            self.find_in_file(part, problem)
        alignment = self.index.header.part_alignment
        if part.where["part"].endswith(".weight") and part.offset % alignment:
            self.find_in_file(part, f"is not aligned to {alignment:,} bytes")
        return True

    def find_in_file(self, checked: CheckedRange, problem: str) -> None:
        name = self.index.files[checked.file].name
        self.find(problem, **checked.where, file=name, offset=checked.offset)

    def add_tensor(self, number: int, tensor: DenseTensor) -> None:
        where: Where = {"tensor": tensor.name}
        if tensor.name in self.names:
            self.find("two tensors have this name", **where)
        self.names.add(tensor.name)
        if (0 in tensor.shape) != (tensor.length == 0):
            elements = "no" if 0 in tensor.shape else f"{math.prod(tensor.shape):,}"
            self.find(f"it has {elements} elements, and {tensor.length:,} bytes", **where)
        elif not tensor.inferred:
            self.check_type(tensor, where)
        digest = self.index.files[tensor.file].known(tensor.digest)
        number_of_all = self.index.part_count + number
        self.add_dense(tensor, self.index.blob_count + number, number_of_all, where, digest)

    def add_shard_bytes(self, number: int, record: ShardBytesRecord) -> None:
        number_of_all = self.index.part_count + self.index.tensor_count + number
        sha256 = self.headers.get((record.shard, record.shard_offset, record.length))
        self.add_dense(record, None, number_of_all, {}, record.digest, sha256)

    def add_dense(
        self,
        record: DenseTensor | ShardBytesRecord,
        number: int | None,
        number_of_all: int,
        where: Where,
        digest: int | None,
        sha256: str | None = None,
    ) -> None:
        """Add a range that is no expert's; the decoder has checked its alignment."""
        shard, shard_offset = record.shard, record.shard_offset
        checked = CheckedRange(
            file=record.file,
            offset=record.offset,
            length=record.length,
            noun="tensor" if where else "range of other bytes",
            where=where,
            digest=digest,
            strong=self.strong(number_of_all),
            shard=shard,
            shard_offset=shard_offset,
            source=self.source_of(record.file, record.length, shard, shard_offset, where),
            sha256=sha256,
        )
        self.add(number, checked)
        self.align(checked.file, self.index.header.tensor_alignment)

    def add(self, number: int | None, checked: CheckedRange) -> None:
        """Add a range that is a segment by itself: nothing else may lie there."""
        self.files[checked.file].append(_segment(number, checked))
        self.places[checked.file].append(checked)

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
                self.pack.findings.add_error("rank", error, **self.pack.index_file)
                continue
            try:
                blob = BlobRecord(*self.index.blob(number))
            except PackError:  # found with its expert
                continue
            if blob.rank != rank:
                self.find_rank(number, f"stands at rank {rank:,}, its record says {blob.rank:,}")
            if blob.hotness > records.MAX_LENGTH:
                most = f"more than {records.MAX_LENGTH:,}"
                self.find_rank(number, f"has a hotness of {blob.hotness:,}, {most}")
            hotness = (measured[number], blob.hotness)
            if blob.hotness and not measured[number]:
                self.find_rank(number, "has a hotness, its family was not measured")
            elif hotness > before:
                self.find_rank(number, f"at rank {rank:,} is hotter than the one before it")
            before = hotness

    def find_rank(self, number: int, problem: str) -> None:
        self.find(f"blob {number:,} {problem}", "rank", **self.pack.index_file)

    def check_files(self) -> None:
        """Check that nothing overlaps anything, and that the lengths of files are aligned."""
        for number, file in enumerate(self.index.files):
            for place, other in overlaps(self.places[number], attrgetter("offset")):
                article = "another" if place.noun == other.noun else f"a {other.noun}"
                message = f"the {place.noun} overlaps {article}, which ends at byte {other.end:,}"
                self.find(message, file=file.name, offset=place.offset, **place.where)
            alignment = self.alignments[number]
            if not file.is_shard and file.length % alignment:
                message = f"its length is not aligned: {file.length:,} is no multiple of "
                self.find(f"{message}{alignment:,}", file=file.name)


def _segment(number: int | None, checked: CheckedRange) -> Segment:
    return Segment(checked.file, checked.offset, checked.end, (checked,), number)


def check_origins(pack: CheckedPack, files: Iterable[Iterable[Segment]]) -> None:
    """Check the origins of all ranges against the shards in the manifest, and each other.

    Restoring and exporting rely on them: each byte of a shard came from one place only. They are
    compared with the source itself elsewhere.
    """
    shards = pack.manifest.source.shards
    places: list[list[CheckedRange]] = [[] for _ in shards]
    shards_of_file: dict[int, set[int]] = defaultdict(set)
    for one in (one for segments in files for segment in segments for one in segment.ranges):
        if one.shard is None:
            continue
        if pack.index.files[one.file].is_shard:
            shards_of_file[one.file].add(one.shard)
        message = _problem_with_origin(pack, one)
        if message is not None:
            pack.findings.add("origin", message, **(one.where or pack.index_file))
        if one.shard < len(shards) and one.shard_offset + one.length <= shards[one.shard].length:
            places[one.shard].append(one)
    for file, numbers in shards_of_file.items():
        _check_shard_file(pack, file, sorted(numbers))
    for entry, of_shard in zip(shards, places, strict=True):
        _check_ranges_of_shard(pack, entry, of_shard)


def _problem_with_origin(pack: CheckedPack, checked: CheckedRange) -> str | None:
    """Return what is wrong with the place in a shard that a range came from; None if nothing is."""
    shards, shard, start = pack.manifest.source.shards, checked.shard, checked.shard_offset
    assert shard is not None
    end = start + checked.length
    if shard >= len(shards):
        return f"it came from shard {shard:,}, the manifest lists {len(shards):,}"
    if end > shards[shard].length:
        return (
            f"it came from bytes {start:,} to {end:,} of {shards[shard].name}, "
            f"which is {shards[shard].length:,} bytes long"
        )
    if pack.index.files[checked.file].is_shard and checked.offset != start:
        return f"it lies at byte {checked.offset:,} of a shard, and came from byte {start:,}"
    return None


def _check_ranges_of_shard(
    pack: CheckedPack, entry: ShardEntry, ranges: Sequence[CheckedRange]
) -> None:
    """Check that a shard's header is in the pack, and that no byte came from it twice."""
    # A header's record may be the one that is unreadable.
    has_others = len(pack.shard_ranges) == pack.index.shard_range_count
    has_headers = has_others and "shard_bytes" in pack.index.directory.sections
    headers = (one.length for one in ranges if not one.shard_offset)
    if has_headers and entry.header_length not in headers:
        message = f"its header, bytes 0 to {entry.header_length:,}, is not in the pack"
        pack.findings.add("missing", message, file=entry.name)
    for one, other in overlaps(ranges, attrgetter("shard_offset")):
        message = f"it came from byte {one.shard_offset:,} of {entry.name}, as a {other.noun} "
        message += f"did that ends at byte {other.shard_offset + other.length:,}"
        pack.findings.add("origin", message, **(one.where or pack.index_file))


def _check_shard_file(pack: CheckedPack, number: int, shards: list[int]) -> None:
    """Check a file that is a shard; `shards` are those that its bytes came from."""
    file, entries = pack.index.files[number], pack.manifest.source.shards
    if len(shards) > 1:
        message = f"it is one shard, and what lies in it came from shards {ranges_text(shards)}"
        pack.findings.add("record", message, file=file.name)
    elif shards[0] < len(entries) and file.length != entries[shards[0]].length:
        entry = entries[shards[0]]
        message = f"it says that {entry.name} is {entry.length:,} bytes long, the index has it as "
        message += f"{file.name} of {file.length:,}"
        pack.findings.add("manifest", message, file=manifest.NAME)


def _no_source(*_range: object) -> None:
    return None
