"""Mirror a pack: copy experts to another drive, prove the copies, and only then link to them.

The order of events is the promise:

1. mirror.json is written with no ranges, unless the mirror that is there only lacks some;
2. experts are copied in the order of the files, synced, and read back past the page cache: each
   part has to have its digest;
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
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from moepack.common.digest_counts import DigestCounts
from moepack.common.errors import MoepackError, PackError, RequestError, write_failure
from moepack.common.phases import Progress
from moepack.common.sizes import Size
from moepack.pack.format import manifest
from moepack.pack.format.names import MIRROR_NAME
from moepack.pack.reading import mirror
from moepack.pack.reading.directory import pack_folder, read_manifest
from moepack.pack.reading.mirror import Description
from moepack.pack.reading.pack import Pack
from moepack.packing.copies.mirror_copy import MirrorCopy, expert_reads
from moepack.storage.atomic import make_folder, publish, sync_directory, write_synced
from moepack.storage.lock import locked_folder
from moepack.storage.ranges import RangeSet
from moepack.storage.space import check_space

_SUFFIX = ".mirror"
_PARTIAL_NAME = f"{mirror.NAME}.partial"


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
        opened.require_files()
        opened.require_complete()
        limit = None if hottest is None else opened.budget_length(hottest, "hottest")
        copy = MirrorCopy(opened, folder, limit)
        if not copy.experts:
            raise RequestError("no expert fits", path=path, expected="more bytes", found=hottest)
        _check_link(path, folder)
        description = Description(copy.content, os.path.realpath(path), limit, copy.ranges)
        try:
            make_folder(folder)
            with locked_folder(folder):
                _prepare(path, folder, copy, description)
                kept_length = copy.run(progress)
                _write(folder, description)
            _link(path, folder)
        except OSError as error:
            raise write_failure(error, folder, "run the same command again: it goes on") from error
        all_length = sum(one.length for one in expert_reads(opened, None))
    length = sum(one.length for one in copy.experts)
    return MirrorSummary(
        path=os.fspath(folder),
        pack=os.fspath(pack),
        expert_count=len(copy.experts),
        length=length,
        all_length=all_length,
        kept_length=kept_length,
        is_same_drive=os.stat(folder).st_dev == os.stat(path).st_dev,
        digests=DigestCounts(known_length=length, compared_length=copy.compared_length),
    )


def remove_mirror(pack: str | os.PathLike[str]) -> RemovedMirror:
    """Remove the mirror of a pack, and the link to it.

    If the drive is not there, or cannot be written to, the link alone is removed. Raises
    RequestError for a pack without a mirror, and while it is being made, MachineError.
    """
    path = Path(pack)
    folder = mirror.linked_folder(path)
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
    linked = mirror.linked_folder(pack)
    if linked is not None and not _is_same(linked, folder):
        hint = f"remove that first: `moepack mirror {pack} --remove`"
        raise RequestError("the pack has a mirror already", path=pack, found=linked, hint=hint)


def _is_same(first: str | os.PathLike[str], second: str | os.PathLike[str]) -> bool:
    return os.path.realpath(first) == os.path.realpath(second)


def _link(pack: Path, folder: Path) -> None:
    if mirror.linked_folder(pack) == folder:
        return
    partial = pack / f"{MIRROR_NAME}.partial"
    partial.unlink(missing_ok=True)
    os.symlink(folder, partial)
    os.replace(partial, pack / MIRROR_NAME)
    sync_directory(pack)


def _prepare(pack: Path, folder: Path, copy: MirrorCopy, description: Description) -> None:
    """Remove files that cannot be added to, and check that there is room for the rest."""
    old = _described(folder)
    _check_owner(pack, folder, old)
    if old is None and not (folder / mirror.NAME).exists():
        if set(os.listdir(folder)) - {_PARTIAL_NAME}:
            hint = "choose another target, or remove it"
            raise RequestError("exists already, and is not a mirror", path=folder, hint=hint)
        _write(folder, description, names=copy.ranges)
    elif old is None or not _is_within(old, copy):
        names = {*copy.ranges, *(old.ranges if old else ())}
        _write(folder, description, names=names)
        _remove(folder, names)
    # A run for more that did not end may have left files.
    _remove(folder, copy.file_lengths.keys() - copy.ranges.keys())
    check_space(folder, copy.length - copy.length_on_disk())


def _is_within(old: Description, copy: MirrorCopy) -> bool:
    """Return whether a mirror is one of this pack, and has nothing but the experts to copy."""
    return old.content == copy.content and all(
        RangeSet(copy.ranges.get(name, ())).covers(start, end)
        for name, ranges in old.ranges.items()
        for start, end in ranges
    )


def _described(folder: Path) -> Description | None:
    try:
        return mirror.load(folder)
    except PackError:
        return None


def _check_owner(pack: Path, folder: Path, description: Description | None) -> None:
    """Raise RequestError if a folder is the mirror of another pack, which links to it."""
    if description is None or description.pack == os.path.realpath(pack):
        return
    other = Path(description.pack)
    linked = mirror.linked_folder(other)
    if linked is not None and _is_same(linked, folder):
        hint = "choose another target"
        raise RequestError("the mirror of another pack", path=folder, found=other, hint=hint)


def _write(folder: Path, description: Description, names: Iterable[str] | None = None) -> None:
    """Write mirror.json; with `names` so that no reader looks for bytes in these files."""
    if names is not None:
        description = description._replace(ranges=dict.fromkeys(sorted(names), ()))
    partial = folder / _PARTIAL_NAME
    write_synced(partial, mirror.encode(description))
    publish(partial, folder / mirror.NAME)


def _remove_files(pack: Path, folder: Path) -> bool:
    """Remove the files of a mirror, its description last; return whether that is a mirror.

    Whoever made the pack may have let its link lead anywhere.
    """
    if not (folder.name.endswith(_SUFFIX) and folder.is_dir()):
        return False
    if not (folder / mirror.NAME).exists():
        with contextlib.suppress(OSError):  # left empty by a removal that was cut off
            folder.rmdir()
        return not folder.exists()
    description = _described(folder)
    try:
        _check_owner(pack, folder, description)
    except RequestError:
        return False
    names = set(description.ranges) if description else set()
    with contextlib.suppress(MoepackError):
        name = str(pack / manifest.NAME)
        names |= {file.name for file in manifest.decode(read_manifest(pack), name).files}
    with locked_folder(folder):
        if description is not None:
            _write(folder, description, names=names)
        _remove(folder, names)
        _remove(folder, [mirror.NAME, _PARTIAL_NAME])
    with contextlib.suppress(OSError):  # files that are not the mirror's stay
        folder.rmdir()
    sync_directory(folder.parent)
    return True


def _remove(folder: Path, names: Iterable[str]) -> None:
    for name in names:
        (folder / name).unlink(missing_ok=True)
    sync_directory(folder)
