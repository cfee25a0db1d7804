"""Write index.bin from a plan and the digests of what was packed (FORMAT.md, "The index")."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from moepack import digest
from moepack.format import records
from moepack.format.sections import Directory
from moepack.format.sections import encode as encode_directory
from moepack.packing.plan import DENSE_NAME, Plan, PlannedBlob, PlannedDense
from moepack.source import ggml_types
from moepack.source.experts import Scattered, SourcePart

Digests = Mapping[str, Sequence[int]]
"""By file, the digests of its extents in the order of their offsets."""


def encode(plan: Plan, digests: Digests) -> bytes:
    """Return the bytes of index.bin."""
    directory = plan.directory
    index = bytearray(directory.index_length)
    _put_tables(index, directory, plan)
    _put(index, directory, "files", _file_records(plan))
    _Places(index, directory, plan).put(digests)
    if plan.dense is not None:
        dense_digests = iter(digests[DENSE_NAME])
        file = len(plan.files)
        placed = _shard_bytes_records(plan.dense, file, dense_digests)
        _put(index, directory, "shard_bytes", placed)
        _put(index, directory, "tensors", _tensor_records(plan.dense, file, dense_digests))
    return _signed(index)


def _put_tables(index: bytearray, directory: Directory, plan: Plan) -> None:
    """Write what does not depend on where blobs lie."""
    header = records.Header(
        magic=records.MAGIC,
        format_version=records.FORMAT_VERSION,
        header_length=records.Header.LAYOUT.size,
        index_length=len(index),
        section_count=len(directory.sections),
        section_record_length=records.SectionRecord.LAYOUT.size,
        blob_alignment=plan.layout.blob_alignment,
        part_alignment=plan.layout.part_alignment,
        tensor_alignment=plan.layout.tensor_alignment,
    ).pack()
    start = header + encode_directory(directory)
    index[: len(start)] = start
    _put(index, directory, "families", _family_records(plan))
    _put(index, directory, "part_kinds", _part_kind_records(plan))
    _put(index, directory, "slices", _slice_records(plan))


def _put(index: bytearray, directory: Directory, name: str, chunks: Iterable[bytes]) -> None:
    offset = directory[name].offset
    for chunk in chunks:
        index[offset : offset + len(chunk)] = chunk
        offset += len(chunk)


def _signed(index: bytearray) -> bytes:
    body = memoryview(index)[: -records.TRAILER.size]
    records.TRAILER.pack_into(index, len(body), digest.of(body))
    return bytes(index)


def _file_records(plan: Plan) -> Iterable[bytes]:
    for file in plan.new_files():
        yield records.FileRecord(file.name.encode(), file.length, records.DATA_FILE, 0).pack()


def _family_records(plan: Plan) -> Iterable[bytes]:
    first_kind = 0
    for template in plan.templates:
        family = template.family
        yield records.FamilyRecord(
            layer=family.layer,
            expert_count=family.expert_count,
            parts_per_blob=len(template.parts),
            flags=records.HOTNESS_MEASURED if template.hotness_measured else 0,
            first_blob=template.first_blob,
            first_part_kind=first_kind,
            first_part=template.first_part,
            name=family.name.encode(),
        ).pack()
        first_kind += len(template.parts)


def _part_kind_records(plan: Plan) -> Iterable[bytes]:
    first_slice = 0
    for template in plan.templates:
        for part in template.parts:
            yield _part_kind_record(part, first_slice).pack()
            if isinstance(part.slices, Scattered):
                first_slice += len(part.slices.places)


def _slice_records(plan: Plan) -> Iterable[bytes]:
    for template in plan.templates:
        for part in template.parts:
            if isinstance(part.slices, Scattered):
                for shard, offset in part.slices.places:
                    yield records.SliceRecord(shard, offset).pack()


class _Origin(NamedTuple):
    """Where slices lay, as the fields of a record: see `SliceOrigin`."""

    shard: int
    first_slice: int
    shard_offset: int
    stride: int


def _part_kind_record(part: SourcePart, first_slice: int) -> records.PartKindRecord:
    known = ggml_types.TYPES.get(part.type_id)
    ne0, ne1 = (*part.shape, 0, 0)[:2]
    flags = records.TYPE_INFERRED if part.inferred else 0
    slices = part.slices
    if isinstance(slices, Scattered):
        flags |= records.OWN_TENSORS
        origin = _Origin(0, first_slice, 0, 0)
    else:
        origin = _Origin(slices.shard, 0, slices.offset, slices.length)
    return records.PartKindRecord(
        name=part.name.encode(),
        type_id=part.type_id,
        flags=flags,
        dimension_count=len(part.shape),
        interleaved_row_count=known.interleaved_row_count if known else 0,
        ne0=ne0,
        ne1=ne1,
        length=part.length,
        type_name=ggml_types.type_name(part.type_id).encode(),
        shard=origin.shard,
        first_slice=origin.first_slice,
        shard_offset=origin.shard_offset,
        stride=origin.stride,
    )


def _shard_bytes_records(dense: PlannedDense, file: int, digests: Iterable[int]) -> Iterable[bytes]:
    # Not strict: the tensors' digests follow.
    with_digests = zip(dense.other_ranges, digests, strict=False)
    for ((shard, shard_offset, length), offset), known in with_digests:
        yield records.ShardBytesRecord(shard, file, shard_offset, length, offset, known).pack()


def _tensor_records(dense: PlannedDense, file: int, digests: Iterable[int]) -> Iterable[bytes]:
    for ((shard, tensor), offset), known in zip(dense.tensors, digests, strict=True):
        ne0, ne1, ne2, ne3 = (*tensor.dims, 0, 0, 0, 0)[:4]
        yield records.TensorRecord(
            name=tensor.name.encode(),
            type_name=ggml_types.type_name(tensor.type_id).encode(),
            type_id=tensor.type_id,
            flags=records.TYPE_INFERRED if tensor.inferred else 0,
            dimension_count=len(tensor.dims),
            file=file,
            ne0=ne0,
            ne1=ne1,
            ne2=ne2,
            ne3=ne3,
            length=tensor.length,
            offset=offset,
            stored_length=tensor.length,
            digest=known,
            shard=shard,
            codec=records.CODEC_RAW,
            shard_offset=tensor.offset,
        ).pack()


class _Places:
    """Writes where blobs and parts lie, and which blob stands at which rank."""

    def __init__(self, index: bytearray, directory: Directory, plan: Plan) -> None:
        self.index = index
        self.blobs = directory["blobs"]
        self.parts = directory["parts"]
        self.ranks_section = directory["ranks"]
        self.plan = plan
        self.ranks = [0] * self.blobs.record_count
        """The rank of each blob, by its number."""

    def put(self, digests: Digests) -> None:
        self.put_ranks()
        for number, file in enumerate(self.plan.files):
            in_order = iter(digests[file.name])
            for blob in file.blobs:
                template = self.plan.templates[blob.template]
                self.put_blob(blob, blob.offset, template.length, number)
                first = template.first_part + blob.expert * len(template.parts)
                for part, (kind, offset) in enumerate(
                    zip(template.parts, template.offsets_in_blob, strict=True)
                ):
                    place = (blob.offset + offset, kind.length, next(in_order), number)
                    self.put_part(first + part, *place)

    def put_ranks(self) -> None:
        for rank, key in enumerate(self.plan.order):
            number = self.plan.templates[key.template].first_blob + key.expert
            self.ranks[number] = rank
            records.RANK.pack_into(self.index, self.ranks_section.at(rank), number)

    def put_blob(self, blob: PlannedBlob, offset: int, length: int, file: int) -> None:
        number = self.plan.templates[blob.template].first_blob + blob.expert
        hotness = self.plan.counts.get(blob.key, 0)
        record = (offset, length, hotness, self.ranks[number], file)
        records.BLOB.pack_into(self.index, self.blobs.at(number), *record)

    def put_part(self, number: int, offset: int, length: int, known: int, file: int) -> None:
        record = (offset, length, known, file, records.CODEC_RAW)
        records.PART.pack_into(self.index, self.parts.at(number), *record)
