"""The directory of a pack that is made of its shards in place, until it is done.

    model.moepack/
      experts-….bin     as far as they are written
      in-place/
        journal         the paths where the shards belong
        lock            empty: one process at a time
        manifest.json   what the pack will be, or was; and a copy of it
        index.bin       where every byte belongs, its digest with it; and a copy
        shard-00001-of-00006.moepack-source

The last are the shards themselves. They have holes, and programs load zeros without a word: so they
have a name that none loads, until they are whole again or gone.

The journal has nothing that a byte on the disk could contradict: which bytes are in the pack and
which in the shards is found out by their digests, every time that the work is taken up. A journal
that is damaged or lost therefore costs no more than the shards' paths.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from moepack.common.errors import MachineError, MoepackError, RequestError, write_failure
from moepack.common.pack_files import IN_PLACE_NAME, is_in_pack
from moepack.pack.format import manifest
from moepack.packing.in_place import draft as drafts
from moepack.packing.in_place.draft import Draft
from moepack.packing.in_place.refusals import check_open
from moepack.packing.writing.commit import TEMPORARY_NAME, commit, is_on_drive, write_proven
from moepack.packing.writing.lock_file import LockFile
from moepack.packing.writing.records import MAX_LENGTH, seal, unseal
from moepack.storage.atomic import make_folder, publish, sync_directory
from moepack.storage.regular_file import read_back
from moepack.version import TOOL

JOURNAL = "journal"
_LOCK = "lock"
_SHARD_SUFFIX = ".moepack-source"
_VERSION = 3

_KEEP = "do not remove the directory: it holds the model"


class Shard(NamedTuple):
    """A shard as it was: the path where it belongs, its length in bytes, and its mtime.

    `home` is None if it was lost, `mtime_ns` for a shard that is made from a pack.
    """

    home: str | None
    length: int
    mtime_ns: int | None


class Beginning(NamedTuple):
    """The content of a journal: `was_pack` if there was a pack at first, and no shards.

    `unit_length` is in bytes: pieces that are longer were cut there.
    """

    was_pack: bool
    unit_length: int
    shards: tuple[Shard, ...]


def _read_beginning(path: Path) -> Beginning | None:
    """Read a journal; None if it is damaged or missing. Raises MachineError, and OSError."""
    try:
        entry = unseal(read_back(path, MAX_LENGTH))
    except FileNotFoundError:
        return None
    if entry is None:
        return None
    try:
        if entry["version"] != _VERSION or int(entry["unit_length"]) <= 0:
            raise ValueError("unknown version")
        shards = tuple(Shard(*shard) for shard in entry["shards"])
        return Beginning(bool(entry["was_pack"]), int(entry["unit_length"]), shards)
    except (KeyError, TypeError, ValueError):
        hint = "continue with the version that began it; do not remove the directory"
        problem = "the journal was written by another version of moepack"
        raise MachineError(problem, path=path, hint=hint) from None


def is_unfinished(path: Path) -> bool:
    """Return whether in the directory `path` shards are being turned into a pack, or back."""
    return (path / IN_PLACE_NAME).is_dir()


def is_untouched(path: Path) -> bool:
    """Return whether all bytes of the model are elsewhere, or in a whole pack, by names alone.

    That is so if the pack is whole, or if there are no shards here and no data files.
    """
    if has_shards(path / IN_PLACE_NAME):
        return False
    names = set(os.listdir(path)) - {IN_PLACE_NAME, TEMPORARY_NAME}
    return manifest.NAME in names or not any(name.endswith(".bin") for name in names)


def is_whole_pack(path: Path) -> bool:
    """Return whether `path` is a whole pack, by names alone, with no more than leftovers in it."""
    return (path / manifest.NAME).exists() and is_untouched(path)


class Unfinished:
    """The directory `path`, locked until `close`.

    `beginning` is what its journal says, None for one that is damaged or missing.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.inner = path / IN_PLACE_NAME
        self.journal_path = self.inner / JOURNAL
        self._lock = LockFile(self.inner / _LOCK)
        try:
            self.beginning = _read_beginning(self.journal_path)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Release the lock."""
        self._lock.close()

    def begin(self, beginning: Beginning) -> None:
        """Write the journal, after which the work can be taken up by others."""
        shards = [list(shard) for shard in beginning.shards]
        entry = {"version": _VERSION, "tool": TOOL} | beginning._asdict() | {"shards": shards}
        partial = f"{JOURNAL}.partial"
        write_proven(self.inner, {partial: seal(entry)})
        publish(self.inner / partial, self.journal_path)
        self.sync()
        self.beginning = beginning

    def set_homes(self, homes: Sequence[str]) -> None:
        """Record where the shards belong from now on."""
        assert self.beginning is not None
        pairs = zip(self.beginning.shards, homes, strict=True)
        shards = tuple(shard._replace(home=home) for shard, home in pairs)
        if shards != self.beginning.shards:
            self.begin(self.beginning._replace(shards=shards))

    def sync(self) -> None:
        """Make all names in the directory, and its own, outlive a loss of power."""
        for folder in (self.inner, self.path, self.path.absolute().parent):
            sync_directory(folder)

    def _shard_paths(self, count: int) -> list[Path]:
        return [
            self.inner / f"shard-{number:05d}-of-{count:05d}{_SHARD_SUFFIX}"
            for number in range(1, count + 1)
        ]

    def find_shards(self, shards: Sequence[Shard]) -> tuple[list[Path | None], list[int]]:
        """Return the path of each shard, None for a missing one, and the numbers of those at home.

        A file at home is one of the right name and length: its bytes have to be checked.
        """
        paths: list[Path | None] = []
        at_home = []
        for number, inner in enumerate(self._shard_paths(len(shards))):
            home = shards[number].home
            if os.path.lexists(inner):
                paths.append(inner)
            elif home is not None and _is_file(home, shards[number].length):
                paths.append(Path(home))
                at_home.append(number)
            else:
                paths.append(None)
        return paths, at_home

    def take_shards(self, paths: Sequence[Path | None]) -> list[Path | None]:
        """Move shards here, and return their paths then.

        Raises RequestError if somebody else has one open; it names the shard as it was named.
        """
        inner_paths = self._shard_paths(len(paths))
        moved = [(path, inner) for path, inner in zip(paths, inner_paths, strict=True) if path]
        for path, inner in moved:
            if path != inner:
                os.rename(path, inner)
                sync_directory(path.parent)
        sync_directory(self.inner)
        for path, inner in moved:
            if refusal := check_open(inner):
                refusal.path = os.fspath(path)
                raise refusal
        return [inner if path else None for path, inner in zip(paths, inner_paths, strict=True)]

    def make_shards(
        self, paths: Sequence[Path | None], shards: Sequence[Shard]
    ) -> list[Path | None]:
        """Make those shards that are missing, without any bytes; return where all shards are."""
        inner_paths = self._shard_paths(len(shards))
        for path, inner, shard in zip(paths, inner_paths, shards, strict=True):
            if path is None:
                with open(inner, "xb") as file:
                    os.ftruncate(file.fileno(), shard.length)
                    os.fsync(file.fileno())
        sync_directory(self.inner)
        return list(inner_paths)

    def restore_names(self, shards: Sequence[Shard], homes: Sequence[str]) -> None:
        """Move the shards that are here, and whole again, to their homes."""
        for shard, home, path in zip(shards, homes, self._shard_paths(len(shards)), strict=True):
            if not path.exists():
                continue
            if shard.mtime_ns is not None:
                os.utime(path, ns=(shard.mtime_ns, shard.mtime_ns))
            os.rename(path, home)
        for folder in {self.inner, *(Path(home).parent for home in homes)}:
            sync_directory(folder)

    def commit(self, draft: Draft) -> None:
        """Make it a pack, if it is not one on the drive."""
        name = draft.manifest.index_entry.name
        has_manifest = is_on_drive(self.path / manifest.NAME, draft.manifest_bytes)
        if not (has_manifest and is_on_drive(self.path / name, draft.index_bytes)):
            commit(self.path, name, draft.index_bytes, draft.manifest_bytes)

    def withdraw(self, draft: Draft) -> None:
        """Undo the commit, before any byte of the pack is given up."""
        names = (manifest.NAME, draft.manifest.index_entry.name, TEMPORARY_NAME)
        self._remove(self.path / name for name in names)

    def remove_shards(self) -> None:
        """Remove the shards, once the pack is committed."""
        self._remove(path for path in self.inner.iterdir() if path.suffix == _SHARD_SUFFIX)

    def remove_data_files(self, draft: Draft) -> None:
        """Remove the data files, once the shards are whole and at home."""
        self._remove(self.path / file.name for file in draft.manifest.files)

    def clean_up(self) -> None:
        """Remove drafts and journal, which nothing needs any more, and directories if empty.

        The journal goes last: if there is a pack, that has what the drafts have.
        """
        assert not has_shards(self.inner)
        names = (*drafts.NAMES, f"{JOURNAL}.partial", JOURNAL)
        self._remove(self.inner / name for name in names)
        self._lock.remove()
        self.inner.rmdir()
        sync_directory(self.path)
        if not os.listdir(self.path):
            self.path.rmdir()
            sync_directory(self.path.absolute().parent)

    def _remove(self, paths: Iterable[Path]) -> None:
        for path in list(paths):
            path.unlink(missing_ok=True)
        sync_directory(self.inner)
        sync_directory(self.path)


@contextlib.contextmanager
def made(path: Path) -> Iterator[Unfinished]:
    """Make the directory of an unfinished pack, synced, and lock it for the block.

    If the block ends before it writes a journal, all that was made in the directory is removed.
    """
    path.mkdir(exist_ok=True)
    (path / IN_PLACE_NAME).mkdir(exist_ok=True)
    unfinished = Unfinished(path)
    unfinished.beginning = None  # of a run that was killed before it moved a shard
    try:
        unfinished.sync()
        yield unfinished
    except BaseException:
        if unfinished.beginning is None:
            with contextlib.suppress(OSError, MoepackError):
                unfinished.clean_up()
        raise
    finally:
        unfinished.close()


def has_shards(inner: Path) -> bool:
    """Return whether any shard is in the folder `inner` of an unfinished pack."""
    return any(name.endswith(_SHARD_SUFFIX) for name in os.listdir(inner))


def _is_file(path: str, length: int) -> bool:
    try:
        status = os.stat(path, follow_symlinks=False)
    except OSError:
        return False
    return stat.S_ISREG(status.st_mode) and status.st_size == length


def check_homes(
    homes: Sequence[str], beside: Path, force: bool, own: Collection[Path | None] = ()
) -> None:
    """Make the folders where shards belong, and check that they can be moved there.

    Raises RequestError if another file than one of `own` is there, or another file system.
    """
    for folder in {Path(home).parent for home in homes}:
        make_folder(folder)
        if folder.stat().st_dev != beside.stat().st_dev:
            problem = "on another file system: the shards cannot be moved there"
            raise RequestError(problem, path=folder, hint="choose a folder beside the pack")
    if len(set(homes)) != len(homes):
        problem = "two shards had the same name, in different folders"
        raise RequestError(problem, hint="leave out `target`: each goes back where it was")
    for home in map(Path, homes):
        if not os.path.lexists(home) or home in own:
            continue
        hint = "choose another place; `force` has no effect"
        if is_in_pack(home):
            raise RequestError("a file of a pack is never overwritten", path=home, hint=hint)
        if not stat.S_ISREG(os.stat(home, follow_symlinks=False).st_mode):
            raise RequestError("exists already, and is not a regular file", path=home, hint=hint)
        if not force:
            hint = "choose another place, or replace it with `force=True`"
            raise RequestError("exists already", path=home, hint=hint)


@contextlib.contextmanager
def translated(path: Path) -> Iterator[None]:
    """Turn OSError into MachineError, and add to each error how to go on."""
    try:
        yield
    except OSError as error:
        raise write_failure(error, path, _hint(path)) from error
    except BaseException as error:
        hint = _hint(path)
        if isinstance(error, MoepackError) and error.hint is None:
            error.hint = hint
        elif hint is not None:
            error.add_note(hint)
        raise


def _hint(path: Path) -> str | None:
    """Return how to go on or back; None if nothing is left to do."""
    if not is_unfinished(path):
        return None
    forth, back = f"`moepack pack --in-place --resume -o {path}`", f"`moepack restore {path}`"
    go_on = f"go on with {forth}, or back with {back}; {_KEEP}"
    try:
        unfinished = Unfinished(path)
    except (OSError, MoepackError):
        return go_on
    try:
        is_pack = (path / manifest.NAME).exists()
        if is_untouched(path) and not is_pack:
            return f"the shards are where they belong; {back} removes what is left of the pack"
        if unfinished.beginning is None:
            return (
                "the bytes tell where they belong: go on with"
                f" `moepack pack --in-place --resume --recover -o {path}`, or back with"
                f" `moepack restore {path} --recover -o FOLDER`; {_KEEP}"
            )
        if is_pack:
            return f"the pack is whole; {forth} removes what is left of the shards"
        return go_on
    finally:
        unfinished.close()
