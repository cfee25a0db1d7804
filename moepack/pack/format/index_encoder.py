"""Write index.bin from its contents and their positions in files (FORMAT.md, "The index")."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from moepack.common import digest
from moepack.pack.format import records, sections
from moepack.pack.format.contents import BlobKey, IndexContents
from moepack.pack.format.tables import DataFile
from moepack.source import ggml_types
from moepack.source.dense import ShardRange
from moepack.source.shards import SourceTensor

DigestsByOffset = Mapping[tuple[int, int], int]
"""By shard and offset in it, the digest of the bytes that begin there."""

Position = tuple[int, int, int]
"""The file of dense bytes, their offset there, and their digest."""


def encode_over_shards(
    contents: IndexContents, shards: Sequence[DataFile], digests: DigestsByOffset
) -> bytes:
    """Return the bytes of an index over the shards themselves, without a copy.

    File number N of the index is shard N. `digests` has at least those of the other ranges; if
    `shards` say so, also those of parts and tensors.
    """
    writer = IndexWriter(contents, shards)
    for key in contents.order:
        writer.put_blob(key, 0, 0, 0)
        for number, part in enumerate(contents.templates[key.template].parts):
            shard, offset = part.at(key.expert)
            writer.put_part(key, number, shard, offset, digests.get((shard, offset), 0))
    assert contents.dense is not None
    tensors = []
    for shard, tensor in contents.dense.tensors:
        # One without bytes begins where the next one does.
        computed = digests.get((shard, tensor.offset), 0) if tensor.length else digest.xxh3(b"")
        tensors.append((shard, tensor.offset, computed))
    ranges = [
        (shard, offset, digests[shard, offset]) for shard, offset, _ in contents.dense.other_ranges
    ]
    writer.put_dense(ranges, tensors)
    return writer.finish()


class IndexWriter:
    """An index in the making; sections without offsets of blobs and parts are written at once."""

    def __init__(self, contents: IndexContents, files: Sequence[DataFile]) -> None:
        self._contents = contents
        self._directory = contents.directory(len(files))
        self._index = bytearray(self._directory.index_length)
        # The rank of each blob, by its number.
        self._ranks = [0] * len(contents.order)
        self._put_header()
        self.put("files", map(_file_record, files))
        self.put("families", _family_records(contents))
        self.put("part_kinds", _part_kind_records(contents))
        self.put("slices", _slice_records(contents))
        section = self._directory["ranks"]
        for rank, key in enumerate(contents.order):
            number = self._number(key)
            self._ranks[number] = rank
            records.RANK.pack_into(self._index, section.at(rank), number)

    def _put_header(self) -> None:
        blob_alignment, part_alignment, tensor_alignment = self._contents.alignments
        header = records.HEADER.pack(
            *records.Header(
                magic=records.MAGIC,
                format_version=records.FORMAT_VERSION,
                header_length=records.HEADER.size,
                index_length=len(self._index),
                section_count=len(self._directory.sections),
                section_record_length=records.SECTION.size,
                blob_alignment=blob_alignment,
                part_alignment=part_alignment,
                tensor_alignment=tensor_alignment,
            )
        )
        start = header + sections.encode(self._directory)
        self._index[: len(start)] = start

    def _number(self, key: BlobKey) -> int:
        return self._contents.templates[key.template].first_blob + key.expert

    def put(self, name: str, chunks: Iterable[bytes]) -> None:
        """Write the records of a section."""
        offset = self._directory[name].offset
        for chunk in chunks:
            self._index[offset : offset + len(chunk)] = chunk
            offset += len(chunk)

    def put_blob(self, key: BlobKey, offset: int, length: int, file: int) -> None:
        """Write a blob's record."""
        number = self._number(key)
        record = (offset, length, self._contents.counts.get(key, 0), self._ranks[number], file)
        records.BLOB.pack_into(self._index, self._directory["blobs"].at(number), *record)

    def put_part(self, key: BlobKey, part_number: int, file: int, offset: int, digest: int) -> None:
        """Write a part's record."""
        template = self._contents.templates[key.template]
        number = template.first_part + key.expert * len(template.parts) + part_number
        length = template.parts[part_number].length
        record = (offset, length, digest, file, records.CODEC_RAW)
        records.PART.pack_into(self._index, self._directory["parts"].at(number), *record)

    def put_dense(self, ranges: Iterable[Position], tensors: Iterable[Position]) -> None:
        """Write the positions of the other ranges and of the tensors, in their order."""
        dense = self._contents.dense
        assert dense is not None
        self.put("shard_bytes", map(_shard_bytes_record, dense.other_ranges, ranges))
        self.put("tensors", map(_tensor_record, dense.tensors, tensors))

    def finish(self) -> bytes:
        """Sign the index and return it."""
        body = memoryview(self._index)[: -records.TRAILER.size]
        records.TRAILER.pack_into(self._index, len(body), digest.xxh3(body))
        return bytes(self._index)


def _file_record(file: DataFile) -> bytes:
    kind = records.SHARD_FILE if file.is_shard else records.DATA_FILE
    flags = 0 if file.has_digests else records.WITHOUT_DIGESTS
    return records.FILE.pack(*records.FileRecord(file.name.encode(), file.length, kind, flags))


def _family_records(contents: IndexContents) -> Iterator[bytes]:
    first_kind = 0
    for template in contents.templates:
        family = template.family
        yield records.FAMILY.pack(
            *records.FamilyRecord(
                layer=family.layer,
                expert_count=family.expert_count,
                parts_per_blob=len(template.parts),
                flags=records.HOTNESS_MEASURED if template.hotness_measured else 0,
                first_blob=template.first_blob,
                first_part_kind=first_kind,
                first_part=template.first_part,
                name=family.name.encode(),
            )
        )
        first_kind += len(template.parts)


def _slice_records(contents: IndexContents) -> Iterator[bytes]:
    for template in contents.templates:
        for part in template.parts:
            if not part.stride:
                for shard, offset in part.places:
                    yield records.SLICE.pack(*records.SliceRecord(shard, offset))


def _part_kind_records(contents: IndexContents) -> Iterator[bytes]:
    slice_count = 0
    for part in (part for template in contents.templates for part in template.parts):
        ggml_type = ggml_types.TYPES.get(part.type_id)
        ne0, ne1 = (*part.shape, 0, 0)[:2]
        flags = records.TYPE_INFERRED if part.inferred else 0
        shard = offset = first_slice = 0
        if not part.stride:
            flags |= records.OWN_TENSORS
            first_slice = slice_count
            slice_count += len(part.places)
        else:
            ((shard, offset),) = part.places
        yield records.PART_KIND.pack(
            *records.PartKindRecord(
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
                stride=part.stride,
            )
        )


def _shard_bytes_record(source: ShardRange, position: Position) -> bytes:
    file, offset, known_digest = position
    return records.SHARD_BYTES.pack(
        *records.ShardBytesRecord(
            source.shard, file, source.offset, source.length, offset, known_digest
        )
    )


def _tensor_record(source: SourceTensor, position: Position) -> bytes:
    tensor = source.tensor
    file, offset, tensor_digest = position
    ne0, ne1, ne2, ne3 = (*tensor.dims, 0, 0, 0, 0)[:4]
    return records.TENSOR.pack(
        *records.TensorRecord(
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
        )
    )
