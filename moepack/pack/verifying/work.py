"""The work of a verification: its scope, the bytes that are read, and those without proof."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import closing
from itertools import pairwise
from typing import NamedTuple

from moepack.common.errors import PackError, RequestError, is_of_machine, open_failure
from moepack.common.share import Share
from moepack.common.sizes import gaps, parse_layers, ranges_text
from moepack.pack.reading.shard_map import map_shards
from moepack.pack.verifying.checked_pack import CheckedPack, Gap, Segment, cut, join
from moepack.pack.verifying.comparison import SourceComparison
from moepack.storage.input_file import open_input


def choose(pack: CheckedPack, layers: str | Iterable[int] | None) -> None:
    """Choose the blobs and tensors of `layers`; of a partial pack, those that are here.

    Raises RequestError for a layer that the pack does not hold.
    """
    if layers is None and pack.partial is None:
        return
    index = pack.index
    packed = sorted({family.layer for family in index.families})
    chosen = packed if layers is None else _layers(layers, packed)
    numbers = [
        number
        for family in index.families
        if family.layer in chosen
        for number in range(family.first_blob, family.first_blob + family.expert_count)
    ]
    for number, tensor in pack.tensors.items():
        block, layer, *_ = (*tensor.name.split("."), "")
        if layers is None or (block == "blk" and layer in map(str, chosen)):
            numbers.append(index.blob_count + number)
    if pack.partial is not None:
        numbers = [number for number in numbers if _is_here(pack, number)]
    pack.chosen = frozenset(numbers)
    blob_count = sum(number < index.blob_count for number in numbers)
    if others := sorted(set(packed) - set(chosen)):
        pack.not_looked_at.append(f"layers {ranges_text(others)}")
    for count, all_count, noun in (
        (blob_count, index.blob_count, "blobs"),
        (len(numbers) - blob_count, index.tensor_count, "dense tensors"),
    ):
        if count < all_count:
            pack.not_looked_at.append(f"{all_count - count:,} of {all_count:,} {noun}")
    has_blobs = any(not file.is_shard for file in index.files)
    between = "blobs and tensors" if has_blobs else "tensors"
    pack.not_looked_at.append(f"padding between {between}")


def _is_here(pack: CheckedPack, number: int) -> bool:
    """Return whether the bytes of a blob or a tensor are in the directory of a partial pack."""
    assert pack.partial is not None
    try:
        if number < pack.index.blob_count:
            offset, length, _, _, file = pack.index.blob(number)
        else:
            tensor = pack.tensors[number - pack.index.blob_count]
            offset, length, file = tensor.offset, tensor.length, tensor.file
    except PackError:  # a finding of its own
        return False
    return pack.partial.covers(pack.index.files[file].name, offset, offset + length)


def _layers(layers: str | Iterable[int], packed: Sequence[int]) -> tuple[int, ...]:
    chosen = parse_layers(layers)
    missing = sorted(set(chosen) - set(packed))
    if missing or not chosen:
        raise RequestError(
            f"the pack has no experts in layer {missing[0]}" if missing else "no layers are named",
            expected=f"layers of {ranges_text(packed)}",
        )
    return chosen


def list_work(
    pack: CheckedPack,
    files: Sequence[Sequence[Segment]],
    share: Share | None,
    comparison: SourceComparison | None,
) -> tuple[list[Segment | Gap], set[int], set[int]]:
    """List the segments to read of the chosen ones in `files`, as far as the files have them.

    Also returns the numbers of the blobs and tensors of other parts, and of all that are not looked
    at: these, and those that are lost or without a proof.
    """
    mine = _shared(pack, files, share)
    all_work = [_work_of_file(pack, number, *one, comparison) for number, one in enumerate(mine)]
    of_others = set[int]()
    if share is not None and share.others:
        pack.not_looked_at.insert(0, f"parts {ranges_text(share.others)} of {share.count}")
        of_others = _numbers(one for several in files for one in several)
        of_others -= _numbers(one for segments, _, _ in mine for one in segments)
    work: list[Segment | Gap] = [segment for one in all_work for segment in one.segments]
    if pack.chosen is None and (share is None or share.number == 1):
        work += _gaps_of_shards(
            pack, {number for number, one in enumerate(all_work) if one.is_changed}
        )
        if comparison is not None and not comparison.is_another_model and pack.index.is_whole:
            work += comparison.gaps()
    unread = {number for one in all_work for number in one.unread}
    unproven = {number for one in all_work for number in one.unproven}
    same = "the index links to these very files, and has no digests to compare them with"
    for several, reason in (
        (unread, " that are lost or have no digest"),
        (unproven, f": {same}"),
    ):
        if several:
            count = f"{len(several):,} blobs and tensors"
            pack.not_looked_at.append(f"the bytes of {count}{reason}")
    return work, of_others, of_others | unread | unproven


class _FileWork(NamedTuple):
    """The segments to read of a file, and the blobs and tensors in it that are not looked at.

    `unread` are lost or have no digest; `unproven` would be compared with themselves. A file that
    `is_changed` has another length than in the index.
    """

    segments: Sequence[Segment]
    unread: Collection[int] = ()
    unproven: Collection[int] = ()
    is_changed: bool = False


class _Share(NamedTuple):
    """The chosen segments of a file that are checked, and the bytes of it, padding included."""

    segments: Sequence[Segment]
    start: int
    end: int


def _work_of_file(
    pack: CheckedPack,
    number: int,
    segments: Sequence[Segment],
    start: int,
    end: int,
    comparison: SourceComparison | None,
) -> _FileWork:
    file = pack.index.files[number]
    if pack.partial is not None and not pack.partial.record.ranges(file.name):
        return _FileWork(())
    if start == end and file.length:  # other parts have it
        return _FileWork(())
    length = _length_on_disk(pack, number, segments)
    is_changed = length != file.length
    unread, unproven = set[int](), set[int]()
    if length < file.length:
        unread = _numbers(one for one in segments if one.end > length)
        segments, length = cut(segments, length)
    if file.is_shard:
        is_same = comparison is not None and number in comparison.same_files
        unknown = _numbers(one for one in segments if not one.has_proof)
        (unproven if is_same else unread).update(unknown)
        segments = [one for one in segments if one.has_proof]
    elif pack.chosen is None:
        end = min(length, end)
        segments = [*join(number, segments, start, end)] if start < end else []
    return _FileWork(segments, unread, unproven, is_changed)


def _shared(
    pack: CheckedPack, files: Sequence[Sequence[Segment]], share: Share | None
) -> list[_Share]:
    """Return the segments and bytes of each file to check: all that are chosen, or a share.

    Shares are cut between segments, whose bytes are counted over all files. So they depend on the
    index and the choice alone, and padding goes with the segment before it.
    """
    chosen = [[one for one in segments if _is_chosen(pack, one)] for segments in files]
    all_edges, all_lengths = [], []
    for file, segments in zip(pack.index.files, chosen, strict=True):
        edges = [0, *(one.start for one in segments[1:]), file.length]
        lengths = [one.end - one.start for one in segments] or [0]
        if pack.chosen is None and not file.is_shard:  # padding is read as well
            lengths = [max(0, end - start) for start, end in pairwise(edges)]
        all_edges.append(edges)
        all_lengths.append(lengths)
    total = max(1, sum(map(sum, all_lengths)))
    position, shares = 0, []
    for segments, edges, lengths in zip(chosen, all_edges, all_lengths, strict=True):
        has = []
        for length in lengths:
            has.append(share is None or share.has(position, total))
            position += length
        first = has.index(True) if True in has else len(has)
        last = first + has.count(True)
        shares.append(_Share(segments[first:last], edges[first], edges[last]))
    return shares


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
