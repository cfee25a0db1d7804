"""Mirror a pack: copy experts to another drive, prove the copies, and only then link to them.

The order of events is the promise:

1. mirror.json is written with no ranges, unless the mirror that is there only lacks some;
2. experts are copied in the order of the files, synced, and read back past the page cache: each
   part has to have its digest;
3. mirror.json is written anew, with all ranges;
4. the pack gets its link.

Whatever ends it early leaves what was mirrored before, and more bytes that nobody looks at; the
same command goes on from there, and keeps what has its digest. Bytes that a reader may be looking
at are never replaced by others: if some are not wanted any more, the files are made anew.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from moepack.errors import MoepackError, PackError, RequestError, write_failure
from moepack.format import manifest
from moepack.format.names import MIRROR_NAME
from moepack.packing.mirror_copy import MirrorCopy, expert_reads
from moepack.reading import mirror
from moepack.reading.directory import read_manifest
from moepack.reading.mirror import Coverage, Description
from moepack.reading.pack import Pack
from moepack.sizes import Size
from moepack.storage.atomic import make_folder, publish, sync_directory, write_synced
from moepack.storage.lock import lock
from moepack.storage.space import check_space

SUFFIX = ".mirror"
_PARTIAL_NAME = f"{mirror.NAME}.partial"

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class MirrorSummary:
    """A mirror: where it is, and what of the pack's experts is there; lengths are bytes.

    `kept_length` was there already. `is_same_drive` says that pack and mirror are on one file
    system, where nothing is gained.
    """

    path: str
    pack: str
    expert_count: int
    length: int
    all_length: int
    kept_length: int
    is_same_drive: bool


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
    to so many bytes, `8GiB` or `25%` of the experts. What is there already is kept. `progress` is
    called with the bytes done since its last call, and those to do in all.

    Raises PackError for a pack that is damaged or has no digests, RequestError where the pack has
    another mirror or the folder is not this pack's, MachineError for a machine that fails.
    """
    path = Path(pack)
    parent = Path(os.path.abspath(target))
    if not parent.is_dir():
        raise RequestError("no such folder", path=target, hint="name a folder on the other drive")
    folder = parent / (Path(os.path.abspath(path)).name + SUFFIX)
    with Pack(path) as opened:
        length = None if hottest is None else opened.budget_length(hottest, "hottest")
        copy = MirrorCopy(opened, folder, length)
        if not copy.experts:
            raise RequestError("no expert fits", path=path, expected="more bytes", found=hottest)
        _check_link(path, folder)
        try:
            with _locked(folder):
                _prepare(path, folder, copy, length)
                kept_length = copy.run(progress)
                _write(folder, copy.description(_name_of(path), length))
            _link(path, folder)
        except OSError as error:
            raise write_failure(error, folder, "run the same command again: it goes on") from error
        all_length = sum(one.length for one in expert_reads(opened, None))
    return MirrorSummary(
        path=os.fspath(folder),
        pack=os.fspath(pack),
        expert_count=len(copy.experts),
        length=sum(one.length for one in copy.experts),
        all_length=all_length,
        kept_length=kept_length,
        is_same_drive=os.stat(folder).st_dev == os.stat(path).st_dev,
    )


def remove_mirror(pack: str | os.PathLike[str]) -> RemovedMirror:
    """Remove the mirror of a pack, and the link to it.

    Where the drive is not there, or cannot be written to, the link alone is removed. Raises
    RequestError for a pack without a mirror, and where it is being made, MachineError.
    """
    path = Path(pack)
    folder = mirror.linked_folder(path)
    if folder is None:
        read_manifest(path)  # which says what it is if it is no pack
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


def _name_of(pack: Path) -> str:
    return os.path.realpath(pack)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Have a folder, made if need be, to oneself. Raises RequestError where another has it."""
    make_folder(folder)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        lock(descriptor, folder)
        yield
    finally:
        os.close(descriptor)


def _check_link(pack: Path, folder: Path) -> None:
    """Raise RequestError where the pack's link leads elsewhere, or is something else."""
    link = pack / MIRROR_NAME
    if os.path.lexists(link) and not link.is_symlink():
        raise RequestError("has the name of a mirror's link, and is none", path=link)
    linked = mirror.linked_folder(pack)
    if linked is not None and os.path.realpath(linked) != os.path.realpath(folder):
        hint = f"remove that first: `moepack mirror {pack} --remove`"
        raise RequestError("the pack has a mirror already", path=pack, found=linked, hint=hint)


def _link(pack: Path, folder: Path) -> None:
    link, partial = pack / MIRROR_NAME, pack / f"{MIRROR_NAME}.partial"
    if mirror.linked_folder(pack) == folder:
        return
    with contextlib.suppress(FileNotFoundError):
        os.unlink(partial)
    os.symlink(folder, partial)
    os.replace(partial, link)
    sync_directory(pack)


def _prepare(pack: Path, folder: Path, copy: MirrorCopy, hottest: int | None) -> None:
    """Remove what is not to be added to, and see that there is room for the rest."""
    old = _described(folder)
    _check_owner(pack, folder, old)
    empty = copy.description(_name_of(pack), hottest, is_empty=True)
    if old is None and not (folder / mirror.NAME).exists():
        if set(os.listdir(folder)) - {_PARTIAL_NAME}:
            hint = "choose another target, or remove it"
            raise RequestError("exists already, and is no mirror", path=folder, hint=hint)
        _write(folder, empty)
    elif old is None or not _is_within(old, copy):
        names = {*empty.ranges, *(old.ranges if old else ())}
        _write(folder, empty._replace(ranges=dict.fromkeys(sorted(names), ())))
        _remove(folder, names)
    _remove(folder, copy.file_names - copy.ranges.keys())  # of a run for more that did not end
    check_space(folder, copy.length - copy.length_on_disk())


def _is_within(old: Description, copy: MirrorCopy) -> bool:
    """Return whether a mirror is one of this pack, and holds nothing but what is wanted."""
    return old.content == copy.content and all(
        Coverage(copy.ranges.get(name, ())).holds(start, end)
        for name, ranges in old.ranges.items()
        for start, end in ranges
    )


def _described(folder: Path) -> Description | None:
    try:
        return mirror.load(folder)
    except PackError:
        return None


def _check_owner(pack: Path, folder: Path, description: Description | None) -> None:
    """Raise RequestError where a folder is the mirror of another pack, which links to it."""
    if description is None or description.pack == _name_of(pack):
        return
    other = Path(description.pack)
    linked = mirror.linked_folder(other)
    if linked is not None and os.path.realpath(linked) == os.path.realpath(folder):
        hint = "choose another target"
        raise RequestError("the mirror of another pack", path=folder, found=other, hint=hint)


def _write(folder: Path, description: Description) -> None:
    partial = folder / _PARTIAL_NAME
    write_synced(partial, mirror.encode(description))
    publish(partial, folder / mirror.NAME)


def _remove_files(pack: Path, folder: Path) -> bool:
    """Remove the files of a mirror, its description last; say whether that is a mirror.

    Whoever made the pack may have let its link lead anywhere.
    """
    if not (folder.name.endswith(SUFFIX) and folder.is_dir()):
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
    with _locked(folder):
        if description is not None:  # from now on nobody looks for the files
            _write(folder, description._replace(ranges=dict.fromkeys(sorted(names), ())))
        _remove(folder, names)
        _remove(folder, [mirror.NAME, _PARTIAL_NAME])
    with contextlib.suppress(OSError):  # what is not of the mirror stays
        folder.rmdir()
    sync_directory(folder.parent)
    return True


def _remove(folder: Path, names: Iterable[str]) -> None:
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(folder / name)
    sync_directory(folder)
