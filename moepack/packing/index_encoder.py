"""Write index.bin from a plan and the digests of what was packed (FORMAT.md, "The index")."""

from collections.abc import Iterable, Sequence

from moepack import digest
from moepack.format import records
from moepack.packing.plan import Plan, Template
from moepack.source import ggml_types
from moepack.source.experts import Part


def encode(plan: Plan, part_digests: Sequence[int]) -> bytes:
    """Give the bytes of index.bin; `part_digests` is indexed by part number."""
    kind_count = sum(len(template.parts) for template in plan.templates)
    counts = (len(plan.files), len(plan.templates), kind_count, len(plan.order), len(part_digests))
    *offsets, length = records.section_offsets(*counts)
    sections = dict(zip(records.Header._fields[6:17], (*counts, *offsets), strict=True))
    header = records.Header(
        records.MAGIC,
        records.FORMAT_VERSION,
        records.Header.LAYOUT.size,
        required_features=0,
        optional_features=0,
        index_length=length,
        **sections,
        blob_alignment=plan.layout.blob_alignment,
        part_alignment=plan.layout.part_alignment,
        reserved=0,
    )
    index = bytearray(length)
    index[: records.Header.LAYOUT.size] = header.pack()
    files, families, kinds, blobs, parts, ranks = offsets
    _put(index, files, _file_records(plan))
    _put(index, families, _family_records(plan))
    _put(index, kinds, (_kind_record(p).pack() for t in plan.templates for p in t.parts))
    blob_ranks = _blob_ranks(plan)
    for rank, number in enumerate(blob_ranks):
        records.RANK.pack_into(index, ranks + rank * records.RANK.size, number)
    _put_places(index, plan, part_digests, blob_ranks, blobs, parts)
    body = memoryview(index)[: -records.TRAILER.size]
    records.TRAILER.pack_into(index, len(body), digest.of(body))
    return bytes(index)


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


def _kind_record(part: Part) -> records.PartKindRecord:
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


def _blob_ranks(plan: Plan) -> list[int]:
    """List the number of the blob at each rank."""
    return [plan.templates[template].first_blob + expert for template, expert in plan.order]


def _put_places(
    index: bytearray,
    plan: Plan,
    part_digests: Sequence[int],
    blob_ranks: Sequence[int],
    blobs: int,
    parts: int,
) -> None:
    rank_of = [0] * len(blob_ranks)
    for rank, number in enumerate(blob_ranks):
        rank_of[number] = rank
    for file_number, file in enumerate(plan.files):
        for blob, part_numbers in zip(file.blobs, plan.part_numbers(file), strict=True):
            template = plan.templates[blob.template]
            number = template.first_blob + blob.expert
            hotness = plan.counts.get((blob.template, blob.expert), 0)
            records.BLOB.pack_into(
                *(index, blobs + number * records.BLOB.size),
                *(blob.offset, template.length, hotness, rank_of[number], file_number),
            )
            _put_parts(index, parts, template, blob.offset, file_number, part_numbers, part_digests)


def _put_parts(
    index: bytearray,
    parts: int,
    template: Template,
    blob_offset: int,
    file_number: int,
    part_numbers: range,
    part_digests: Sequence[int],
) -> None:
    for number, part, inside in zip(
        part_numbers, template.parts, template.offsets_in_blob, strict=True
    ):
        records.PART.pack_into(
            *(index, parts + number * records.PART.size),
            *(blob_offset + inside, part.length, part_digests[number]),
            *(file_number, records.CODEC_RAW, 0),
        )
