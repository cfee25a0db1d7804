"""Write index.bin from a plan and what was written (FORMAT.md, "The index")."""

from collections.abc import Iterable, Mapping, Sequence

from moepack import digest
from moepack.format import records, sections
from moepack.format.tables import DataFile, SliceOrigin
from moepack.packing.finished_files import FinishedFile, has_codecs, on_disk, placed_blobs
from moepack.packing.plan import DENSE_NAME, BlobKey, Plan
from moepack.source import ggml_types
from moepack.source.dense import ShardRange, SourceTensor
from moepack.source.experts import Scattered, SourcePart

_PLAIN, _ZSTD = records.CODEC_RAW, 1
"""What a part's record says of its codec: none, or the first and only one."""
PlaceDigests = Mapping[tuple[int, int], int]
"""By shard and offset in it, the digest of what begins there."""


def encode(plan: Plan, finished: Mapping[str, FinishedFile]) -> bytes:
    """Return the bytes of the index of a pack, whose files are `finished`."""
    files = [on_disk(plan, file, finished[file.name]) for file in plan.new_files()]
    is_coded = has_codecs(plan, finished)
    writer = _IndexWriter(plan, len(files), is_coded)
    writer.put("files", (_file_record(DataFile(file.name, file.length)) for file in files))
    if is_coded:
        writer.put("codecs", [records.CodecRecord(records.ZSTD.encode()).pack()])
    for number, file in enumerate(plan.files):
        for blob in placed_blobs(plan, file, finished[file.name]):
            writer.put_blob(blob.key, blob.offset, blob.length, number)
            for part, held in enumerate(blob.parts):
                place = (held.offset, held.stored_length, held.digest, number)
                writer.put_part(blob.key, part, place, _ZSTD if held.is_coded else _PLAIN)
                if is_coded:
                    writer.put_stored_digest(blob.key, part, held.stored_digest)
    if plan.dense is not None:
        number, in_order = len(plan.files), iter(finished[DENSE_NAME].digests)
        writer.put(
            "shard_bytes",
            [
                _shard_bytes(found, number, at, next(in_order))
                for found, at in plan.dense.other_ranges
            ],
        )
        writer.put(
            "tensors",
            [_tensor(held, number, at, next(in_order)) for held, at in plan.dense.tensors],
        )
    return writer.finish()


def encode_over_shards(plan: Plan, shards: Sequence[DataFile], digests: PlaceDigests) -> bytes:
    """Return the bytes of an index over the shards themselves, where nothing was moved.

    File number N of the index is shard N. `digests` has at least those of the other ranges; where
    `shards` say so, also those of parts and tensors.
    """
    writer = _IndexWriter(plan, len(shards))
    writer.put("files", map(_file_record, shards))
    for key in plan.order:
        template = plan.templates[key.template]
        writer.put_blob(key, 0, 0, 0)
        for part, kind in enumerate(template.parts):
            shard, offset = kind.slices.at(key.expert)
            place = (offset, kind.length, digests.get((shard, offset), 0), shard)
            writer.put_part(key, part, place)
    assert plan.dense is not None
    writer.put(
        "shard_bytes",
        (
            _shard_bytes(found, found.shard, found.offset, digests[found.shard, found.offset])
            for found, _ in plan.dense.other_ranges
        ),
    )
    writer.put(
        "tensors",
        (
            _tensor(held, held.shard, held.tensor.offset, _digest_of_tensor(held, digests))
            for held, _ in plan.dense.tensors
        ),
    )
    return writer.finish()


def _digest_of_tensor(held: SourceTensor, digests: PlaceDigests) -> int:
    # One without bytes begins where the next one does.
    place = (held.shard, held.tensor.offset)
    return digests.get(place, 0) if held.tensor.length else digest.of(b"")


class _IndexWriter:
    """An index in the making: all that depends on no place is written when it is made."""

    def __init__(self, plan: Plan, file_count: int, is_coded: bool = False) -> None:
        self._plan = plan
        self._directory = plan.directory(file_count, is_coded)
        self._index = bytearray(self._directory.index_length)
        self._ranks = [0] * len(plan.order)
        """The rank of each blob, by its number."""
        self._put_header()
        self.put("families", _family_records(plan))
        self.put("part_kinds", _part_kind_records(plan))
        self.put("slices", _slice_records(plan))
        self._put_ranks()

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

    def _put_ranks(self) -> None:
        section = self._directory["ranks"]
        for rank, key in enumerate(self._plan.order):
            number = self._number(key)
            self._ranks[number] = rank
            records.RANK.pack_into(self._index, section.at(rank), number)

    def _number(self, key: BlobKey) -> int:
        return self._plan.templates[key.template].first_blob + key.expert

    def put(self, name: str, chunks: Iterable[bytes]) -> None:
        """Write the records of a section."""
        offset = self._directory[name].offset
        for chunk in chunks:
            self._index[offset : offset + len(chunk)] = chunk
            offset += len(chunk)

    def put_blob(self, key: BlobKey, offset: int, length: int, file: int) -> None:
        """Write where a blob lies."""
        number = self._number(key)
        record = (offset, length, self._plan.counts.get(key, 0), self._ranks[number], file)
        records.BLOB.pack_into(self._index, self._directory["blobs"].at(number), *record)

    def put_part(
        self, key: BlobKey, part: int, place: tuple[int, int, int, int], codec: int = _PLAIN
    ) -> None:
        """Write where a blob's part lies; `place` is offset, stored length, digest and file."""
        at = self._directory["parts"].at(self._part_number(key, part))
        records.PART.pack_into(self._index, at, *place, codec)

    def put_stored_digest(self, key: BlobKey, part: int, stored: int) -> None:
        """Write the digest of what is stored of a part."""
        at = self._directory["stored_digests"].at(self._part_number(key, part))
        records.STORED_DIGEST.pack_into(self._index, at, stored)

    def _part_number(self, key: BlobKey, part: int) -> int:
        template = self._plan.templates[key.template]
        return template.first_part + key.expert * len(template.parts) + part

    def finish(self) -> bytes:
        """Sign the index and return it."""
        body = memoryview(self._index)[: -records.TRAILER.size]
        records.TRAILER.pack_into(self._index, len(body), digest.of(body))
        return bytes(self._index)


def _file_record(file: DataFile) -> bytes:
    kind = records.SHARD_FILE if file.is_shard else records.DATA_FILE  # no packer makes others
    flags = 0 if file.has_digests else records.WITHOUT_DIGESTS
    return records.FileRecord(file.name.encode(), file.length, kind, flags).pack()


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


def _part_kind_record(part: SourcePart, first_slice: int) -> records.PartKindRecord:
    known = ggml_types.TYPES.get(part.type_id)
    ne0, ne1 = (*part.shape, 0, 0)[:2]
    flags = records.TYPE_INFERRED if part.inferred else 0
    slices = part.slices
    if isinstance(slices, Scattered):
        flags |= records.OWN_TENSORS
        origin = SliceOrigin(0, 0, 0, first_slice)
    else:
        origin = SliceOrigin(slices.shard, slices.offset, slices.length)
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
        first_slice=origin.first_slice or 0,
        shard_offset=origin.offset,
        stride=origin.stride,
    )


def _shard_bytes(found: ShardRange, file: int, offset: int, known: int) -> bytes:
    place = (found.offset, found.length, offset, known)
    return records.ShardBytesRecord(found.shard, file, *place).pack()


def _tensor(held: SourceTensor, file: int, offset: int, known: int) -> bytes:
    tensor = held.tensor
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
        digest=known,
        shard=held.shard,
        codec=records.CODEC_RAW,
        shard_offset=tensor.offset,
    ).pack()
