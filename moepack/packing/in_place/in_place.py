"""Turn shards into a pack in place, and back: every byte is on the disk at any moment.

The order of events is the promise. `conversion` does it for each unit; around it:

1. all of the shards is read twice, past the page cache: the digests of all pieces are known, and
   were found the same, before anything is touched;
2. `in-place/` gets the draft of the pack, which is the finished index and manifest, twice, and the
   journal, all synced;
3. the shards are renamed into it, under names that no program loads; both directories are synced;
4. the units are moved;
5. index and manifest are committed, as `commit` does: they are read back before the rename;
6. what is left of the shards is removed, and drafts and journal.

Going back is the same from the other end: the manifest is removed, so that nothing opens the pack;
units are moved back; the shards get their names; the rest is removed. From any moment either way
can be taken: all that it takes is in the directory itself, neither the model's name nor its layout
nor its hotness. Whoever takes the work up first reads all of the model, and finds each piece in the
pack or in the shards by its digest; no journal is believed to say where bytes are.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from moepack.common import digest
from moepack.common.errors import MachineError, MoepackError, PackError, RequestError, SourceError
from moepack.common.pack_files import IN_PLACE_NAME
from moepack.common.paths import PathOrPaths, path_list
from moepack.common.phases import DigestCounts, Phases, Progress, advancing
from moepack.pack.format import manifest, records
from moepack.pack.format.names import MIRROR_NAME
from moepack.pack.format.source_entry import ShardEntry
from moepack.pack.format.tables import DataFile
from moepack.pack.reading.directory import read_manifest
from moepack.pack.reading.pack import Pack
from moepack.pack.reading.shard_map import map_shards
from moepack.pack.verifying.verifier import verify
from moepack.packing.in_place import draft as drafts
from moepack.packing.in_place import refusals as reasons
from moepack.packing.in_place.conversion import PieceLocations, PieceSearch
from moepack.packing.in_place.draft import Draft
from moepack.packing.in_place.unfinished import (
    Beginning,
    Shard,
    Unfinished,
    check_homes,
    has_shards,
    is_unfinished,
    is_untouched,
    is_whole_pack,
    made,
    translated,
)
from moepack.packing.in_place.unit_files import PackFiles, ShardFiles
from moepack.packing.in_place.units import Piece, PieceKey, Units, unit_length
from moepack.packing.in_place.work import InPlaceWork, margin
from moepack.packing.plan.pack_summary import InPlaceFacts, WrittenFiles
from moepack.packing.writing.planned_pack import PlannedPack
from moepack.packing.writing.target import OwnFolder, check_existing
from moepack.source.gguf_header import GgufHeader
from moepack.storage import blocks
from moepack.storage.extents import FinishedFile
from moepack.storage.folders import check_space, shortage
from moepack.storage.regular_file import FileStamp, read_back


def examine(
    planned: PlannedPack, target: str | os.PathLike[str]
) -> tuple[InPlaceFacts, list[MoepackError]]:
    """Return the needs of packing in place, and all reasons against it; touches nothing."""
    path, paths = Path(target), [Path(header.path) for header in planned.source.shards]
    draft = _draft(path, planned, {})
    instead = "pack without `in_place`, or copy the model first"
    refusals: list[MoepackError] = []
    if path.exists() and not _is_barely_begun(path):
        try:
            check_existing(OwnFolder(path), resume=False)
        except MoepackError as error:
            refusals.append(error)
    refusals = refusals or list(reasons.refusals(paths, path, instead))
    units = _units(draft)
    needs = units.space_needs(blocks.block_length(paths[0]), blocks.extent_length(paths[0]))
    extra = needs.to_pack(0) + margin(units, draft.index)
    if refusal := shortage(path, extra):
        refusals.append(refusal)
    facts = InPlaceFacts(
        shards=tuple(DataFile(header.path, header.file_length) for header in planned.source.shards),
        unit_count=len(units.units),
        unit_length=max(unit.end - unit.start for unit in units.units),
        extra_length=extra,
        refusals=tuple(map(str, refusals)),
    )
    return facts, refusals


def _is_barely_begun(path: Path) -> bool:
    """Return whether a packer was killed in `path` before it moved a shard."""
    if not path.is_dir() or os.listdir(path) != [IN_PLACE_NAME]:
        return False
    return is_unfinished(path) and not has_shards(path / IN_PLACE_NAME)


def pack_in_place(
    planned: PlannedPack,
    target: str | os.PathLike[str],
    *,
    threads: int,
    progress: Progress | None = None,
) -> WrittenFiles:
    """Turn the shards of a planned pack into it, in the directory `target`.

    `examine` found no reason against it. Raises SourceError or MachineError for failures; if no
    byte of the shards was given up yet, they are put back.
    """
    path, phases = Path(target), Phases(progress)
    with translated(path), made(path) as unfinished:
        draft, locations = _read_shards(path, planned, threads, phases)
        shards = []
        for header in planned.source.shards:
            status = os.stat(header.path)
            shards.append(Shard(os.path.abspath(header.path), status.st_size, status.st_mtime_ns))
        drafts.write(unfinished.inner, draft)
        unfinished.begin(Beginning(False, unit_length(draft.index), tuple(shards)))
        work = InPlaceWork(unfinished, draft, threads, phases)
        with work.undone_on_failure():
            work.pack(locations)
    return WrittenFiles(planned.plan.data_length, 0)


def _read_shards(
    path: Path, planned: PlannedPack, threads: int, phases: Phases
) -> tuple[Draft, PieceLocations]:
    """Read all of the shards; return the draft of the pack at `path`, with all digests."""
    headers = planned.source.shards
    units = _units(_draft(path, planned, {}))
    length = sum(piece.length for piece in units.pieces)
    advanced = advancing(phases.begin(later=length), 2 * length)  # then they are moved
    shards = ShardFiles([Path(header.path) for header in headers])
    no_pack = PackFiles([None] * len(planned.files))
    pieces = [piece._replace(digest=None) for piece in units.pieces]
    pieces.sort(key=lambda piece: (piece.shard, piece.shard_offset))
    try:
        shards.open_all()
        search = PieceSearch(units, no_pack, shards, pack_first=False)
        locations = search.run(pieces, threads, advanced)
        shards.drop_cached()
        _check_same(pieces, headers, locations, search.run(pieces, threads, advanced))
        shards.drop_cached()
    finally:
        shards.close()
    for header in headers:
        if FileStamp.from_stat(os.stat(header.path)) != header.stamp:
            hint = "pack again once nothing else writes to it"
            raise SourceError("the shard changed meanwhile", path=header.path, hint=hint)
    return _draft(path, planned, locations.digests | locations.uncut), locations


def _check_same(
    pieces: Sequence[Piece],
    headers: Sequence[GgufHeader],
    first: PieceLocations,
    second: PieceLocations,
) -> None:
    """Raise MachineError if two reads differ: by a wrong digest no piece would be found again."""
    for piece in pieces:
        digests = [one.uncut.get(piece.key, one.digests[piece.key]) for one in (first, second)]
        if digests[0] != digests[1]:
            raise MachineError(
                "two reads of it differ",
                path=headers[piece.shard].path,
                place=f"{piece.label} at byte {piece.shard_offset:,}",
                expected=digest.to_text(digests[0]),
                found=digest.to_text(digests[1]),
                hint="the drive or the memory fails: check both before you pack in place",
            )


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
    them. Returns how many bytes were moved.
    """
    path = Path(target)

    def homes(names: Sequence[str]) -> list[str | None]:
        by_name = {}
        for given_path in map(Path, [] if shard_paths is None else path_list(shard_paths)):
            for shard in given_path.iterdir() if given_path.is_dir() else [given_path]:
                by_name[shard.name] = os.path.abspath(shard)
        return [by_name.get(name) for name in names]

    with translated(path):
        if settle(path, threads, progress):
            if (path / manifest.NAME).exists():
                return 0
            raise RequestError("the shards are already where they belong", path=path)
        with _opened(path, threads, progress, homes if recover else None) as work:
            return work.pack(work.locate(pack_first=True))


def restore_in_place(
    target: str | os.PathLike[str],
    folder: str | os.PathLike[str] | None = None,
    *,
    force: bool = False,
    recover: bool = False,
    threads: int,
    progress: Progress | None = None,
) -> tuple[dict[str, ShardEntry], int, DigestCounts]:
    """Turn the pack in `target`, finished or not, back into its shards; it is gone then.

    They go into `folder`; by default to where they came from, or where an interrupted run was to
    bring them. All of the model is read before anything is changed. With `recover` a journal that
    is damaged or lost is made anew; then `folder` is where shards are that are not in the
    directory. Returns the shards by their paths, how many bytes were moved, and how many compared.

    Raises RequestError if they cannot go there, before anything is touched, PackError for a pack
    that is not whole or is damaged, MachineError for a machine that fails.
    """
    path, shard_folder = Path(target), None if folder is None else Path(folder)

    def homes(names: Sequence[str]) -> list[str]:
        if shard_folder is None:
            problem = "no folder was given for the shards"
            raise RequestError(problem, hint="name one with `target`: where they were, if known")
        return [os.path.abspath(shard_folder / name) for name in names]

    with translated(path):
        if not is_unfinished(path):
            assert shard_folder is not None
            return _restore_whole(path, shard_folder, force, threads, progress)
        # A run that was killed before it began its journal left a whole pack.
        can_begin = recover or (shard_folder is not None and is_whole_pack(path))
        with _opened(path, threads, progress, homes if can_begin else None) as work:
            return work.restore(work.locate(pack_first=False), shard_folder, force)


def _restore_whole(
    path: Path, folder: Path, force: bool, threads: int, progress: Progress | None
) -> tuple[dict[str, ShardEntry], int, DigestCounts]:
    """Turn a whole pack into its shards."""
    draft = _check_whole_pack(path)
    entries = draft.manifest.source.shards
    homes = [os.path.abspath(folder / entry.name) for entry in entries]
    check_homes(homes, path, force)
    with made(path) as unfinished:
        drafts.write(unfinished.inner, draft)
        unfinished.begin(_beginning_at(homes, draft))
        work = InPlaceWork(unfinished, draft, threads, Phases(progress))
        with work.undone_on_failure():
            return work.restore(work.locate(pack_first=False), folder, force)


def _check_whole_pack(path: Path) -> Draft:
    """Return the draft of a whole pack; raise MoepackError if it cannot be restored in place."""
    instead = "restore without `in_place`"
    with Pack(path) as pack:
        pack.require_complete()
        if os.path.lexists(path / MIRROR_NAME):
            hint = f"remove it first: `moepack mirror {path} --remove`"
            raise RequestError("has a mirror, which stays behind", path=path, hint=hint)
        map_shards(pack)
        files, index_path = pack.file_paths, path / pack.manifest.index_entry.name
    for refusal in reasons.refusals(files, path, instead):
        raise refusal
    if reader := reasons.check_open(index_path):
        raise reader
    index_bytes = read_back(index_path, records.MAX_INDEX_LENGTH)
    draft = drafts.decode(path, read_manifest(path), index_bytes)
    units, block = _units(draft), blocks.block_length(path)
    needs = units.space_needs(block).to_restore(len(units.units)) + units.absent_length(block)
    needs += blocks.extent_length(path) + margin(units, draft.index)
    check_space(path, needs)
    return draft


def _draft(path: Path, planned: PlannedPack, digests: Mapping[PieceKey, int]) -> Draft:
    """Return the draft of a pack; all digests that are not in `digests` are 0."""
    files = {}
    for number, file in enumerate(planned.files.values()):
        in_order = (
            digests.get((number, extent.offset), 0) if extent.length else digest.xxh3(b"")
            for extent in file.extents()
        )
        files[file.name] = FinishedFile(file.name, array("Q", in_order))
    index, described = planned.encode(files)
    return drafts.decode(path, described, index)


def _beginning_at(homes: Sequence[str | None], draft: Draft) -> Beginning:
    """Return the beginning of a pack that goes back, with its shards at `homes`."""
    pairs = zip(homes, draft.manifest.source.shards, strict=True)
    shards = tuple(Shard(home, entry.length, None) for home, entry in pairs)
    return Beginning(True, unit_length(draft.index), shards)


def _units(draft: Draft) -> Units:
    lengths = [file.length for file in draft.index.files]
    return Units(map_shards(draft), lengths, unit_length(draft.index))


@contextmanager
def _opened(
    path: Path,
    threads: int,
    progress: Progress | None,
    recover: Callable[[Sequence[str]], Sequence[str | None]] | None,
) -> Iterator[InPlaceWork]:
    """Open the work that was begun in `path`.

    `recover` returns the homes of shards by their names, for a journal that has lost them; without
    it such a journal is refused.
    """
    if not is_unfinished(path):
        raise RequestError("no run in place was begun here", path=path)
    unfinished = Unfinished(path)
    try:
        if unfinished.beginning is None and recover is None:
            raise MachineError("the journal is damaged", path=unfinished.journal_path)
        draft = _read_draft(unfinished)
        if unfinished.beginning is None:
            assert recover is not None
            names = [entry.name for entry in draft.manifest.source.shards]
            unfinished.begin(_beginning_at(recover(names), draft))
        yield InPlaceWork(unfinished, draft, threads, Phases(progress))
    finally:
        unfinished.close()


def settle(path: Path, threads: int, progress: Progress | None = None) -> bool:
    """Remove leftovers beside a whole pack or whole shards; return whether they were whole.

    A run that ended between its last byte and its last step leaves them: drafts and journal are of
    no more use then, unless the pack was damaged since, or is to go back.

    No byte of the model is touched. A pack is read before; raises PackError if it is damaged, and
    leaves everything there.
    """
    if not is_unfinished(path):
        return False
    unfinished = Unfinished(path)
    try:
        if not is_untouched(path):
            return False
        if (path / manifest.NAME).exists():
            _require_sound(unfinished, threads, progress)
        unfinished.clean_up()
        return True
    finally:
        unfinished.close()


def _require_sound(unfinished: Unfinished, threads: int, progress: Progress | None) -> None:
    """Read a whole pack; write a damaged manifest or index anew, which its drafts have."""
    path, phases = unfinished.path, Phases(progress)
    report = verify(path, threads=threads, progress=phases.begin())
    if any(finding.kind in ("manifest", "index") for finding in report.findings):
        unfinished.commit(drafts.read(unfinished.inner, path))
        report = verify(path, threads=threads, progress=phases.begin())
    if not report.passed:
        first = report.findings[0]
        raise PackError(
            f"the pack is damaged: {report.headline or first.message}",
            path=path,
            place=first.place or None,
            hint=f"nothing was removed; `moepack verify {path}` names all of the damage",
        )


def _read_draft(unfinished: Unfinished) -> Draft:
    """Return the draft; that of a whole pack is in the pack, too. Raises PackError."""
    path = unfinished.path
    try:
        return drafts.read(unfinished.inner, path)
    except PackError:
        if not is_whole_pack(path):
            raise
    with Pack(path) as pack:
        return drafts.decode(path, pack.manifest_bytes, pack.index_bytes)
