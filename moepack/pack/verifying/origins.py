"""The origins in the index: inside the shards, each byte of a shard from one place only.

Restoring and exporting rely on them. They are compared with the source itself elsewhere.
"""

from collections import defaultdict
from collections.abc import Iterable

from moepack.common.sizes import ranges_text
from moepack.pack.format import manifest
from moepack.pack.verifying.checked_pack import CheckedPack, Place, Segment, overlaps


def check(pack: CheckedPack, files: Iterable[Iterable[Segment]]) -> None:
    """Check the origins of all ranges against the shards in the manifest, and each other."""
    shards, findings = pack.manifest.source.shards, pack.findings
    places: list[list[Place]] = [[] for _ in shards]
    shards_of_file: dict[int, set[int]] = defaultdict(set)
    for one in (one for segments in files for segment in segments for one in segment.ranges):
        if one.shard is None:
            continue
        shard, start = one.shard, one.shard_offset
        place = Place(start, start + one.length, one.noun, one.where or pack.index_file)
        lies_in_shard = pack.index.files[one.file].is_shard
        if lies_in_shard:
            shards_of_file[one.file].add(shard)
        if shard >= len(shards):
            message = f"it came from shard {shard:,}, the manifest lists {len(shards):,}"
        elif place.end > shards[shard].length:
            message = f"it came from bytes {start:,} to {place.end:,} of {shards[shard].name}, "
            message += f"which is {shards[shard].length:,} bytes long"
        else:
            places[shard].append(place)
            if not lies_in_shard or one.offset == start:
                continue
            message = f"it lies at byte {one.offset:,} of a shard, and came from byte {start:,}"
        findings.add("origin", message, **place.where)
    for file, numbers in shards_of_file.items():
        _check_file(pack, file, sorted(numbers))
    # A header's record may be the one that is unreadable.
    has_others = len(pack.shard_ranges) == pack.index.shard_range_count
    has_headers = has_others and "shard_bytes" in pack.index.directory.sections
    for entry, of_shard in zip(shards, places, strict=True):
        if has_headers and (0, entry.header_length) not in {place[:2] for place in of_shard}:
            message = f"its header, bytes 0 to {entry.header_length:,}, is not in the pack"
            findings.add("missing", message, file=entry.name)
        for place, other in overlaps(of_shard):
            message = f"it came from byte {place.start:,} of {entry.name}, as a {other.noun} did "
            message += f"that ends at byte {other.end:,}"
            findings.add("origin", message, **place.where)


def _check_file(pack: CheckedPack, number: int, shards: list[int]) -> None:
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
