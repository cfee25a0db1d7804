"""The directory of a pack that is made of its shards in place, and what is in it until it is done.

    model.moepack/
      experts-….bin     as far as they are written
      in-place/
        journal         what is where; the lock as well
        manifest.json   what the pack will be, or was
        index.bin       where every byte belongs, in the pack and in the shards; digests may lack
        shard-00001-of-00006.moepack-source

The last are the shards themselves. They have holes, and programs load zeros without a word: so they
have a name that none loads, until they are whole again or gone.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Sequence
from pathlib import Path

from moepack.errors import MachineError, RequestError
from moepack.format import manifest
from moepack.format.names import IN_PLACE_NAME
from moepack.packing.in_place_journal import Goal, InPlaceJournal, Shard
from moepack.packing.in_place_refusals import check_open
from moepack.packing.line_log import open_log
from moepack.storage.atomic import make_folder, sync_directory, write_synced
from moepack.storage.pack_files import is_in_pack

JOURNAL_NAME = "journal"
SHARD_SUFFIX = ".moepack-source"
MANIFEST_DRAFT = f"{manifest.NAME}.tmp"


def is_unfinished(path: Path) -> bool:
    """Say whether in the directory `path` shards are being turned into a pack, or back."""
    return (path / IN_PLACE_NAME / JOURNAL_NAME).exists()


class Unfinished:
    """The directory `path`, locked until `close`. Its journal may be empty."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.inner = path / IN_PLACE_NAME
        self.journal = InPlaceJournal(open_log(self.inner / JOURNAL_NAME))

    def close(self) -> None:
        """Give up the lock."""
        self.journal.close()

    def write_draft(self, described: bytes, index: bytes) -> None:
        """Write what the pack is to be, before anything else depends on it."""
        write_synced(self.inner / manifest.NAME, described)
        write_synced(self.inner / manifest.INDEX_NAME, index)
        self.sync()

    def sync(self) -> None:
        """Make all names in the directory, and its own, outlive a loss of power."""
        for folder in (self.inner, self.path, self.path.absolute().parent):
            sync_directory(folder)

    def holds_shards(self) -> bool:
        """Say whether any shard is here."""
        return any(path.suffix == SHARD_SUFFIX for path in self.inner.iterdir())

    def shard_paths(self, count: int) -> list[Path]:
        """Name the shards as no program does."""
        return [
            self.inner / f"shard-{number:05d}-of-{count:05d}{SHARD_SUFFIX}"
            for number in range(1, count + 1)
        ]

    def take_shards(self, shards: Sequence[Shard]) -> None:
        """Move the shards here from where they are, and see that nobody else has them open.

        Raises RequestError or MachineError where one is missing, is another, or is in use.
        """
        for shard, home, path in self._places(shards):
            if _is(path, shard):
                continue
            if not _is(home, shard):
                raise MachineError(
                    "a shard is missing, or was replaced",
                    path=home,
                    expected=f"inode {shard.inode}, {shard.length:,} bytes",
                    hint="move it back: the pack is made of these very files",
                )
            os.rename(home, path)
        self._sync_homes()
        for _, _, path in self._places(shards):
            if refusal := check_open(path):
                raise refusal

    def send_home(self, shards: Sequence[Shard]) -> None:
        """Give the shards, which are whole again, their names back."""
        for shard, home, path in self._places(shards):
            if shard.mtime_ns is not None and path.exists():
                os.utime(path, ns=(shard.mtime_ns, shard.mtime_ns))
            with contextlib.suppress(FileNotFoundError):
                os.rename(path, home)
        self._sync_homes()

    def commit(self, described: bytes, index: bytes) -> None:
        """Make it a pack: the rename of the manifest is the commit."""
        write_synced(self.path / manifest.INDEX_NAME, index)
        write_synced(self.path / MANIFEST_DRAFT, described)
        sync_directory(self.path)
        os.replace(self.path / MANIFEST_DRAFT, self.path / manifest.NAME)
        sync_directory(self.path)

    def withdraw(self) -> None:
        """Make it a pack no more, before anything of it is given up."""
        for name in (manifest.NAME, manifest.INDEX_NAME, MANIFEST_DRAFT):
            with contextlib.suppress(FileNotFoundError):
                (self.path / name).unlink()
        sync_directory(self.path)

    def tidy(self) -> None:
        """Remove what nothing needs any more once the journal says that the work is done."""
        journal = self.journal
        assert journal.is_done
        assert journal.beginning is not None
        draft = self.inner / manifest.NAME
        if journal.goal is Goal.PACK:
            self._remove(self.shard_paths(len(journal.beginning.shards)))
        elif draft.exists():  # it goes after the files that it names
            described = manifest.decode(draft.read_bytes(), str(draft))
            self._remove([self.path / file.name for file in described.files])
        self._remove([draft, self.inner / manifest.INDEX_NAME])
        journal.remove()
        self.inner.rmdir()
        sync_directory(self.path)
        if journal.goal is Goal.SHARDS:
            with contextlib.suppress(OSError):  # what else is in there is not ours
                self.path.rmdir()
            sync_directory(self.path.absolute().parent)

    def abandon(self) -> None:
        """Remove what was made here when nothing had begun."""
        self._remove([path for path in self.inner.iterdir() if path.name != JOURNAL_NAME])
        self.journal.remove()
        self.inner.rmdir()
        sync_directory(self.path)

    def _remove(self, paths: Sequence[Path]) -> None:
        for path in paths:
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
        sync_directory(self.inner)
        sync_directory(self.path)

    def _places(self, shards: Sequence[Shard]) -> list[tuple[Shard, Path, Path]]:
        """Return each shard with where it belongs and where it is while it has holes."""
        homes = map(Path, self.journal.homes)
        return list(zip(shards, homes, self.shard_paths(len(shards)), strict=True))

    def _sync_homes(self) -> None:
        sync_directory(self.inner)
        for folder in {os.path.dirname(home) for home in self.journal.homes}:
            sync_directory(folder)


def _is(path: Path, shard: Shard) -> bool:
    """Say whether a shard is at `path`."""
    try:
        status = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    found = (status.st_ino, status.st_size)
    return stat.S_ISREG(status.st_mode) and found == (shard.inode, shard.length)


def check_homes(
    homes: Sequence[str], beside: Path, force: bool, shards: Sequence[Shard] = ()
) -> None:
    """Make the folders where shards belong, and check that they can be moved there.

    Raises RequestError where another file than one of `shards` is there, or another file system.
    """
    for folder in {Path(home).parent for home in homes}:
        make_folder(folder)
        if folder.stat().st_dev != beside.stat().st_dev:
            problem = "on another file system: the shards cannot be moved there"
            raise RequestError(problem, path=folder, hint="choose a folder beside the pack")
    if len(set(homes)) != len(homes):
        problem = "two shards had the same name, in different folders"
        raise RequestError(problem, hint="leave out --output: each goes back where it was")
    for home in map(Path, homes):
        is_own = any(_is(home, shard) for shard in shards)
        if not os.path.lexists(home) or is_own:
            continue
        if is_in_pack(home):
            hint = "choose another place; --force changes nothing"
            raise RequestError("a file of a pack is never written over", path=home, hint=hint)
        if not force:
            hint = "choose another place, or replace it with --force"
            raise RequestError("exists already", path=home, hint=hint)
