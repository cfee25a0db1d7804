"""Mirror a pack: copy experts to another drive, prove the copies, and only then link to them.

The order of events is the promise:

1. mirror.json is written with no ranges, unless the mirror that is there only lacks some;
2. experts are copied in the order of the files, synced, and read back when they are dropped from
   the page cache: each part has to have its digest, both times;
3. mirror.json is written anew, with all ranges;
4. the pack gets its link.

Whatever ends it early leaves the mirror as it was before, and more bytes that nobody looks at; the
same command goes on from there, and keeps all bytes with the right digest. Bytes that a reader may
be looking at are never replaced by others: if some are not wanted any more, the files are made
anew.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from moepack.common.errors import MoepackError, PackError, RequestError, write_failure
from moepack.common.phases import DigestCounts, Phases, Progress
from moepack.common.sizes import Size, gaps
from moepack.pack.format import manifest
from moepack.pack.format.names import MIRROR_NAME
from moepack.pack.reading.copies import (
    MIRROR_RECORD,
    CopiedFile,
    CopyRecord,
    CopyRequest,
    linked_folder,
    load,
)
from moepack.pack.reading.directory import pack_folder, read_manifest
from moepack.pack.reading.pack import Pack
from moepack.packing.copies.packed_items import PackedItem, choose, ranges_of
from moepack.packing.copies.subset_copy import SubsetCopy, write_record
from moepack.storage import blocks
from moepack.storage.atomic import make_folder, sync_directory
from moepack.storage.extents import RangeSet
from moepack.storage.folders import locked_folder
from moepack.storage.regular_file import open_regular

_SUFFIX = ".mirror"
_TEMPORARY_NAME = f"{MIRROR_RECORD}.tmp"
_THREADS = 4


@dataclass(frozen=True, slots=True)
class MirrorSummary:
    """The mirror of a pack at `path`, with `expert_count` of its experts; lengths are bytes.

    `kept_length` was there already. `is_same_drive` if pack and mirror are on one file system, so
    that nothing is gained. `digests` counts what was read back.
    """

    path: str
    pack: str
    expert_count: int
    length: int
    all_length: int
    kept_length: int
    is_same_drive: bool
    digests: DigestCounts


@dataclass(frozen=True, slots=True)
class RemovedMirror:
    """A mirror that a pack had; `is_removed` is false if its files could not be removed as well."""

    path: str
    pack: str
    is_removed: bool


def mirror_pack(
    pack: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    hottest: Size | None = None,
    progress: Progress | None = None,
) -> MirrorSummary:
    """Put a verified copy of a pack's experts into a folder in `target`; readers then use both.

    `target` is a folder on another drive. With `hottest`, only the hottest experts are copied, up
    to this size: bytes, `8GiB`, or `25%` of the experts. Existing copies are kept. `progress` is
    called with the bytes done since its last call, and those to do in all.

    Raises PackError for a pack that is damaged or has no digests, RequestError if the pack has
    another mirror or the folder is not this pack's, MachineError for a machine that fails.
    """
    path = pack_folder(pack)
    parent = Path(os.path.abspath(target))
    if not parent.is_dir():
        raise RequestError("no such folder", path=target, hint="name a folder on the other drive")
    folder = parent / (Path(os.path.abspath(path)).name + _SUFFIX)
    with Pack(path) as opened:
        copy = SubsetCopy(opened, folder)
        items = copy.items
        chosen, record = _choose(opened, items, hottest)
        _check_link(path, folder)
        try:
            make_folder(folder)
            with locked_folder(folder):
                _prepare(path, folder, {one.name: one.length for one in opened.index.files}, record)
                kept_length = _fill(chosen, copy, Phases(progress))
                _write(folder, record)
            _link(path, folder)
        except OSError as error:
            raise write_failure(error, folder, "run the same command again: it goes on") from error
    return MirrorSummary(
        path=os.fspath(folder),
        pack=os.fspath(pack),
        expert_count=len({items[number].key for number in chosen}),
        length=copy.length(chosen),
        all_length=sum(item.length for item in items if item.key is not None),
        kept_length=kept_length,
        is_same_drive=os.stat(folder).st_dev == os.stat(path).st_dev,
        digests=copy.digest_counts(chosen),
    )


def _choose(
    pack: Pack, items: Sequence[PackedItem], hottest: Size | None
) -> tuple[set[int], CopyRecord]:
    """Return the numbers of the items to copy, and the record of the mirror."""
    pack.require_files()
    pack.require_complete()
    limit = 0 if hottest is None else pack.budget_length(hottest, "hottest")
    request = CopyRequest(is_all=hottest is None, hottest=limit)
    chosen = choose(pack, items, request)
    if not chosen:
        raise RequestError("no expert fits", path=pack.path, expected="more bytes", found=hottest)
    if not all(pack.index.files[items[number].file].has_digests for number in chosen):
        hint = "make the index anew, with digests: `moepack index --digests`"
        raise PackError("has no digests to check a mirror by", path=pack.path, hint=hint)
    ranges = ranges_of(pack.index, items, chosen)
    files = {name: CopiedFile(0, ranges[name]) for name in sorted(ranges)}
    path = os.path.realpath(pack.path)
    return chosen, CopyRecord(path, pack.index.content_digest(), request, files)


def _fill(chosen: set[int], copy: SubsetCopy, phases: Phases) -> int:
    """Copy the chosen items that are missing or wrong; return the bytes of the others.

    Raises PackError for items that are damaged in the pack, MachineError for a drive that does not
    give back the written bytes, and OSError.
    """
    numbers = sorted({copy.items[number].file for number in chosen})
    copy.drop_cached(numbers)
    copy.find(chosen, _THREADS, phases.begin(later=copy.part_length(chosen)))
    kept_length = copy.length(copy.here)
    missing = chosen - copy.here
    copy.find_wrong_padding()
    copy.fetch(missing, numbers, _THREADS, phases.begin(later=copy.part_length(missing)))
    copy.prove(missing, _THREADS, phases.begin())
    return kept_length


def remove_mirror(pack: str | os.PathLike[str]) -> RemovedMirror:
    """Remove the mirror of a pack, and the link to it.

    If the drive is not there, or cannot be written to, the link alone is removed. Raises
    RequestError for a pack without a mirror, and while it is being made, MachineError.
    """
    path = Path(pack)
    folder = linked_folder(path)
    if folder is None:
        read_manifest(path)  # which raises a better error if it is no pack
        raise RequestError("the pack has no mirror", path=path)
    try:
        is_removed = _remove_files(path, folder)
    except OSError:
        is_removed = False
    try:
        os.unlink(path / MIRROR_NAME)
        sync_directory(path)
    except OSError as error:
        raise write_failure(error, path) from error
    return RemovedMirror(os.fspath(folder), os.fspath(pack), is_removed)


def _check_link(pack: Path, folder: Path) -> None:
    """Raise RequestError if the pack's link leads elsewhere, or is something else."""
    link = pack / MIRROR_NAME
    if os.path.lexists(link) and not link.is_symlink():
        raise RequestError("has the name of a mirror's link, but is not one", path=link)
    linked = linked_folder(pack)
    if linked is not None and os.path.realpath(linked) != os.path.realpath(folder):
        hint = f"remove that first: `moepack mirror {pack} --remove`"
        raise RequestError("the pack has a mirror already", path=pack, found=linked, hint=hint)


def _link(pack: Path, folder: Path) -> None:
    if linked_folder(pack) == folder:
        return
    partial = pack / f"{MIRROR_NAME}.partial"
    partial.unlink(missing_ok=True)
    os.symlink(folder, partial)
    os.replace(partial, pack / MIRROR_NAME)
    sync_directory(pack)


def _prepare(pack: Path, folder: Path, lengths: Mapping[str, int], record: CopyRecord) -> None:
    """Remove files and bytes that are not to be in a mirror, as far as no reader looks at them."""
    old = _record_in(folder)
    _check_owner(pack, folder, old)
    if old is None and not (folder / MIRROR_RECORD).exists():
        if set(os.listdir(folder)) - {_TEMPORARY_NAME}:
            hint = "choose another target, or remove it"
            raise RequestError("exists already, and is not a mirror", path=folder, hint=hint)
        _write(folder, record, names=record.files)
    elif old is None or not _is_within(old, record):
        names = {*record.files, *(old.files if old else ())}
        _write(folder, record, names=names)
        _remove(folder, names)
    # A run for more that did not end may have left files, and bytes in them.
    _remove(folder, lengths.keys() - record.files.keys())
    for name, file in record.files.items():
        with contextlib.suppress(OSError):  # they take room, and nobody reads them
            descriptor = open_regular(folder / name, os.O_RDWR | os.O_NOFOLLOW)
            with open(descriptor, "rb+", buffering=0):
                for start, end in gaps(0, lengths[name], file.ranges):
                    blocks.punch(descriptor, start, end - start)


def _is_within(old: CopyRecord, new: CopyRecord) -> bool:
    """Return whether a mirror is one of the same pack, and has nothing but what is to be there."""
    return old.pack_digest == new.pack_digest and all(
        RangeSet(new.ranges(name)).covers(start, end)
        for name, file in old.files.items()
        for start, end in file.ranges
    )


def _record_in(folder: Path) -> CopyRecord | None:
    try:
        return load(folder / MIRROR_RECORD)
    except PackError:
        return None


def _check_owner(pack: Path, folder: Path, record: CopyRecord | None) -> None:
    """Raise RequestError if a folder is the mirror of another pack, which links to it."""
    if record is None or record.origin == os.path.realpath(pack):
        return
    other = Path(record.origin)
    linked = linked_folder(other)
    if linked is not None and os.path.realpath(linked) == os.path.realpath(folder):
        hint = "choose another target"
        raise RequestError("the mirror of another pack", path=folder, found=other, hint=hint)


def _write(folder: Path, record: CopyRecord, names: Iterable[str] | None = None) -> None:
    """Write mirror.json; with `names` so that no reader looks for bytes in these files."""
    if names is not None:
        record = record._replace(files=dict.fromkeys(sorted(names), CopiedFile(0, ())))
    write_record(folder / MIRROR_RECORD, record)


def _remove_files(pack: Path, folder: Path) -> bool:
    """Remove the files of a mirror, its record last; return whether that is a mirror.

    Whoever made the pack may have let its link lead anywhere.
    """
    if not (folder.name.endswith(_SUFFIX) and folder.is_dir()):
        return False
    if not (folder / MIRROR_RECORD).exists():
        with contextlib.suppress(OSError):  # left empty by a removal that was cut off
            folder.rmdir()
        return not folder.exists()
    record = _record_in(folder)
    try:
        _check_owner(pack, folder, record)
    except RequestError:
        return False
    names = set(record.files) if record else set()
    with contextlib.suppress(MoepackError):
        name = str(pack / manifest.NAME)
        names |= {file.name for file in manifest.decode(read_manifest(pack), name).files}
    with locked_folder(folder):
        if record is not None:
            _write(folder, record, names=names)
        _remove(folder, names)
        _remove(folder, [MIRROR_RECORD, _TEMPORARY_NAME])
    with contextlib.suppress(OSError):  # files that are not the mirror's stay
        folder.rmdir()
    sync_directory(folder.parent)
    return True


def _remove(folder: Path, names: Iterable[str]) -> None:
    for name in names:
        (folder / name).unlink(missing_ok=True)
    sync_directory(folder)
