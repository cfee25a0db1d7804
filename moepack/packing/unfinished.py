"""The directory of a pack that is made of its shards in place, and what is in it until it is done.

    model.moepack/
      experts-….bin     as far as they are written
      in-place/
        journal         where the shards belong; the lock as well
        manifest.json   what the pack will be, or was; and a copy of it
        index.bin       where every byte belongs, its digest with it; and a copy
        shard-00001-of-00006.moepack-source

The last are the shards themselves. They have holes, and programs load zeros without a word: so they
have a name that none loads, until they are whole again or gone.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from moepack.errors import MachineError, RequestError
from moepack.format import manifest
from moepack.format.names import IN_PLACE_NAME
from moepack.packing import in_place_draft
from moepack.packing.in_place_draft import Draft
from moepack.packing.in_place_journal import InPlaceJournal, Shard
from moepack.packing.in_place_refusals import check_open
from moepack.packing.line_log import open_log
from moepack.storage.atomic import make_folder, sync_directory, write_synced
from moepack.storage.pack_files import is_in_pack

JOURNAL_NAME = "journal"
SHARD_SUFFIX = ".moepack-source"
MANIFEST_DRAFT = f"{manifest.NAME}.tmp"


def is_unfinished(path: Path) -> bool:
    """Return whether in the directory `path` shards are being turned into a pack, or back."""
    return (path / IN_PLACE_NAME).is_dir()


class Unfinished:
    """The directory `path`, locked until `close`. Its journal may be empty."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.inner = path / IN_PLACE_NAME
        self.journal = InPlaceJournal(open_log(self.inner / JOURNAL_NAME))

    def close(self) -> None:
        """Give up the lock."""
        self.journal.close()

    def sync(self) -> None:
        """Make all names in the directory, and its own, outlive a loss of power."""
        for folder in (self.inner, self.path, self.path.absolute().parent):
            sync_directory(folder)

    @property
    def has_shards(self) -> bool:
        """Whether any shard is here."""
        return has_shards(self.inner)

    @property
    def is_untouched(self) -> bool:
        """Whether no byte of the model is in the pack or here alone, whatever the journal says.

        That is so if the pack is whole, or if there are no shards here and no data files.
        """
        if self.has_shards:
            return False
        names = set(os.listdir(self.path)) - {IN_PLACE_NAME, MANIFEST_DRAFT}
        return manifest.NAME in names or not any(name.endswith(".bin") for name in names)

    def shard_paths(self, count: int) -> list[Path]:
        """Name the shards as no program does."""
        return [
            self.inner / f"shard-{number:05d}-of-{count:05d}{SHARD_SUFFIX}"
            for number in range(1, count + 1)
        ]

    def find_shards(self, shards: Sequence[Shard]) -> tuple[list[Path | None], list[int]]:
        """Return where each shard is, and the numbers of those at home; None is a missing one.

        A file at home is one of the right name and length: it has to be looked into.
        """
        paths: list[Path | None] = []
        at_home = []
        for number, inner in enumerate(self.shard_paths(len(shards))):
            home = self.journal.homes[number]
            if os.path.lexists(inner):
                paths.append(inner)
            elif home is not None and _is_file(Path(home), shards[number].length):
                paths.append(Path(home))
                at_home.append(number)
            else:
                paths.append(None)
        return paths, at_home

    def take_shards(self, paths: Sequence[Path | None]) -> list[Path | None]:
        """Move shards here from where they are, and return where they are then.

        Raises RequestError if somebody else has one open; it names the shard as it was named.
        """
        taken: list[Path | None] = []
        for path, inner in zip(paths, self.shard_paths(len(paths)), strict=True):
            if path not in (None, inner):
                assert path is not None
                os.rename(path, inner)
                sync_directory(path.parent)
            taken.append(None if path is None else inner)
        sync_directory(self.inner)
        for named, path in zip(paths, taken, strict=True):
            if named is not None and path is not None and (refusal := check_open(path)):
                refusal.path = os.fspath(named)
                raise refusal
        return taken

    def make_shards(
        self, paths: Sequence[Path | None], shards: Sequence[Shard]
    ) -> list[Path | None]:
        """Make those shards that are missing, without any bytes; return where all shards are."""
        inner = self.shard_paths(len(shards))
        for path, target, shard in zip(paths, inner, shards, strict=True):
            if path is None:
                with open(target, "xb") as file:
                    os.ftruncate(file.fileno(), shard.length)
                    os.fsync(file.fileno())
        sync_directory(self.inner)
        return list(inner)

    def send_home(self, shards: Sequence[Shard], homes: Sequence[str]) -> None:
        """Give the shards that are here, and whole again, their names back."""
        for shard, home, path in zip(shards, homes, self.shard_paths(len(shards)), strict=True):
            if not path.exists():
                continue
            if shard.mtime_ns is not None:
                os.utime(path, ns=(shard.mtime_ns, shard.mtime_ns))
            os.rename(path, home)
        sync_directory(self.inner)
        for folder in {os.path.dirname(home) for home in homes}:
            sync_directory(folder)

    def commit(self, draft: Draft) -> None:
        """Make it a pack: the rename of the manifest is the commit."""
        write_synced(self.path / draft.manifest.index_entry.name, draft.index_bytes)
        write_synced(self.path / MANIFEST_DRAFT, draft.manifest_bytes)
        sync_directory(self.path)
        os.replace(self.path / MANIFEST_DRAFT, self.path / manifest.NAME)
        sync_directory(self.path)
        if not in_place_draft.is_committed(self.path, draft):
            hint = "the drive or the memory is failing: nothing was given up for it"
            problem = "manifest or index is not read back from the drive as it was written"
            raise MachineError(problem, path=self.path, hint=hint)

    def withdraw(self, draft: Draft) -> None:
        """Make it a pack no more, before anything of it is given up."""
        names = (manifest.NAME, draft.manifest.index_entry.name, MANIFEST_DRAFT)
        self._remove(self.path / name for name in names)

    def remove_shards(self) -> None:
        """Remove the shards, once all of them is in a pack that is committed."""
        self._remove(path for path in self.inner.iterdir() if path.suffix == SHARD_SUFFIX)

    def remove_data_files(self, draft: Draft) -> None:
        """Remove the data files, once all of them is in the shards, and these are at home."""
        self._remove(self.path / file.name for file in draft.manifest.files)

    def close_up(self) -> None:
        """Remove journal and drafts, which nothing needs any more, and directories if empty."""
        assert not self.has_shards
        self.journal.remove()
        self._remove(self.inner / name for name in in_place_draft.NAMES)
        self.inner.rmdir()
        sync_directory(self.path)
        if not os.listdir(self.path):
            self.path.rmdir()
            sync_directory(self.path.absolute().parent)

    def _remove(self, paths: Iterable[Path]) -> None:
        for path in list(paths):
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
        sync_directory(self.inner)
        sync_directory(self.path)


def has_shards(inner: Path) -> bool:
    """Return whether any shard is in the folder `inner` of an unfinished pack."""
    return any(name.endswith(SHARD_SUFFIX) for name in os.listdir(inner))


def _is_file(path: Path, length: int) -> bool:
    try:
        status = os.stat(path, follow_symlinks=False)
    except OSError:
        return False
    return stat.S_ISREG(status.st_mode) and status.st_size == length


def check_homes(
    homes: Sequence[str], beside: Path, force: bool, own: Collection[Path | None] = ()
) -> None:
    """Make the folders where shards belong, and check that they can be moved there.

    Raises RequestError where another file than one of `own` is there, or another file system.
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
        if is_in_pack(home):
            hint = "choose another place; `force` changes nothing"
            raise RequestError("a file of a pack is never written over", path=home, hint=hint)
        if not stat.S_ISREG(os.stat(home, follow_symlinks=False).st_mode):
            hint = "choose another place; `force` changes nothing"
            raise RequestError("exists already, and is no regular file", path=home, hint=hint)
        if not force:
            hint = "choose another place, or replace it with `force=True`"
            raise RequestError("exists already", path=home, hint=hint)
