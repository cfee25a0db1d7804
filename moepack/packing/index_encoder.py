"""Write index.bin from a plan and the digests of what was packed (FORMAT.md, "The index")."""

from collections.abc import Iterable, Sequence

from moepack import digest
from moepack.format import records
from moepack.packing.plan import Plan, PlannedBlob
from moepack.source import ggml_types
from moepack.source.experts import SourcePart


def encode(plan: Plan, part_digests: Sequence[int]) -> bytes:
    """Return the bytes of index.bin; `part_digests` is indexed by part number."""
    header = _header(plan, len(part_digests))
    index = bytearray(header.index_length)
    _put(index, 0, (header.pack(),))
    _put(index, header.files_offset, _file_records(plan))
    _put(index, header.families_offset, _family_records(plan))
    _put(index, header.part_kinds_offset, _part_kind_records(plan))
    _Places(index, header, plan, part_digests).put()
    body = memoryview(index)[: -records.TRAILER.size]
    records.TRAILER.pack_into(index, len(body), digest.of(body))
    return bytes(index)


def _header(plan: Plan, part_count: int) -> records.Header:
    file_count, family_count, blob_count = len(plan.files), len(plan.templates), len(plan.order)
    part_kind_count = sum(len(template.parts) for template in plan.templates)
    files, families, part_kinds, blobs, parts, ranks, length = records.section_offsets(
        file_count, family_count, part_kind_count, blob_count, part_count
    )
    return records.Header(
        magic=records.MAGIC,
        format_version=records.FORMAT_VERSION,
        header_length=records.Header.LAYOUT.size,
        required_features=0,
        optional_features=0,
        index_length=length,
        file_count=file_count,
        family_count=family_count,
        part_kind_count=part_kind_count,
        blob_count=blob_count,
        part_count=part_count,
        files_offset=files,
        families_offset=families,
        part_kinds_offset=part_kinds,
        blobs_offset=blobs,
        parts_offset=parts,
        ranks_offset=ranks,
        blob_alignment=plan.layout.blob_alignment,
        part_alignment=plan.layout.part_alignment,
        reserved=0,
    )


def _put(index: bytearray, offset: int, chunks: Iterable[bytes]) -> None:
    for chunk in chunks:
        index[offset : offset + len(chunk)] = chunk
        offset += len(chunk)


def _file_records(plan: Plan) -> Iterable[bytes]:
    for file in plan.files:
        name = file.name.encode()
        yield records.FileRecord(name, file.length, records.FILE_IN_PACK, 0, b"").pack()


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
    for template in plan.templates:
        for part in template.parts:
            yield _part_kind_record(part).pack()


def _part_kind_record(part: SourcePart) -> records.PartKindRecord:
    known = ggml_types.TYPES.get(part.type_id)
    ne0, ne1 = (*part.shape, 0, 0)[:2]
    return records.PartKindRecord(
        name=part.name.encode(),
        type_id=part.type_id,
        flags=records.TYPE_INFERRED if part.inferred else 0,
        dimension_count=len(part.shape),
        interleaved_row_count=known.interleaved_row_count if known else 0,
        ne0=ne0,
        ne1=ne1,
        length=part.length,
        type_name=ggml_types.type_name(part.type_id).encode(),
    )


class _Places:
    """Writes where blobs and parts lie, and which blob stands at which rank."""

    def __init__(
        self, index: bytearray, header: records.Header, plan: Plan, part_digests: Sequence[int]
    ) -> None:
        self.index = index
        self.header = header
        self.plan = plan
        self.part_digests = part_digests
        self.ranks = [0] * header.blob_count
        """The rank of each blob, by its number."""

    def put(self) -> None:
        for rank, key in enumerate(self.plan.order):
            number = self.plan.templates[key.template].first_blob + key.expert
            self.ranks[number] = rank
            offset = self.header.ranks_offset + rank * records.RANK.size
            records.RANK.pack_into(self.index, offset, number)
        for file_number, file in enumerate(self.plan.files):
            for blob, part_numbers in zip(file.blobs, self.plan.part_numbers(file), strict=True):
                self.put_blob(blob, file_number)
                self.put_parts(blob, file_number, part_numbers)

    def put_blob(self, blob: PlannedBlob, file_number: int) -> None:
        template = self.plan.templates[blob.template]
        number = template.first_blob + blob.expert
        records.BLOB.pack_into(
            self.index,
            self.header.blobs_offset + number * records.BLOB.size,
            blob.offset,
            template.length,
            self.plan.counts.get(blob.key, 0),
            self.ranks[number],
            file_number,
        )

    def put_parts(self, blob: PlannedBlob, file_number: int, part_numbers: range) -> None:
        template = self.plan.templates[blob.template]
        for number, part, offset_in_blob in zip(
            part_numbers, template.parts, template.offsets_in_blob, strict=True
        ):
            records.PART.pack_into(
                self.index,
                self.header.parts_offset + number * records.PART.size,
                blob.offset + offset_in_blob,
                part.length,
                self.part_digests[number],
                file_number,
                records.CODEC_RAW,
                0,
            )
