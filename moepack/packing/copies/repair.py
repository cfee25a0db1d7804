"""Repair a pack: find its damaged ranges, and write back these alone.

The order of events is the promise:

1. everything is read from the drive, and compared with the digests in the index;
2. the bytes for a damaged range are read from the source, and have its digest, before any is
   written;
3. what was written is synced, dropped from the page cache, and compared once more.

Only ranges with a wrong digest are written to, so none that was right is lost by an end in between:
one that is half written still has a wrong digest, which `verify` finds, and the same command goes
on. A damaged index or manifest is replaced by a copy's, if the other of the two is the copy's too.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from moepack.common import digest
from moepack.common.errors import (
    MachineError,
    MoepackError,
    PackError,
    RequestError,
    SourceError,
    write_failure,
)
from moepack.common.pack_files import JOURNAL_NAME
from moepack.common.paths import AnyPath, PathOrPaths, is_remote
from moepack.common.phases import DigestCounts, Phases, Progress
from moepack.common.sizes import count_text
from moepack.pack.format import manifest
from moepack.pack.reading.copies import CopyRecord
from moepack.pack.reading.directory import pack_path, read_any_manifest
from moepack.pack.reading.pack import Pack
from moepack.pack.reading.shard_map import shard_pieces
from moepack.pack.verifying.shard_sha256 import sha256_of
from moepack.packing.copies.packed_items import RUN_LENGTH, PackedItem
from moepack.packing.copies.subset_copy import SubsetCopy
from moepack.packing.writing.commit import commit, is_on_drive, write_proven
from moepack.source.shards import Source, open_source
from moepack.storage.extents import Extent, RangeSet
from moepack.storage.folders import locked_folder
from moepack.storage.inputs import Inputs
from moepack.storage.regular_file import open_regular, write_at
from moepack.storage.thread_pool import run_each

_ANOTHER_DRIVE = "copy the pack to another drive"
_AGAIN = "run the same command again: it goes on from what is right"
_NAME_A_COPY = "name another copy of the pack as the `source`: a folder, or its address in a store"
_NAME_A_SOURCE = "name the shards that it was made from, or a copy of the pack, as the `source`"


@dataclass(frozen=True, slots=True)
class RepairSummary:
    """A repaired pack, and where the bytes came from; lengths are bytes.

    `origin` is None if nothing was fetched. `repaired` names index, manifest, parts and tensors
    that were damaged and are right again, of `written_length` together. `padding_length` was
    padding that was not zero, or missing or surplus bytes of files. `digests` counts the bytes of
    parts and tensors, all of which were compared.
    """

    path: str
    origin: str | None
    repaired: tuple[str, ...]
    written_length: int
    padding_length: int
    digests: DigestCounts


def repair(
    pack: AnyPath,
    source: PathOrPaths | None = None,
    *,
    threads: int = 4,
    progress: Progress | None = None,
) -> RepairSummary:
    """Find what is damaged in a pack, and write back these ranges alone.

    `source` has the right bytes: the shards that the pack was made from, or a copy of the pack,
    either in a folder or at an address. By default it is the mirror of the pack, and for a partial
    pack the pack that it is a part of. Padding needs none. All bytes are compared with their
    digests: those of the pack before and after, those of the source before they are written.
    `progress` is called with the bytes done since its last call, and those to do in all.

    Raises PackError if something is damaged that the source does not have, for which all else is
    repaired, and for a source that is another pack; SourceError for other shards; RequestError for
    a pack in a store; MachineError for a drive that fails.
    """
    if is_remote(pack):
        hint = "repair a copy on this machine, and put its files there"
        raise RequestError("the pack is in a store", path=pack, hint=hint)
    folder = Path(pack)
    if not folder.is_dir():
        read_any_manifest(folder)  # which raises
    with ExitStack() as stack:
        copy: Pack | Source | None = None
        if source is not None:
            path = pack_path(source)
            copy = open_source(source) if path is None else Pack(path)
        if isinstance(copy, Pack):
            stack.enter_context(copy)
            copy.require_complete()
        try:
            stack.enter_context(locked_folder(folder))
            described = _repair_description(folder, copy)
            opened = stack.enter_context(Pack(folder))
            return _Repair(opened, threads, Phases(progress)).run(copy, described)
        except OSError as error:
            raise write_failure(error, folder, _AGAIN) from error


def _repair_description(folder: Path, copy: Pack | Source | None) -> Mapping[str, int]:
    """Write a damaged manifest or index anew; return its name and length.

    Raises PackError if neither is the copy's: nothing says then that it is the same pack.
    """
    try:
        Pack(folder).close()
        return {}
    except PackError as error:
        has_index = (folder / manifest.INDEX_NAME).exists()
        if not has_index and not (folder / manifest.NAME).exists():
            raise
        if (folder / JOURNAL_NAME).exists() or error.code is not None:
            raise
        if not isinstance(copy, Pack):
            error.hint = _NAME_A_COPY
            raise
        problem = error
    entry, index_bytes = copy.manifest.index_entry, copy.index_bytes
    has_index = is_on_drive(folder / entry.name, index_bytes)
    has_manifest = is_on_drive(folder / manifest.NAME, copy.manifest_bytes)
    if has_index == has_manifest:
        if has_index:
            raise problem
        raise PackError(
            "neither its manifest nor its index is that of the copy",
            path=folder,
            found=str(problem),
            hint="nothing says that it is the same pack: copy the whole pack into another folder",
        )
    if has_index:
        commit(folder, entry.name, index_bytes, copy.manifest_bytes)
        return {manifest.NAME: len(copy.manifest_bytes)}
    (folder / entry.name).unlink(missing_ok=True)  # readers keep the one that they map
    write_proven(folder, {entry.name: index_bytes})
    return {entry.name: len(index_bytes)}


class _Origin(NamedTuple):
    """The files with the right bytes; `name` is that of all, `fault` the error for wrong ones.

    `place` returns the number of the file with an item, and the offset there; None if it is not
    there.
    """

    name: str
    paths: Sequence[AnyPath]
    place: Callable[[PackedItem], tuple[int, int] | None]
    fault: type[MoepackError] = PackError


class _Repair:
    """One repair of an open pack."""

    def __init__(self, pack: Pack, threads: int, phases: Phases) -> None:
        self._pack, self._threads, self._phases = pack, threads, phases
        self._copy = SubsetCopy(pack, pack.path, by_part=True)
        self._copy.require_pack()
        self._paths = [pack.path / file.name for file in pack.index.files]

    def run(self, source: Pack | Source | None, described: Mapping[str, int]) -> RepairSummary:
        """Compare everything, and write back what is wrong from the source."""
        pack, copy = self._pack, self._copy
        here = copy.all
        if pack.partial is not None:
            here = copy.named(pack.partial.record, unchanged=False)
        copy.drop_cached(range(len(self._paths)))
        copy.find(here, self._threads, self._phases.begin())
        damaged = sorted(here - copy.here)
        padding_length = copy.find_wrong_padding()
        origin = self._origin(source, damaged) if damaged or described else None
        problems: Mapping[int, MoepackError | None] = dict.fromkeys(damaged)
        if damaged or padding_length:  # lengths and padding need no source
            copy.fetch((), range(len(self._paths)), self._threads, self._phases.begin())
        if origin is not None:
            problems = self._write_back(origin, damaged)
        repaired = [number for number in damaged if number not in problems]
        self._check(repaired, is_padded=padding_length > 0)
        if problems:
            raise self._failure(origin, problems, len(damaged))
        return RepairSummary(
            path=os.fspath(pack.path),
            origin=None if origin is None else origin.name,
            repaired=(*described, *(copy.items[n].extents[0].label for n in repaired)),
            written_length=sum(described.values()) + copy.length(repaired),
            padding_length=padding_length,
            digests=copy.digest_counts(here),
        )

    def _origin(self, source: Pack | Source | None, damaged: Sequence[int]) -> _Origin | None:
        """Return where the right bytes are: in the source, else where the pack says."""
        pack, mirror = self._pack, self._pack.mirror
        if isinstance(source, Source):
            return self._shards(source, damaged)
        folder: Path | None = None
        record: CopyRecord | None = None
        if isinstance(source, Pack):
            folder = source.path
            if source.index.content_digest() != pack.index.content_digest():
                hint = "name a copy of this pack, or the shards that it was made from"
                raise PackError("another pack", path=folder, expected=pack.path, hint=hint)
        elif pack.partial is not None:
            folder = pack.partial.origin
        elif mirror is not None and mirror.record is not None and mirror.problem is None:
            folder, record = mirror.path, mirror.record
        if folder is None:
            return None
        names = [file.name for file in pack.index.files]
        there = [RangeSet(record.ranges(name) if record else [(0, 1 << 63)]) for name in names]

        def place(item: PackedItem) -> tuple[int, int] | None:
            return (
                (item.file, item.start) if there[item.file].covers(item.start, item.end) else None
            )

        return _Origin(os.fspath(folder), [folder / name for name in names], place)

    def _shards(self, source: Source, damaged: Sequence[int]) -> _Origin:
        """Return the shards as an origin; raise SourceError if they are others."""
        starts = {(self._copy.items[n].file, self._copy.items[n].start) for n in damaged}
        places: dict[tuple[int, int], tuple[int, int]] = {}
        for shard, piece in shard_pieces(self._pack.index):
            start = piece.input, piece.input_offset
            if piece.length and start in starts:
                places[start] = shard, piece.offset
        entries = self._pack.manifest.source.shards
        paths = [shard.path for shard in source.shards]
        for number, entry in enumerate(entries):
            is_right = len(paths) == len(entries)
            if is_right and any(shard == number for shard, _ in places.values()):
                is_right = sha256_of(paths[number], entry.header_length) == entry.header_sha256
            if not is_right:
                raise SourceError(
                    "not the shards that the pack was made from",
                    path=paths[min(number, len(paths) - 1)],
                    expected=f"{count_text(len(entries), 'shard')} of {entry.name}",
                    hint="compare them with the pack: `moepack verify PACK --source SHARD`",
                )
        return _Origin(
            paths[0], paths, lambda item: places.get((item.file, item.start)), SourceError
        )

    def _write_back(
        self, origin: _Origin, damaged: Sequence[int]
    ) -> dict[int, MoepackError | None]:
        """Write damaged items; return those that the origin lacks, with the errors of reads."""
        items = self._copy.items
        all_places = {number: origin.place(items[number]) for number in damaged}
        places = {number: place for number, place in all_places.items() if place is not None}
        files = sorted({file for file, _ in places.values()})
        with (
            Inputs([origin.paths[file] for file in files], origin.fault) as inputs,
            ExitStack() as stack,
        ):
            targets = {}
            for file in {items[number].file for number in places}:
                targets[file] = open_regular(self._paths[file], os.O_RDWR | os.O_NOFOLLOW)
                stack.callback(os.close, targets[file])

            def write(number: int, advanced: Callable[[int], None]) -> MoepackError | None:
                file, offset = places[number]
                extent, target = items[number].extents[0], targets[items[number].file]
                try:
                    _write(inputs, files.index(file), offset, extent, target)
                except (PackError, SourceError) as error:
                    return error
                advanced(extent.length)
                return None

            total, progress = self._copy.length(places), self._phases.begin()
            errors = run_each(write, [*places], self._threads, lambda done: progress(done, total))
        problems = dict(zip(places, errors, strict=True))
        return {n: problems.get(n) for n in damaged if n not in places or problems[n] is not None}

    def _check(self, repaired: Sequence[int], *, is_padded: bool) -> None:
        """Compare repaired ranges on the drive with their digests. Raises MachineError."""
        if repaired:
            self._copy.prove(repaired, self._threads, self._phases.begin(), _ANOTHER_DRIVE)
        if is_padded:
            self._copy.drop_cached(range(len(self._paths)))
        if is_padded and self._copy.find_wrong_padding():
            raise MachineError(
                "the drive returned other bytes than were written",
                path=self._pack.path,
                place="padding",
                hint=f"the drive or the memory is failing: {_ANOTHER_DRIVE}",
            )

    def _failure(
        self, origin: _Origin | None, problems: Mapping[int, MoepackError | None], count: int
    ) -> PackError:
        number, error = next(iter(problems.items()))
        item = self._copy.items[number]
        words, hint = "have no source", _NAME_A_SOURCE
        if error is not None:
            words, hint = f"could not be repaired: {error}", "name another copy as the `source`"
        elif origin is not None:
            words = f"are not in {origin.name}"
        return PackError(
            f"{len(problems):,} of {count_text(count, 'damaged range')} {words}",
            path=self._paths[item.file],
            place=item.extents[0].label,
            hint=hint if len(problems) == count else f"{hint}; the rest is repaired",
        )


def _write(inputs: Inputs, number: int, offset: int, extent: Extent, target: int) -> None:
    """Write an extent from an input, from which it is read once before, if it is long.

    Raises PackError if it does not have its digest there; nothing is written then.
    """
    stream: Callable[[], Iterable[bytes]] = partial(inputs.stream, number, offset, extent.length)
    if extent.length <= RUN_LENGTH:
        pieces = list(stream())
        stream = partial(iter, pieces)
    computed = digest.stream()
    for piece in stream():
        computed.update(piece)
    inputs.check_digest(extent._replace(input=number, input_offset=offset), computed.intdigest())
    position = extent.offset
    for piece in stream():
        write_at(target, piece, position)
        position += len(piece)
