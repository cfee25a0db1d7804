"""The origins in the index: inside the shards, each byte of a shard from one place only.

Restoring and exporting rely on them. They are compared with the source itself elsewhere.
"""

import contextlib
import os
from collections import defaultdict
from collections.abc import Iterator, Sequence

from moepack.common.errors import PackError
from moepack.common.sizes import ranges_text
from moepack.pack.format import manifest
from moepack.pack.format.index import Index
from moepack.pack.format.manifest import Manifest
from moepack.pack.format.source_entry import ShardEntry
from moepack.pack.format.tables import DataFile, PackedFamily, PartKind
from moepack.pack.verifying.extents import Place, Where, overlaps, readable
from moepack.pack.verifying.report import Findings

_Origin = tuple[int, Place, tuple[int, int] | None]
"""The number of a shard, a range there, and file and offset if that is a shard as well."""


def check(index: Index, described: Manifest, findings: Findings) -> None:
    """Check all origins against the shards in the manifest, and against each other."""
    shards = described.source.shards
    places: list[list[Place]] = [[] for _ in shards]
    shards_of_file: dict[int, set[int]] = defaultdict(set)
    for shard, place, lies_at in _origins(index, findings):
        if lies_at is not None:
            shards_of_file[lies_at[0]].add(shard)
        if shard >= len(shards):
            message = f"it came from shard {shard:,}, the manifest lists {len(shards):,}"
        elif place.end > shards[shard].length:
            message = f"it came from bytes {place.start:,} to {place.end:,} of "
            message += f"{shards[shard].name}, which is {shards[shard].length:,} bytes long"
        else:
            places[shard].append(place)
            if lies_at is None or lies_at[1] == place.start:
                continue
            message = f"it lies at byte {lies_at[1]:,} of a shard, and came from byte "
            message += f"{place.start:,}"
        findings.add("origin", message, **place.where)
    for file, numbers in shards_of_file.items():
        _check_file(index.files[file], sorted(numbers), shards, findings)
    has_headers = _has_headers(index)
    for entry, of_shard in zip(shards, places, strict=True):
        if has_headers and (0, entry.header_length) not in {place[:2] for place in of_shard}:
            message = f"its header, bytes 0 to {entry.header_length:,}, is not in the pack"
            findings.add("missing", message, file=entry.name)
        for place, other in overlaps(of_shard):
            message = f"it came from byte {place.start:,} of {entry.name}, as a {other.noun} did "
            message += f"that ends at byte {other.end:,}"
            findings.add("origin", message, **place.where)


def _has_headers(index: Index) -> bool:
    """Return whether headers are in the pack, and no record, maybe a header's, is unreadable."""
    ranges = readable(index.shard_range, index.shard_range_count)
    has_all = sum(1 for _ in ranges) == index.shard_range_count
    return has_all and "shard_bytes" in index.directory.sections


def _check_file(
    file: DataFile, numbers: Sequence[int], shards: Sequence[ShardEntry], findings: Findings
) -> None:
    """Check a file that is a shard; `numbers` are the shards that its bytes came from."""
    if len(numbers) > 1:
        message = f"it is one shard, and what lies in it came from shards {ranges_text(numbers)}"
        findings.add("record", message, file=file.name)
    elif numbers[0] < len(shards) and file.length != shards[numbers[0]].length:
        entry = shards[numbers[0]]
        message = f"it says that {entry.name} is {entry.length:,} bytes long, the index has it as "
        findings.add("manifest", f"{message}{file.name} of {file.length:,}", file=manifest.NAME)


def _origins(index: Index, findings: Findings) -> Iterator[_Origin]:
    """Yield the origins of all sound records; the inventory reports the others."""

    def lies_at(file: int, offset: int) -> tuple[int, int] | None:
        return (file, offset) if index.files[file].is_shard else None

    for family in index.families:
        for number, kind, expert in _parts(family):
            where: Where = {"layer": family.layer, "expert": expert, "part": kind.name}
            try:
                shard, start = index.origin(family, kind, expert)
            except PackError as error:
                findings.add_error("origin", error, **where)
                continue
            location = None
            with contextlib.suppress(PackError):
                offset, _, _, file, _ = index.part(number, kind)
                location = lies_at(file, offset)
            yield shard, Place(start, start + kind.length, "part", where), location
    for _, tensor in readable(index.tensor, index.tensor_count):
        end = tensor.shard_offset + tensor.length
        place = Place(tensor.shard_offset, end, "tensor", {"tensor": tensor.name})
        yield tensor.shard, place, lies_at(tensor.file, tensor.offset)
    for _, record in readable(index.shard_range, index.shard_range_count):
        end = record.shard_offset + record.length
        where = {"file": os.path.basename(index.path)}
        place = Place(record.shard_offset, end, "range of other bytes", where)
        yield record.shard, place, lies_at(record.file, record.offset)


def _parts(family: PackedFamily) -> Iterator[tuple[int, PartKind, int]]:
    """Yield each part of a family: the number of its record, its kind, its expert."""
    for number, kind in enumerate(family.part_kinds, start=family.first_part):
        for expert in range(family.expert_count):
            yield number + expert * len(family.part_kinds), kind, expert
