"""The work of a verification: the bytes of its files that are read, and those without proof."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from moepack.common.errors import PackError, is_of_machine, open_failure
from moepack.common.sizes import gaps
from moepack.common.tasks import Share
from moepack.pack.format.index import Index
from moepack.pack.format.manifest import Manifest
from moepack.pack.format.tables import DataFile
from moepack.pack.reading.copies import Partial
from moepack.pack.reading.shard_map import map_shards
from moepack.pack.verifying.comparison import SourceComparison
from moepack.pack.verifying.extents import Item, Segment, cut, whole_segments
from moepack.pack.verifying.report import Findings
from moepack.pack.verifying.scan import Gap
from moepack.storage.input_file import open_input


@dataclass
class WorkList:
    """The bytes to read of the pack at `path`, as far as they are there.

    `chosen` are the numbers of the items to check, None for all; `comparison` is with a source of
    the same model. `unread` are items that are lost or have no digest, `unproven` those that the
    index links to in the very source, `of_others` those in files of other parts.
    """

    path: Path
    manifest: Manifest
    index: Index
    chosen: frozenset[int] | None
    partial: Partial | None
    share: Share | None
    comparison: SourceComparison | None
    findings: Findings
    not_looked_at: list[str]

    def __post_init__(self) -> None:
        self.paths = [self.path / file.name for file in self.index.files]
        self.unread: set[int] = set()
        self.unproven: set[int] = set()
        self.of_others: set[int] = set()
        self._short_files: set[int] = set()

    def segments(self, items: Sequence[list[Item]]) -> list[Segment | Gap]:
        """List the segments to read, as far as the files on disk have them."""
        work: list[Segment | Gap] = []
        for number in self._shared_files(items):
            file = self.index.files[number]
            if not self._is_looked_at(file):
                continue
            length = self._length_on_disk(number, file.length, items[number])
            chosen = self._chosen_items(file.name, items[number])
            if length < file.length:
                self.unread |= _numbers(item for item in chosen if item.end > length)
                chosen, length = cut(chosen, length)
            if file.is_shard:
                unknown = _numbers(item for item in chosen if not _can_be_checked(item))
                is_same = self.comparison is not None and number in self.comparison.same_files
                if is_same:
                    self.unproven |= unknown
                else:
                    self.unread |= unknown
                chosen = [item for item in chosen if _can_be_checked(item)]
            if not length:
                continue
            if file.is_shard or self.chosen is not None:
                work += [Segment(number, one.start, one.end, one.ranges) for one in chosen]
            else:
                work += whole_segments(number, chosen, min(length, file.length))
        if self.chosen is None and (self.share is None or self.share.number == 1):
            work += self._gaps_of_shards()
            if self.comparison is not None and self.index.is_whole:
                work += self.comparison.gaps()
        self._note_unchecked()
        return work

    def _note_unchecked(self) -> None:
        if self.unread:
            count = f"{len(self.unread):,} blobs and tensors"
            self.not_looked_at.append(f"the bytes of {count} that are lost or have no digest")
        if self.unproven:
            count = f"{len(self.unproven):,} blobs and tensors"
            self.not_looked_at.append(
                f"the bytes of {count}: the index links to these very files, and has no digests to"
                " compare them with"
            )

    def _is_looked_at(self, file: DataFile) -> bool:
        """Return false if nothing of a file is here, in a partial pack."""
        return self.partial is None or bool(self.partial.record.ranges(file.name))

    def _chosen_items(self, name: str, items: list[Item]) -> list[Item]:
        """Return the items of a file that are to be checked; in a partial pack, as far as here."""
        if self.chosen is not None:
            items = [one for one in items if one.number is None or one.number in self.chosen]
        if self.partial is not None:
            items = [one for one in items if self.partial.covers(name, one.start, one.end)]
        return items

    def _shared_files(self, items: Sequence[list[Item]]) -> list[int]:
        """Return the numbers of the data files that this call reads: all, or its share."""
        files = self.index.files
        if self.share is None:
            return list(range(len(files)))
        names = set(self.share.names({file.name: file.length for file in files}))
        numbers = [number for number, file in enumerate(files) if file.name in names]
        for number in set(range(len(files))) - set(numbers):
            self.of_others |= _numbers(items[number])
        if len(numbers) < len(files):
            others = f"{len(files) - len(numbers):,} of {len(files):,} data files"
            self.not_looked_at.append(f"{others}, which other parts have")
        return numbers

    def _gaps_of_shards(self) -> Iterator[Segment]:
        """Yield the ranges of files that are shards that no record covers: they are zeros."""
        if not self.manifest.is_whole or not any(file.is_shard for file in self.index.files):
            return
        try:
            shards = map_shards(self)
        except PackError:  # a finding of its own
            return
        for shard in shards:
            for number in sorted({piece.input for piece in shard.pieces}):
                file = self.index.files[number]
                is_sound = file.length == shard.length and number not in self._short_files
                if file.is_shard and is_sound:
                    pieces = ((piece.offset, piece.end) for piece in shard.pieces)
                    for start, end in gaps(0, shard.length, pieces):
                        yield Segment(number, start, end, ())

    def _length_on_disk(self, number: int, expected: int, items: Sequence[Item]) -> int:
        """Return the length of a file, 0 if there is none; report any other than `expected`."""
        path = self.paths[number]
        try:
            with closing(open_input(path)) as file:
                length = file.stamp.length
        except OSError as error:
            if is_of_machine(error):
                raise open_failure(error, path) from None
            self.findings.add("file", f"cannot open: {error.strerror}", file=path.name)
            self._short_files.add(number)
            return 0
        if length == expected:
            return length
        self._short_files.add(number)
        message = f"it is {length:,} bytes long, the index says {expected:,}"
        lost = sum(item.end > length for item in items)
        if lost:
            message += f": {lost:,} of {len(items):,} blobs and tensors in it are cut or missing"
        self.findings.add("file", message, file=path.name, offset=min(length, expected))
        return length


def _numbers(items: Iterable[Item]) -> set[int]:
    return {item.number for item in items if item.number is not None}


def _can_be_checked(item: Item) -> bool:
    return any(
        one is not None
        for checked in item.ranges
        for one in (checked.digest, checked.source, checked.strong)
    )
