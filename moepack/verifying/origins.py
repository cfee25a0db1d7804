"""Where the index says that everything came from: inside of its shard, and nothing from one place.

Restoring and exporting rely on it. Whether it is true is compared with the source itself.
"""

from collections.abc import Iterator
from typing import NamedTuple

from moepack.errors import PackError
from moepack.format import manifest
from moepack.format.index import Index
from moepack.format.manifest import Manifest
from moepack.format.tables import PackedFamily, PartKind
from moepack.verifying.places import Place, Where, check_apart
from moepack.verifying.report import Findings


class _Origin(NamedTuple):
    """A range of shard number `shard`.

    `lies_at` is the offset where an index over shards has it, None where it lies in a data file.
    """

    shard: int
    place: Place
    lies_at: int | None


def check(index: Index, described: Manifest, findings: Findings) -> None:
    """Check all origins against the shards that the manifest lists, and against each other."""
    shards = described.source.shards
    places: list[list[Place]] = [[] for _ in shards]
    for shard, place, lies_at in _origins(index, findings):
        if shard >= len(shards):
            message = f"it came from shard {shard:,}, the manifest lists {len(shards):,}"
            findings.add("origin", message, **place.where)
            continue
        entry = shards[shard]
        if place.end > entry.length:
            message = f"it came from bytes {place.start:,} to {place.end:,} of {entry.name}, "
            message += f"which is {entry.length:,} bytes long"
            findings.add("origin", message, **place.where)
            continue
        if lies_at not in (None, place.start):
            message = f"it lies at byte {lies_at:,} of a shard, and came from byte {place.start:,}"
            findings.add("origin", message, **place.where)
        places[shard].append(place)
    holds_headers = "shard_bytes" in index.directory.sections
    for entry, of_shard in zip(shards, places, strict=True):
        header = (0, entry.header_length)
        if holds_headers and not any(place[:2] == header for place in of_shard):
            message = f"its header, bytes 0 to {entry.header_length:,}, is not in the pack"
            findings.add("missing", message, file=entry.name)

        def overlaps(place: Place, other: Place, name: str = entry.name) -> None:
            message = f"it came from byte {place.start:,} of {name}, as a {other.what} did that "
            message += f"ends at byte {other.end:,}"
            findings.add("origin", message, **place.where)

        check_apart(of_shard, overlaps)


def _origins(index: Index, findings: Findings) -> Iterator[_Origin]:
    """Yield the origins of all that has a sound record; the inventory finds the others."""
    for family in index.families:
        for number, kind in enumerate(family.part_kinds):
            for expert in range(family.expert_count):
                where: Where = {"layer": family.layer, "expert": expert, "part": kind.name}
                try:
                    shard, start = index.origin(family, kind, expert)
                except PackError as error:
                    findings.add_error("origin", error, **where)
                    continue
                place = Place(start, start + kind.length, "part", where)
                yield _Origin(shard, place, _lies_at(index, family, number, kind, expert))
    for number in range(index.tensor_count):
        try:
            tensor = index.tensor(number)
        except PackError:
            continue
        end = tensor.shard_offset + tensor.length
        place = Place(tensor.shard_offset, end, "tensor", {"tensor": tensor.name})
        is_there = index.files[tensor.file].is_shard
        yield _Origin(tensor.shard, place, tensor.offset if is_there else None)
    for number in range(index.shard_range_count):
        try:
            held = index.shard_range(number)
        except PackError:
            continue
        end = held.shard_offset + held.length
        what = {"file": manifest.INDEX_NAME}
        place = Place(held.shard_offset, end, "range of other bytes", what)
        is_there = index.files[held.file].is_shard
        yield _Origin(held.shard, place, held.offset if is_there else None)


def _lies_at(
    index: Index, family: PackedFamily, number: int, kind: PartKind, expert: int
) -> int | None:
    if not any(file.is_shard for file in index.files):
        return None
    first = family.first_part + expert * len(family.part_kinds)
    try:
        offset, _, _, file, _ = index.part(first + number, kind)
    except PackError:
        return None
    return offset if index.files[file].is_shard else None
