"""Turn shards into a pack in place, and back: at any moment one of them has each byte, on the disk.

The order of events is the promise. `conversion` says what is done with each unit; around it:

1. `in-place/` gets the draft of the pack and the journal, all synced;
2. the shards are renamed into it, under names that no program loads; both directories are synced;
3. the units are carried over;
4. index and manifest are written as `packer` does: the rename of the manifest is the commit;
5. the journal says that it is done; what is left of the shards is removed, and the journal.

Going back is the same from the other end: the manifest is removed, so that nothing opens the pack;
units are carried back; the shards get their names; the rest is removed. From any moment either way
can be taken: all that it takes is in the directory itself, neither the model's name nor its layout
nor its hotness.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from moepack.errors import MachineError, MoepackError, PackError, RequestError, write_failure
from moepack.format import manifest
from moepack.format.index import Index
from moepack.format.manifest import Manifest
from moepack.format.names import IN_PLACE_NAME
from moepack.format.source_entry import SourceEntry
from moepack.packing import in_place_refusals, index_encoder
from moepack.packing.in_place_journal import Beginning, Goal, Shard
from moepack.packing.in_place_work import InPlaceRestored, Work, margin
from moepack.packing.packer import TOOL, Progress, encode_manifest
from moepack.packing.plan import Plan
from moepack.packing.target_directory import prepare
from moepack.packing.unfinished import Unfinished, check_homes, is_unfinished
from moepack.packing.unit_files import PackSide
from moepack.packing.units import Units, file_lengths, unit_length
from moepack.reading.pack import Pack
from moepack.reading.shard_map import map_shards
from moepack.source.shards import Source
from moepack.storage import holes

_MEANWHILE = "pack without --in-place, or copy the model first"
_INSTEAD = "restore without --in-place"
_KEEP = "do not remove the directory: it holds the model"


class InPlacePlan(NamedTuple):
    """What would be done: units, the largest one's bytes, the bytes that must be free meanwhile.

    `refusals` say why it is not done; none where it would be.
    """

    unit_count: int
    unit_length: int
    extra_length: int
    refusals: tuple[MoepackError, ...]


@dataclass(frozen=True, slots=True)
class _Draft:
    """A pack that is described, and not yet there."""

    path: Path
    manifest: Manifest
    index: Index


def examine(
    source: Source, described: SourceEntry, plan: Plan, target: str | os.PathLike[str]
) -> InPlacePlan:
    """Say what packing in place would take, and all that speaks against it; touches nothing."""
    path, paths = Path(target), [Path(header.path) for header in source.shards]
    _, _, draft = _draft(path, described, plan)
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
        hint = "leave out --experts-only, --layers and --no-mtp, or --in-place"
        yield RequestError(problem, hint=hint)
    if path.exists() and not _is_barely_begun(path):
        try:
            prepare(path, resume=False)
        except MoepackError as error:
            yield error


def _is_barely_begun(path: Path) -> bool:
    """Say whether a packer was killed in `path` before it moved a shard."""
    if not path.is_dir() or os.listdir(path) != [IN_PLACE_NAME]:
        return False
    if not is_unfinished(path):
        return not os.listdir(path / IN_PLACE_NAME)
    unfinished = Unfinished(path)
    try:
        return unfinished.journal.beginning is None and not unfinished.holds_shards()
    finally:
        unfinished.close()


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
    what fails on the way; where no unit was carried over yet, the shards are put back.
    """
    refusals = examine(source, described, plan, target).refusals
    if refusals:
        for other in refusals[1:]:
            refusals[0].add_note(f"also: {other}")
        raise refusals[0]
    path = Path(target)
    with _translated(path):
        unfinished = _make(path)
        try:
            data, index, draft = _draft(path, described, plan)
            unfinished.write_draft(data, index)
            shards = tuple(map(_shard, (Path(header.path) for header in source.shards)))
            unfinished.journal.begin(Beginning(TOOL, False, unit_length(draft.index), shards))
            unfinished.sync()
            work = Work(unfinished, threads, progress)
            try:
                work.pack()
            except BaseException:
                work.undo()
                raise
        finally:
            unfinished.close()


def resume_in_place(
    target: str | os.PathLike[str], *, threads: int, progress: Progress | None = None
) -> None:
    """Go on to the pack in the directory `target`, whichever way was taken before."""
    path = Path(target)
    goal = settle(path)
    if goal is Goal.SHARDS:
        raise RequestError("the shards are where they belong already", path=path)
    if goal is None:
        with _translated(path), _opened(path, threads, progress) as work:
            work.pack()


def settle(path: Path) -> Goal | None:
    """Tidy up what an interruption left when all was done; return what that was, else None."""
    if not is_unfinished(path):
        return None
    unfinished = Unfinished(path)
    try:
        if unfinished.journal.is_done:
            unfinished.tidy()
            return unfinished.journal.goal
        if unfinished.journal.beginning is None and (path / manifest.NAME).exists():
            unfinished.abandon()  # killed before the way back had begun: the pack is whole
            return Goal.PACK
        return None
    finally:
        unfinished.close()


def restore_in_place(
    target: str | os.PathLike[str],
    folder: str | os.PathLike[str] | None = None,
    *,
    force: bool = False,
    threads: int,
    progress: Progress | None = None,
) -> InPlaceRestored:
    """Turn the pack in `target`, finished or not, back into its shards; it is gone then.

    They go into `folder`; by default to where they came from, or where an interrupted run was to
    bring them. Raises RequestError where they cannot go there, before anything is touched,
    PackError for a pack that is not whole, MachineError for a machine that fails.
    """
    path = Path(target)
    with _translated(path):
        settle(path)
        if not is_unfinished(path):
            _begin_from_pack(path, None if folder is None else Path(folder), force)
        with _opened(path, threads, progress) as work:
            return work.restore(None if folder is None else Path(folder), force)


def _begin_from_pack(path: Path, folder: Path | None, force: bool) -> None:
    """Make a whole pack one that is on its way back, with all units in the pack."""
    if folder is None:
        raise RequestError("no folder is given for the shards", hint="name one with --output")
    with Pack(path) as pack:
        maps = map_shards(pack)
        length = unit_length(pack.index)
        units = Units(maps, file_lengths(pack.index), length)
        _check_what_is_cut(pack, units)
        files = pack.file_paths
        spare = margin(units, pack.index)
    for refusal in in_place_refusals.refusals(files, path, _INSTEAD):
        raise refusal
    if reader := in_place_refusals.check_open(path / manifest.INDEX_NAME):
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
        names = (manifest.NAME, manifest.INDEX_NAME)
        unfinished.write_draft(*((path / name).read_bytes() for name in names))
        shards = []
        for place, home, mapped in zip(unfinished.shard_paths(len(maps)), homes, maps, strict=True):
            with open(place, "wb") as file:
                os.ftruncate(file.fileno(), mapped.length)
                os.fsync(file.fileno())
                status = os.fstat(file.fileno())
            shards.append(Shard(home, status.st_ino, mapped.length, None))
        unfinished.sync()
        unfinished.journal.begin(Beginning(TOOL, True, length, tuple(shards)))
    finally:
        unfinished.close()


def _check_what_is_cut(pack: Pack, units: Units) -> None:
    """Compare with its digest what is larger than a unit: of its pieces none has one."""
    side = PackSide(pack.file_paths)
    try:
        for piece in units.cut_pieces():
            if piece.digest is not None and side.digest(piece) != piece.digest:
                hint = "run `moepack verify` on the pack"
                problem = "the pack is damaged: its bytes do not have their digest"
                raise PackError(problem, path=side.paths[piece.file], place=piece.label, hint=hint)
    finally:
        side.close()


def _draft(path: Path, described: SourceEntry, plan: Plan) -> tuple[bytes, bytes, _Draft]:
    """Return manifest and index of a pack whose digests are not known yet, as bytes and decoded."""
    none = {
        file.name: array("Q", bytes(8 * sum(1 for _ in file.extents())))
        for file in plan.new_files()
    }
    index = index_encoder.encode(plan, none)
    data = encode_manifest(plan, described, index)
    return data, index, _Draft(path, manifest.decode(data, str(path)), Index(index, str(path)))


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
    return Shard(os.path.abspath(path), status.st_ino, status.st_size, status.st_mtime_ns)


@contextmanager
def _opened(path: Path, threads: int, progress: Progress | None) -> Iterator[Work]:
    if not is_unfinished(path):
        raise RequestError("nothing was begun here in place", path=path)
    unfinished = Unfinished(path)
    try:
        if unfinished.journal.beginning is None:
            if unfinished.holds_shards():
                unfinished.journal.fail("its first line is not whole")
            hint = "remove the directory, and pack again"
            raise RequestError("interrupted before a shard was touched", path=path, hint=hint)
        yield Work(unfinished, threads, progress)
    finally:
        unfinished.close()


@contextmanager
def _translated(path: Path) -> Iterator[None]:
    """Turn what the system says into a MachineError, and say how to go on."""
    try:
        yield
    except OSError as error:
        raise write_failure(error, path, _hint(path)) from error
    except MoepackError as error:
        hint = _hint(path)
        if error.hint is None:
            error.hint = hint
        elif hint is not None and isinstance(error, MachineError):
            error.add_note(hint)
        raise
    except BaseException as error:
        if hint := _hint(path):
            error.add_note(hint)
        raise


def _hint(path: Path) -> str | None:
    """Say how to go on or back; None where nothing is left to do."""
    if not is_unfinished(path):
        return None
    forth, back = f"`moepack pack --in-place --resume -o {path}`", f"`moepack restore {path}`"
    try:
        unfinished = Unfinished(path)
    except (OSError, MoepackError):
        return f"go on with {forth}, or back with {back}; {_KEEP}"
    try:
        journal = unfinished.journal
        if journal.is_done and journal.goal is Goal.PACK:
            return f"the pack is whole; {forth} removes what is left of the shards"
        if journal.is_done:
            return f"the shards are where they belong; {back} removes what is left of the pack"
        is_whole = (path / manifest.NAME).exists() or not unfinished.holds_shards()
        if journal.beginning is None and is_whole:
            return "nothing was given up yet: run the same command again"
        return f"go on with {forth}, or back with {back}; {_KEEP}"
    finally:
        unfinished.close()
