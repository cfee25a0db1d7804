"""Where the index says that everything came from: inside of its shard, and nothing from one place.

Restoring and exporting rely on it. Whether it is true is compared with the source itself.
"""

import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from moepack.errors import PackError
from moepack.format import manifest
from moepack.format.index import Index
from moepack.format.manifest import Manifest
from moepack.format.tables import DataFile, PackedFamily, PartKind
from moepack.sizes import ranges_text
from moepack.verifying.places import Place, Where, check_apart
from moepack.verifying.report import Findings


class _Lying(NamedTuple):
    """Where something lies in a shard as it is: the number of the file, the offset there."""

    file: int
    offset: int


class _Origin(NamedTuple):
    """A range of shard number `shard`; `lies_at` is None where it lies in a data file."""

    shard: int
    place: Place
    lies_at: _Lying | None


def check(index: Index, described: Manifest, findings: Findings) -> None:
    """Check all origins against the shards that the manifest lists, and against each other."""
    shards = described.source.shards
    all_readable = all(_is_readable(index, n) for n in range(index.shard_range_count))
    places: list[list[Place]] = [[] for _ in shards]
    shards_of: dict[int, set[int]] = defaultdict(set)
    for shard, place, lies_at in _origins(index, findings):
        if lies_at is not None:
            shards_of[lies_at.file].add(shard)
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
        if lies_at is not None and lies_at.offset != place.start:
            message = f"it lies at byte {lies_at.offset:,} of a shard, and came from byte "
            findings.add("origin", message + f"{place.start:,}", **place.where)
        places[shard].append(place)
    for file, held in shards_of.items():
        _check_file(index.files[file], sorted(held), described, findings)
    # A record that cannot be read, which is a finding, may be that of a header.
    holds_headers = "shard_bytes" in index.directory.sections and all_readable
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


def _is_readable(index: Index, number: int) -> bool:
    try:
        index.shard_range(number)
    except PackError:
        return False
    return True


def _check_file(
    file: DataFile, held: Sequence[int], described: Manifest, findings: Findings
) -> None:
    """Check a file that is a shard, from which things came that are of the shards `held`."""
    shards = described.source.shards
    if len(held) > 1:
        message = f"it is one shard, and what lies in it came from shards {ranges_text(held)}"
        findings.add("record", message, file=file.name)
    elif held[0] < len(shards) and file.length != shards[held[0]].length:
        entry = shards[held[0]]
        message = f"it says that {entry.name} is {entry.length:,} bytes long, the index has it as "
        findings.add("manifest", f"{message}{file.name} of {file.length:,}", file=manifest.NAME)


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
                yield _Origin(shard, place, _part_lying(index, family, number, kind, expert))
    for number in range(index.tensor_count):
        try:
            tensor = index.tensor(number)
        except PackError:
            continue
        end = tensor.shard_offset + tensor.length
        place = Place(tensor.shard_offset, end, "tensor", {"tensor": tensor.name})
        yield _Origin(tensor.shard, place, _lying(index, tensor.file, tensor.offset))
    for number in range(index.shard_range_count):
        try:
            held = index.shard_range(number)
        except PackError:
            continue
        end = held.shard_offset + held.length
        what = {"file": os.path.basename(index.path)}
        place = Place(held.shard_offset, end, "range of other bytes", what)
        yield _Origin(held.shard, place, _lying(index, held.file, held.offset))


def _lying(index: Index, file: int, offset: int) -> _Lying | None:
    return _Lying(file, offset) if index.files[file].is_shard else None


def _part_lying(
    index: Index, family: PackedFamily, number: int, kind: PartKind, expert: int
) -> _Lying | None:
    if not any(file.is_shard for file in index.files):
        return None
    first = family.first_part + expert * len(family.part_kinds)
    try:
        offset, _, _, file, _ = index.part(first + number, kind)
    except PackError:
        return None
    return _lying(index, file, offset)
