"""Turn shards into a pack in place, and back: at any moment one of them has each byte, on the disk.

The order of events is the promise. `conversion` says what is done with each unit; around it:

1. all of the shards is read: the digests of all pieces are known before anything is touched;
2. `in-place/` gets the draft of the pack, which is the finished index and manifest, twice, and the
   journal, all synced;
3. the shards are renamed into it, under names that no program loads; both directories are synced;
4. the units are carried over;
5. index and manifest are written as `packer` does: the rename of the manifest is the commit;
6. they are read back; then what is left of the shards is removed, and drafts and journal.

Going back is the same from the other end: the manifest is removed, so that nothing opens the pack;
units are carried back; the shards get their names; the rest is removed. From any moment either way
can be taken: all that it takes is in the directory itself, neither the model's name nor its layout
nor its hotness. Whoever takes the work up first reads all of the model, and finds each piece in the
pack or in the shards by its digest; no journal is believed to say where bytes are.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from moepack.errors import MachineError, MoepackError, PackError, RequestError, SourceError
from moepack.format import manifest
from moepack.format.names import IN_PLACE_NAME, MIRROR_NAME
from moepack.format.source_entry import SourceEntry
from moepack.packing import in_place_draft, in_place_refusals, index_encoder
from moepack.packing.finished_files import FinishedFile
from moepack.packing.in_place_draft import Draft
from moepack.packing.in_place_hints import translated
from moepack.packing.in_place_journal import Beginning, Shard
from moepack.packing.in_place_work import ByteProgress, InPlaceRestored, Work, margin
from moepack.packing.index_digests import with_digests
from moepack.packing.packer import TOOL, Progress, encode_manifest
from moepack.packing.piece_locations import PieceLocations, digest_shards
from moepack.packing.plan import Plan
from moepack.packing.target_directory import prepare
from moepack.packing.unfinished import Unfinished, check_homes, has_shards, is_unfinished
from moepack.packing.unit_files import ShardSide
from moepack.packing.units import Units, file_lengths, unit_length
from moepack.paths import PathOrPaths, listed
from moepack.reading.pack import Pack
from moepack.reading.shard_map import map_shards
from moepack.source.shards import Source
from moepack.storage import holes
from moepack.storage.regular_file import FileStamp

_MEANWHILE = "pack without `in_place`, or copy the model first"
_INSTEAD = "restore without `in_place`"


class InPlacePlan(NamedTuple):
    """What would be done: units, the largest one's bytes, the bytes that must be free meanwhile.

    `refusals` say why it is not done; none where it would be.
    """

    unit_count: int
    unit_length: int
    extra_length: int
    refusals: tuple[MoepackError, ...]

    def check(self) -> None:
        """Raise the first refusal, with the others as its notes."""
        if self.refusals:
            first, *others = self.refusals
            for other in others:
                first.add_note(f"also: {other}")
            raise first


def examine(
    source: Source, described: SourceEntry, plan: Plan, target: str | os.PathLike[str]
) -> InPlacePlan:
    """Say what packing in place would take, and all that speaks against it; touches nothing."""
    path, paths = Path(target), [Path(header.path) for header in source.shards]
    draft = _draft(path, described, plan)
    found = list(_of_plan(plan, path))
    if not found:
        found += in_place_refusals.refusals(paths, path, _MEANWHILE)
    length = unit_length(draft.index)
    if not plan.is_whole:
        return InPlacePlan(0, length, 0, tuple(found))
    units = Units(map_shards(draft), file_lengths(draft.index), length)
    room = units.room(holes.block_length(paths[0]), holes.extent_length(paths[0]))
    extra = room.to_pack(0) + margin(units, draft.index)
    found += filter(None, [in_place_refusals.check_space(path, extra)])
    longest = max(unit.length for unit in units.units)
    return InPlacePlan(len(units.units), longest, extra, tuple(found))


def _of_plan(plan: Plan, path: Path) -> Iterator[MoepackError]:
    if not plan.is_whole:
        problem = "in place all of the model is packed: what is left out would be lost"
        hint = "leave out `experts_only`, `layers` and `mtp=False`, or `in_place`"
        yield RequestError(problem, hint=hint)
    if plan.layout.codec is not None:
        yield in_place_refusals.of_codec(plan.layout.codec)
    if path.exists() and not _is_barely_begun(path):
        try:
            prepare(path, resume=False)
        except MoepackError as error:
            yield error


def _is_barely_begun(path: Path) -> bool:
    """Return whether a packer was killed in `path` before it moved a shard."""
    if not path.is_dir() or os.listdir(path) != [IN_PLACE_NAME]:
        return False
    return is_unfinished(path) and not has_shards(path / IN_PLACE_NAME)


def pack_in_place(
    source: Source,
    described: SourceEntry,
    plan: Plan,
    target: str | os.PathLike[str],
    *,
    threads: int,
    progress: Progress | None = None,
) -> None:
    """Turn the shards of `source` into the pack that `plan` describes, in the directory `target`.

    Raises what `examine` finds before anything is touched. Raises SourceError or MachineError for
    what fails on the way; if no byte of the shards was given up yet, they are put back.
    """
    examine(source, described, plan, target).check()
    path = Path(target)
    with translated(path):
        unfinished = _make(path)
        try:
            advanced = ByteProgress(progress)
            with _closed_up_on_failure(unfinished):
                draft, locations = _read_shards(path, source, described, plan, threads, advanced)
                in_place_draft.write(unfinished.inner, draft)
                shards = tuple(_shard(Path(header.path)) for header in source.shards)
                length = unit_length(draft.index)
                unfinished.journal.begin(Beginning(TOOL, False, length, shards))
                unfinished.sync()
                work = Work(unfinished, draft, threads, advanced)
            with _undone_on_failure(work):
                work.pack(locations)
        finally:
            unfinished.close()


def _read_shards(
    path: Path,
    source: Source,
    described: SourceEntry,
    plan: Plan,
    threads: int,
    advanced: ByteProgress,
) -> tuple[Draft, PieceLocations]:
    """Read all of the shards; return the draft of the pack at `path`, with all digests."""
    draft = _draft(path, described, plan)
    units = Units(map_shards(draft), file_lengths(draft.index), unit_length(draft.index))
    advanced.expect(2 * sum(piece.length for piece in units.pieces))  # then they are carried over
    shards = ShardSide([Path(header.path) for header in source.shards])
    try:
        locations = digest_shards(units, shards, threads, advanced)
        shards.forget_all()
    finally:
        shards.close()
    for header in source.shards:
        if FileStamp.of(os.stat(header.path)) != header.stamp:
            hint = "pack again once nothing else writes to it"
            raise SourceError("the shard changed meanwhile", path=header.path, hint=hint)
    index = with_digests(draft.index_bytes, locations.digests | locations.cut, str(path))
    data = encode_manifest(plan, described, index)
    return in_place_draft.decode(path, data, index), locations


def resume_in_place(
    target: str | os.PathLike[str],
    shard_paths: PathOrPaths | None = None,
    *,
    recover: bool = False,
    threads: int,
    progress: Progress | None = None,
) -> int:
    """Go on to the pack in the directory `target`, whichever way was taken before.

    All of the model is read before anything is changed. With `recover` a journal that is damaged or
    lost is made anew; then `shard_paths` are shards that are not in the directory, or a folder of
    them. Returns how many bytes were carried over.
    """
    path = Path(target)

    def homes(draft: Draft) -> list[str | None]:
        named = {}
        for given in map(Path, [] if shard_paths is None else listed(shard_paths)):
            for shard in given.iterdir() if given.is_dir() else [given]:
                named[shard.name] = os.path.abspath(shard)
        return [named.get(shard.name) for shard in draft.manifest.source.shards]

    with translated(path):
        if settle(path):
            if (path / manifest.NAME).exists():
                return 0
            raise RequestError("the shards are where they belong already", path=path)
        with _opened(path, threads, progress, homes if recover else None) as work:
            return work.pack(work.locate(pack_first=True))


def settle(path: Path) -> bool:
    """Remove what an interruption left beside a whole pack, or whole shards; return whether it did.

    No byte of the model is touched.
    """
    if not is_unfinished(path):
        return False
    unfinished = Unfinished(path)
    try:
        if not unfinished.is_untouched:
            return False
        if (path / manifest.NAME).exists():
            with suppress(MoepackError):  # else the pack has the only description
                draft = in_place_draft.read(unfinished.inner, path)
                if not in_place_draft.is_committed(path, draft):
                    unfinished.commit(draft)
        unfinished.close_up()
        return True
    finally:
        unfinished.close()


def restore_in_place(
    target: str | os.PathLike[str],
    folder: str | os.PathLike[str] | None = None,
    *,
    force: bool = False,
    recover: bool = False,
    threads: int,
    progress: Progress | None = None,
) -> InPlaceRestored:
    """Turn the pack in `target`, finished or not, back into its shards; it is gone then.

    They go into `folder`; by default to where they came from, or where an interrupted run was to
    bring them. All of the model is read before anything is changed. With `recover` a journal that
    is damaged or lost is made anew; then `folder` is where shards are that are not in the
    directory.

    Raises RequestError where they cannot go there, before anything is touched, PackError for a pack
    that is not whole or is damaged, MachineError for a machine that fails.
    """
    path, shard_folder = Path(target), None if folder is None else Path(folder)

    def homes(draft: Draft) -> list[str | None]:
        names = [shard.name for shard in draft.manifest.source.shards]
        if shard_folder is None:
            problem = "no folder is given for the shards"
            raise RequestError(problem, hint="name one with `target`: where they were, if known")
        return [os.path.abspath(shard_folder / name) for name in names]

    with translated(path):
        if not is_unfinished(path):
            return _restore_whole(path, shard_folder, force, threads, progress)
        with _opened(path, threads, progress, homes if recover else None) as work:
            return work.restore(work.locate(pack_first=False), shard_folder, force)


def _restore_whole(
    path: Path, folder: Path | None, force: bool, threads: int, progress: Progress | None
) -> InPlaceRestored:
    """Turn a whole pack into its shards."""
    if folder is None:
        raise RequestError("no folder is given for the shards", hint="name one with `target`")
    with Pack(path) as pack:
        if any(file.is_second for file in pack.index.files):
            hint = "restore without `in_place`"
            raise PackError("has files of second places, which stay behind", path=path, hint=hint)
        if os.path.lexists(path / MIRROR_NAME):
            hint = f"remove it first: `moepack mirror {path} --remove`"
            raise RequestError("has a mirror, which stays behind", path=path, hint=hint)
        in_place_refusals.check_plain(pack)
        maps = map_shards(pack)
        units = Units(maps, file_lengths(pack.index), unit_length(pack.index))
        files = pack.file_paths
        index_path = path / pack.manifest.index_entry.name
        spare = margin(units, pack.index)
    for refusal in in_place_refusals.refusals(files, path, _INSTEAD):
        raise refusal
    if reader := in_place_refusals.check_open(index_path):
        raise reader
    block = holes.block_length(path)
    room = units.room(block).to_restore(len(units.units)) + units.absent_length(block)
    room += holes.extent_length(path)
    if too_little := in_place_refusals.check_space(path, room + spare):
        raise too_little
    homes = [os.path.abspath(folder / shard.name) for shard in maps]
    check_homes(homes, path, force)
    unfinished = _make(path)
    try:
        with _closed_up_on_failure(unfinished):
            data, index = (path / manifest.NAME).read_bytes(), index_path.read_bytes()
            draft = in_place_draft.decode(path, data, index)
            in_place_draft.write(unfinished.inner, draft)
            pairs = zip(homes, maps, strict=True)
            shards = tuple(Shard(home, mapped.length, None) for home, mapped in pairs)
            unfinished.journal.begin(Beginning(TOOL, True, units.length, shards))
            unfinished.sync()
            work = Work(unfinished, draft, threads, ByteProgress(progress))
        with _undone_on_failure(work):
            return work.restore(work.locate(pack_first=False), folder, force)
    finally:
        unfinished.close()


def _draft(path: Path, described: SourceEntry, plan: Plan) -> Draft:
    """Return the draft of a pack whose digests are not known yet."""
    none = {
        file.name: FinishedFile(file.name, array("Q", bytes(8 * sum(1 for _ in file.extents()))))
        for file in plan.new_files()
    }
    index = index_encoder.encode(plan, none)
    return in_place_draft.decode(path, encode_manifest(plan, described, index), index)


def _make(path: Path) -> Unfinished:
    """Make the directory of an unfinished pack, synced."""
    path.mkdir(exist_ok=True)
    (path / IN_PLACE_NAME).mkdir(exist_ok=True)
    unfinished = Unfinished(path)
    try:
        unfinished.sync()
    except BaseException:
        unfinished.close()
        raise
    return unfinished


def _shard(path: Path) -> Shard:
    status = os.stat(path)
    return Shard(os.path.abspath(path), status.st_size, status.st_mtime_ns)


@contextmanager
def _closed_up_on_failure(unfinished: Unfinished) -> Iterator[None]:
    """Remove what was made in the directory if the work does not come to its beginning."""
    try:
        yield
    except BaseException:
        with suppress(OSError, MoepackError):
            unfinished.close_up()
        raise


@contextmanager
def _undone_on_failure(work: Work) -> Iterator[None]:
    """Put all back as it was if the work fails before anything was given up."""
    try:
        yield
    except BaseException:
        with suppress(OSError, MoepackError):
            if not work.has_given_up:
                work.undo()
        raise


@contextmanager
def _opened(
    path: Path,
    threads: int,
    progress: Progress | None,
    recovery: Callable[[Draft], list[str | None]] | None,
) -> Iterator[Work]:
    """Open the work that was begun in `path`.

    `recovery` returns where the shards belong, for a journal that does not say it; without it such
    a journal is refused.
    """
    if not is_unfinished(path):
        raise RequestError("nothing was begun here in place", path=path)
    unfinished = Unfinished(path)
    try:
        draft = in_place_draft.read(unfinished.inner, path)
        if unfinished.journal.beginning is None:
            if recovery is None:
                raise MachineError("the journal is damaged", path=unfinished.journal.path)
            unfinished.journal.begin(_recovered(draft, recovery(draft)))
        yield Work(unfinished, draft, threads, ByteProgress(progress))
    finally:
        unfinished.close()


def _recovered(draft: Draft, homes: list[str | None]) -> Beginning:
    """Return the beginning of a journal by what the draft says of the shards."""
    entries = draft.manifest.source.shards
    shards = [Shard(home, entry.length, None) for home, entry in zip(homes, entries, strict=True)]
    return Beginning(TOOL, True, unit_length(draft.index), tuple(shards))
