"""Write index.bin from a plan and the written files (FORMAT.md, "The index")."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from moepack.common import digest
from moepack.pack.format import records, sections
from moepack.pack.format.tables import DataFile
from moepack.packing.plan.plan import DENSE_NAME, BlobKey, Plan
from moepack.packing.writing.finished_files import (
    FinishedFile,
    WrittenPart,
    has_codecs,
    on_disk,
    written_blobs,
)
from moepack.source import ggml_types
from moepack.source.dense import ShardRange
from moepack.source.experts import Scattered
from moepack.source.shards import SourceTensor

DigestsByOffset = Mapping[tuple[int, int], int]
"""By shard and offset in it, the digest of the bytes that begin there."""

_Position = tuple[int, int, int]
"""The file of dense bytes, their offset there, and their digest."""


def encode(plan: Plan, finished: Mapping[str, FinishedFile]) -> bytes:
    """Return the bytes of the index of a pack with the files `finished`."""
    files = [on_disk(plan, file, finished[file.name]) for file in plan.new_files()]
    data_files = [DataFile(file.name, file.length) for file in files]
    writer = _IndexWriter(plan, data_files, has_codecs(plan, finished))
    for number, file in enumerate(plan.files):
        for blob in written_blobs(plan, file, finished[file.name]):
            writer.put_blob(blob.key, blob.offset, blob.length, number)
            for part_number, part in enumerate(blob.parts):
                writer.put_part(blob.key, part_number, number, part)
    if plan.dense is not None:
        number, digests = len(plan.files), iter(finished[DENSE_NAME].digests)
        ranges = [(number, offset, next(digests)) for _, offset in plan.dense.other_ranges]
        tensors = [(number, offset, next(digests)) for _, offset in plan.dense.tensors]
        writer.put_dense(ranges, tensors)
    return writer.finish()


def encode_over_shards(plan: Plan, shards: Sequence[DataFile], digests: DigestsByOffset) -> bytes:
    """Return the bytes of an index over the shards themselves, without a copy.

    File number N of the index is shard N. `digests` has at least those of the other ranges; if
    `shards` say so, also those of parts and tensors.
    """
    writer = _IndexWriter(plan, shards)
    for key in plan.order:
        writer.put_blob(key, 0, 0, 0)
        for number, part in enumerate(plan.templates[key.template].parts):
            shard, offset = part.slices.at(key.expert)
            part_digest = digests.get((shard, offset), 0)
            place = WrittenPart(offset, part.length, part_digest, part_digest, is_coded=False)
            writer.put_part(key, number, shard, place)
    assert plan.dense is not None
    tensors = []
    for (shard, tensor), _ in plan.dense.tensors:
        # One without bytes begins where the next one does.
        computed = digests.get((shard, tensor.offset), 0) if tensor.length else digest.xxh3(b"")
        tensors.append((shard, tensor.offset, computed))
    ranges = [
        (shard, offset, digests[shard, offset]) for (shard, offset, _), _ in plan.dense.other_ranges
    ]
    writer.put_dense(ranges, tensors)
    return writer.finish()


class _IndexWriter:
    """An index in the making; sections without offsets of blobs and parts are written at once."""

    def __init__(self, plan: Plan, files: Sequence[DataFile], is_coded: bool = False) -> None:
        self._plan = plan
        self._is_coded = is_coded
        self._directory = plan.directory(len(files), is_coded)
        self._index = bytearray(self._directory.index_length)
        # The rank of each blob, by its number.
        self._ranks = [0] * len(plan.order)
        self._put_header()
        self.put("files", map(_file_record, files))
        self.put("families", _family_records(plan))
        self.put("part_kinds", _part_kind_records(plan))
        self.put("slices", _slice_records(plan))
        if is_coded:
            self.put("codecs", [records.CodecRecord(records.ZSTD.encode()).pack()])
        section = self._directory["ranks"]
        for rank, key in enumerate(plan.order):
            number = self._number(key)
            self._ranks[number] = rank
            records.RANK.pack_into(self._index, section.at(rank), number)

    def _put_header(self) -> None:
        layout = self._plan.layout
        header = records.Header(
            magic=records.MAGIC,
            format_version=records.FORMAT_VERSION,
            header_length=records.Header.LAYOUT.size,
            index_length=len(self._index),
            section_count=len(self._directory.sections),
            section_record_length=records.SectionRecord.LAYOUT.size,
            blob_alignment=layout.blob_alignment,
            part_alignment=layout.part_alignment,
            tensor_alignment=layout.tensor_alignment,
        ).pack()
        start = header + sections.encode(self._directory)
        self._index[: len(start)] = start

    def _number(self, key: BlobKey) -> int:
        return self._plan.templates[key.template].first_blob + key.expert

    def put(self, name: str, chunks: Iterable[bytes]) -> None:
        """Write the records of a section."""
        offset = self._directory[name].offset
        for chunk in chunks:
            self._index[offset : offset + len(chunk)] = chunk
            offset += len(chunk)

    def put_blob(self, key: BlobKey, offset: int, length: int, file: int) -> None:
        number = self._number(key)
        record = (offset, length, self._plan.counts.get(key, 0), self._ranks[number], file)
        records.BLOB.pack_into(self._index, self._directory["blobs"].at(number), *record)

    def put_part(self, key: BlobKey, part_number: int, file: int, part: WrittenPart) -> None:
        template = self._plan.templates[key.template]
        number = template.first_part + key.expert * len(template.parts) + part_number
        codec = 1 if part.is_coded else records.CODEC_RAW  # there is but one codec
        record = (part.offset, part.stored_length, part.digest, file, codec)
        records.PART.pack_into(self._index, self._directory["parts"].at(number), *record)
        if self._is_coded:
            at = self._directory["stored_digests"].at(number)
            records.STORED_DIGEST.pack_into(self._index, at, part.stored_digest)

    def put_dense(self, ranges: Iterable[_Position], tensors: Iterable[_Position]) -> None:
        """Write the positions of the other ranges and of the tensors, in the plan's order."""
        dense = self._plan.dense
        assert dense is not None
        in_source = [shard_range for shard_range, _ in dense.other_ranges]
        self.put("shard_bytes", map(_shard_bytes_record, in_source, ranges))
        self.put("tensors", map(_tensor_record, (tensor for tensor, _ in dense.tensors), tensors))

    def finish(self) -> bytes:
        """Sign the index and return it."""
        body = memoryview(self._index)[: -records.TRAILER.size]
        records.TRAILER.pack_into(self._index, len(body), digest.xxh3(body))
        return bytes(self._index)


def _file_record(file: DataFile) -> bytes:
    kind = records.SHARD_FILE if file.is_shard else records.DATA_FILE  # no packer makes others
    flags = 0 if file.has_digests else records.WITHOUT_DIGESTS
    return records.FileRecord(file.name.encode(), file.length, kind, flags).pack()


def _family_records(plan: Plan) -> Iterator[bytes]:
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


def _slice_records(plan: Plan) -> Iterator[bytes]:
    for template in plan.templates:
        for part in template.parts:
            if isinstance(part.slices, Scattered):
                for shard, offset in part.slices.places:
                    yield records.SliceRecord(shard, offset).pack()


def _part_kind_records(plan: Plan) -> Iterator[bytes]:
    slice_count = 0
    for part in (part for template in plan.templates for part in template.parts):
        ggml_type = ggml_types.TYPES.get(part.type_id)
        ne0, ne1 = (*part.shape, 0, 0)[:2]
        flags = records.TYPE_INFERRED if part.inferred else 0
        shard = offset = stride = first_slice = 0
        if isinstance(part.slices, Scattered):
            flags |= records.OWN_TENSORS
            first_slice = slice_count
            slice_count += len(part.slices.places)
        else:
            shard, offset, stride = part.slices.shard, part.slices.offset, part.slices.length
        yield records.PartKindRecord(
            name=part.name.encode(),
            type_id=part.type_id,
            flags=flags,
            dimension_count=len(part.shape),
            interleaved_row_count=ggml_type.interleaved_row_count if ggml_type else 0,
            ne0=ne0,
            ne1=ne1,
            length=part.length,
            type_name=ggml_types.type_name(part.type_id).encode(),
            shard=shard,
            first_slice=first_slice,
            shard_offset=offset,
            stride=stride,
        ).pack()


def _shard_bytes_record(source: ShardRange, position: _Position) -> bytes:
    file, offset, known_digest = position
    return records.ShardBytesRecord(
        source.shard, file, source.offset, source.length, offset, known_digest
    ).pack()


def _tensor_record(source: SourceTensor, position: _Position) -> bytes:
    tensor = source.tensor
    file, offset, tensor_digest = position
    ne0, ne1, ne2, ne3 = (*tensor.dims, 0, 0, 0, 0)[:4]
    return records.TensorRecord(
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
        digest=tensor_digest,
        shard=source.shard,
        codec=records.CODEC_RAW,
        shard_offset=tensor.offset,
    ).pack()
