"""Where a pack appears, file by file: a folder of one process or of several, or one in a store.

A name has no file or a whole one, at any moment and for everyone. Files are written in `scratch`, a
folder on this machine, and moved or uploaded from there.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
import tempfile
from collections.abc import Callable
from functools import cached_property
from pathlib import Path

from moepack.common.errors import ErrorCode, MachineError, RequestError
from moepack.common.pack_files import IN_PLACE_NAME, JOURNAL_NAME, RECORDS_NAME
from moepack.common.paths import AnyPath, RemotePath, is_remote
from moepack.pack.format import manifest
from moepack.packing.writing.lock_file import LockFile
from moepack.storage.atomic import (
    make_folder,
    publish,
    require_folder_of,
    sync_directory,
    write_synced,
)
from moepack.storage.extents import NewFile, is_whole
from moepack.storage.folders import check_space
from moepack.storage.input_file import Stamp
from moepack.storage.page_cache import drop
from moepack.storage.regular_file import FileStamp, read_back, remove

INPUT_NAME = f"{RECORDS_NAME}/input.json"


class SharedFolder:
    """A folder of a file system that several machines share. Its calls raise OSError."""

    is_alone = False

    def __init__(self, path: Path) -> None:
        self.path = path
        self._records = path / RECORDS_NAME
        self._scratch = self._records / f"writing-{secrets.token_hex(8)}"

    @cached_property
    def scratch(self) -> Path:
        """The folder of files that are being written; made when it is first asked for."""
        if self._records.is_symlink():
            problem = "not the folder of records: a link"
            raise RequestError(problem, path=self._records, hint="remove it, if it is yours")
        self._records.mkdir(exist_ok=True)
        self._scratch.mkdir()
        sync_directory(self.path)
        return self._scratch

    def names(self) -> set[str]:
        """Return the names of all that is there; none if there is no folder."""
        try:
            return set(os.listdir(self.path)) - {"lost+found"}
        except FileNotFoundError:
            return set()
        except NotADirectoryError:
            raise RequestError("exists, and is not a directory", path=self.path) from None

    def stamps(self) -> dict[str, Stamp]:
        """Return the stamps of all files there, and of records, by name."""
        stamps: dict[str, Stamp] = {}
        for folder, prefix in ((self.path, ""), (self._records, f"{RECORDS_NAME}/")):
            with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
                for entry in entries:
                    with contextlib.suppress(FileNotFoundError):
                        status = entry.stat(follow_symlinks=False)
                        if stat.S_ISREG(status.st_mode):
                            stamps[prefix + entry.name] = FileStamp.from_stat(status)
        return stamps

    def make(self) -> None:
        """Make the folder, if there is none."""
        make_folder(self.path)

    def read(self, name: str, limit: int) -> bytes | None:
        """Return all bytes of a small file, at most `limit` and one more; None if it is missing."""
        path = self.path / name
        try:
            drop([path])
            return read_back(path, limit)
        except FileNotFoundError:
            return None

    def put(self, name: str, data: bytes) -> None:
        """Write a small file, in place of an older one."""
        publish(self._written(name, data), self.path / name)

    def create(self, name: str, data: bytes) -> bool:
        """Write a small file; return False if there is one of that name already."""
        try:
            os.link(self._written(name, data), self.path / name)
        except FileExistsError:
            return False
        sync_directory((self.path / name).parent)
        return True

    def _written(self, name: str, data: bytes) -> Path:
        path = self.scratch / Path(name).name
        path.unlink(missing_ok=True)  # it may have a second name
        write_synced(path, data)
        return path

    def take(self, name: str) -> tuple[Stamp, str | None]:
        """Move a whole, synced file of `scratch` to its name; return its stamp, and its mark there.

        A mark changes if the file is written anew. Folders have none.
        """
        publish(self.scratch / name, self.path / name)
        return FileStamp.from_stat(os.lstat(self.path / name)), None

    def is_intact(self, file: NewFile, mark: str | None, advanced: Callable[[int], None]) -> bool:
        """Return whether a file is as it was taken: by its mark, or else by its bytes.

        `advanced` is called with the bytes read and found correct since its last call.
        """
        with contextlib.suppress(OSError):  # a bad sector: it is written anew, elsewhere
            return is_whole(self.path / file.name, file, advanced)
        return False

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""
        remove(self.path / name)

    def clean_up(self) -> None:
        """Remove the records and leftovers of killed writers. Nobody may be writing any more."""
        with contextlib.suppress(OSError):  # beside a manifest they mean nothing
            _remove_tree(self._records)
            sync_directory(self.path)

    def close(self) -> None:
        """Remove `scratch`, if it was made here."""
        with contextlib.suppress(OSError):
            if "scratch" in self.__dict__:
                _remove_tree(self._scratch)


class OwnFolder(SharedFolder):
    """A folder that one process writes: locked from `make` to `close`."""

    is_alone = True

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._scratch = self._records / "writing"
        self._is_new = False
        self._lock: LockFile | None = None

    @property
    def is_locked(self) -> bool:
        """Whether this process writes here, and no other."""
        return self._lock is not None

    def make(self) -> None:
        """Make the folder, and lock it. Raises MoepackError if another process writes there."""
        self._is_new = make_folder(self.path)
        try:
            self._lock = LockFile(self.path / JOURNAL_NAME)
        except BaseException:
            self._remove_if_new()
            raise
        sync_directory(self.path)  # records without the lock are those of several writers
        _remove_tree(self._scratch)  # of a killed process

    def create(self, name: str, data: bytes) -> bool:
        """Write a small file: nobody else does, and some file systems have no links."""
        self.put(name, data)
        return True

    def clean_up(self) -> None:
        """Remove the records and the lock."""
        _remove_tree(self._records)
        if self._lock is not None:
            self._lock.remove()

    def abandon(self) -> None:
        """Remove all that was made: nothing was finished."""
        self.clean_up()
        self._remove_if_new()

    def close(self) -> None:
        """Remove `scratch`, and release the lock."""
        super().close()
        if self._lock is not None:
            self._lock.close()

    def _remove_if_new(self) -> None:
        if self._is_new:
            with contextlib.suppress(OSError):
                self.path.rmdir()


class _StoreFolder:
    """A folder in a store of objects, as SharedFolder. Data files are written on this machine."""

    is_alone = False

    def __init__(self, address: RemotePath) -> None:
        from moepack.storage.remote.stores import store_of  # here, since few packs are remote

        self.path: Path = address
        self._store = store_of(address)
        self._prefix = address.key
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    @cached_property
    def scratch(self) -> Path:
        self._folder = tempfile.TemporaryDirectory(prefix="moepack-")
        return Path(self._folder.name)

    def names(self) -> set[str]:
        return {name.partition("/")[0] for name in self.stamps()}

    def stamps(self) -> dict[str, Stamp]:
        start = len(self._prefix) + 1
        objects = self._store.objects(self._prefix)  # not all list ETags as they state them
        return {key[start:]: stamp._replace(etag=None) for key, stamp in objects}

    def make(self) -> None: ...  # a store has names alone

    def read(self, name: str, limit: int) -> bytes | None:
        try:
            return self._store.read(self._key(name), limit)
        except FileNotFoundError:
            return None

    def put(self, name: str, data: bytes) -> None:
        self._store.put(self._key(name), data)

    def create(self, name: str, data: bytes) -> bool:
        try:
            self._store.put(self._key(name), data, new=True)
        except FileExistsError:
            return False
        return True

    def take(self, name: str) -> tuple[Stamp, str | None]:
        stamp = self._store.upload(self._key(name), self.scratch / name)
        (self.scratch / name).unlink()
        return stamp._replace(etag=None), stamp.etag

    def is_intact(self, file: NewFile, mark: str | None, advanced: Callable[[int], None]) -> bool:
        try:
            stamp = self._store.stamp(self._key(file.name))
        except FileNotFoundError:
            return False
        return stamp.length == file.length and mark in (None, stamp.etag)

    def remove(self, name: str) -> None:
        self._store.delete(self._key(name))

    def clean_up(self) -> None:
        with contextlib.suppress(OSError):  # beside a manifest they mean nothing
            for name in self.stamps():
                if name.startswith(f"{RECORDS_NAME}/"):
                    self.remove(name)

    def close(self) -> None:
        if self._folder is not None:
            self._folder.cleanup()

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}"


Target = SharedFolder | _StoreFolder


def open_target(path: AnyPath, *, is_alone: bool) -> Target:
    """Return the target at a path or an address, there or not. Raises MoepackError."""
    if not is_remote(path):
        return OwnFolder(Path(path)) if is_alone else SharedFolder(Path(path))
    from moepack.storage.remote.stores import resolve  # here, since few packs are remote

    address = resolve(path)
    if address.store.startswith(("hf:", "http")):
        expected = "a folder, or an address of s3://, gs:// or az://"
        raise RequestError("nothing can be written there", path=address, expected=expected)
    if not address.key:
        raise RequestError("a bucket, not a folder in it", path=address, hint="add a name to it")
    return _StoreFolder(address)


def check_existing(target: Target, *, resume: bool) -> None:
    """Raise RequestError if what is at a target is in the way of a pack."""
    names, path = target.names(), target.path
    if manifest.NAME in names:
        hint = "choose another directory, or remove it"
        code = ErrorCode.PACK_EXISTS
        raise RequestError("a whole pack is here already", path=path, hint=hint, code=code)
    if IN_PLACE_NAME in names:
        problem = "a pack that is made in place is here, unfinished: it may hold the only copy"
        hint = (
            "go on with `pack_in_place` and `resume=True`, or back with `moepack restore`; do not "
            "remove it"
        )
        raise RequestError(problem, path=path, hint=hint)
    if target.is_alone:
        kind, is_begun = "an interrupted pack", JOURNAL_NAME in names
        if RECORDS_NAME in names and not is_begun:
            problem = "parts of a pack are here, or being written"
            hint = "go on with `part`, and then `commit`; or remove the directory"
            raise RequestError(problem, path=path, hint=hint)
    else:
        kind = "an unfinished pack of several writers"
        is_begun = JOURNAL_NAME not in names and INPUT_NAME in target.stamps()
        names.discard(RECORDS_NAME)
    if is_begun and not resume:
        hint = "continue it with `resume=True`, or remove the directory"
        problem = "an interrupted pack is here, or one that is being written"
        raise RequestError(problem, path=path, hint=hint)
    if names and not is_begun:
        raise RequestError(
            f"not empty, and not {kind}",
            path=path,
            found=", ".join(sorted(names)[:3]),
            hint="choose a new or an empty directory",
        )


def check_as_if_packing(target: Target, length: int, *, resume: bool) -> None:
    """Raise the error with which a pack of `length` bytes at a target would end before it wrote.

    The files of an interrupted pack are taken over or removed, so that their space is not needed.
    """
    path = target.path
    if is_remote(path):
        check_existing(target, resume=resume)
        return
    require_folder_of(path)
    check_existing(target, resume=resume)
    folder = path if os.path.lexists(path) else path.absolute().parent
    if not os.access(folder, os.W_OK | os.X_OK):
        is_read_only = os.statvfs(folder).f_flag & os.ST_RDONLY
        problem = os.strerror(errno.EROFS if is_read_only else errno.EACCES)
        raise MachineError(f"cannot create: {problem}", path=path)
    for file in path.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # others may be writing
            length -= file.lstat().st_size
    check_space(path, length)


def _remove_tree(folder: Path) -> None:
    """Remove a folder and the files in it, and in folders there; no link is followed."""
    with contextlib.suppress(FileNotFoundError):
        for path in sorted(folder.iterdir()):
            if path.is_dir() and not path.is_symlink():
                _remove_tree(path)
            else:
                path.unlink(missing_ok=True)
        folder.rmdir()
