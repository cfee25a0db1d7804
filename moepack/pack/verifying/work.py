"""The work of a verification: the bytes of its files that are read, and those without proof."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing

from moepack.common.errors import PackError, is_of_machine, open_failure
from moepack.common.sizes import gaps
from moepack.common.tasks import Share
from moepack.pack.reading.shard_map import map_shards
from moepack.pack.verifying.checked_pack import CheckedPack, Gap, Segment, cut, join
from moepack.pack.verifying.comparison import SourceComparison
from moepack.storage.input_file import open_input


def list_work(
    pack: CheckedPack,
    files: Sequence[Sequence[Segment]],
    share: Share | None,
    comparison: SourceComparison | None,
) -> tuple[list[Segment | Gap], set[int]]:
    """List the segments to read of the chosen ones in `files`, as far as the files have them.

    Also returns the numbers of the blobs and tensors that are not looked at: they are lost, without
    a proof, or in files of other parts.
    """
    work: list[Segment | Gap] = []
    numbers = _shared_files(pack, share)
    unchecked = _numbers(
        one for file, segments in enumerate(files) if file not in numbers for one in segments
    )
    unread: set[int] = set()
    unproven: set[int] = set()
    short_files: set[int] = set()
    for number in numbers:
        file = pack.index.files[number]
        if pack.partial is not None and not pack.partial.record.ranges(file.name):
            continue
        length = _length_on_disk(pack, number, files[number])
        if length != file.length:
            short_files.add(number)
        segments = [one for one in files[number] if _is_chosen(pack, one)]
        if length < file.length:
            unread |= _numbers(one for one in segments if one.end > length)
            segments, length = cut(segments, length)
        if file.is_shard:
            is_same = comparison is not None and number in comparison.same_files
            unknown = _numbers(one for one in segments if not one.has_proof)
            (unproven if is_same else unread).update(unknown)
            segments = [one for one in segments if one.has_proof]
        if file.is_shard or pack.chosen is not None:
            work += segments
        elif length:
            work += join(number, segments, min(length, file.length))
    if pack.chosen is None and (share is None or share.number == 1):
        work += _gaps_of_shards(pack, short_files)
        if comparison is not None and not comparison.is_another_model and pack.index.is_whole:
            work += comparison.gaps()
    for several, reason in (
        (unread, " that are lost or have no digest"),
        (
            unproven,
            ": the index links to these very files, and has no digests to compare them with",
        ),
    ):
        if several:
            count = f"{len(several):,} blobs and tensors"
            pack.not_looked_at.append(f"the bytes of {count}{reason}")
    return work, unchecked | unread | unproven


def _shared_files(pack: CheckedPack, share: Share | None) -> list[int]:
    """Return the numbers of the data files that this call reads: all, or its share."""
    files = pack.index.files
    if share is None:
        return list(range(len(files)))
    names = set(share.names({file.name: file.length for file in files}))
    numbers = [number for number, file in enumerate(files) if file.name in names]
    if len(numbers) < len(files):
        others = f"{len(files) - len(numbers):,} of {len(files):,} data files"
        pack.not_looked_at.append(f"{others}, which other parts have")
    return numbers


def _is_chosen(pack: CheckedPack, segment: Segment) -> bool:
    """Return whether a segment is to be checked, and in a partial pack, is here."""
    is_left_out = pack.chosen is not None and segment.number not in pack.chosen
    if is_left_out and segment.number is not None:
        return False
    name = pack.index.files[segment.file].name
    return pack.partial is None or pack.partial.covers(name, segment.start, segment.end)


def _gaps_of_shards(pack: CheckedPack, short_files: set[int]) -> Iterator[Segment]:
    """Yield the ranges of files that are shards that no record covers: they are zeros."""
    if not pack.manifest.is_whole or not any(file.is_shard for file in pack.index.files):
        return
    try:
        shards = map_shards(pack)
    except PackError:  # a finding of its own
        return
    for shard in shards:
        for number in sorted({piece.input for piece in shard.pieces} - short_files):
            file = pack.index.files[number]
            if file.is_shard and file.length == shard.length:
                pieces = ((piece.offset, piece.end) for piece in shard.pieces)
                for start, end in gaps(0, shard.length, pieces):
                    yield Segment(number, start, end, ())


def _length_on_disk(pack: CheckedPack, number: int, segments: Sequence[Segment]) -> int:
    """Return the length of a file, 0 if there is none; report any but that in the index."""
    path, expected = pack.paths[number], pack.index.files[number].length
    try:
        with closing(open_input(path)) as file:
            length = file.stamp.length
    except OSError as error:
        if is_of_machine(error):
            raise open_failure(error, path) from None
        pack.findings.add("file", f"cannot open: {error.strerror}", file=path.name)
        return 0
    if length != expected:
        message = f"it is {length:,} bytes long, the index says {expected:,}"
        lost = sum(one.end > length for one in segments)
        if lost:
            message += f": {lost:,} of {len(segments):,} blobs and tensors in it are cut or missing"
        pack.findings.add("file", message, file=path.name, offset=min(length, expected))
    return length


def _numbers(segments: Iterable[Segment]) -> set[int]:
    return {one.number for one in segments if one.number is not None}
