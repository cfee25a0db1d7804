"""Where a pack appears, file by file: a folder that machines share, or one in a store of objects.

A name has no file or a whole one, at any moment and for everyone.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

from moepack.common.errors import RequestError
from moepack.common.pack_files import RECORDS_NAME
from moepack.common.paths import AnyPath, RemotePath, is_remote
from moepack.storage.atomic import make_folder, sync_directory, write_synced
from moepack.storage.extents import NewFile, is_whole
from moepack.storage.page_cache import drop
from moepack.storage.regular_file import read_back


class Target(Protocol):
    """The folder of a pack in the making. Names are relative to it; calls raise OSError."""

    @property
    def path(self) -> Path:
        """The path of the folder, or its address."""
        ...

    def make(self) -> None:
        """Make the folder, if there is none."""
        ...

    def lengths(self) -> dict[str, int]:
        """Return the lengths of all files there by name; none if there is no folder."""
        ...

    def read(self, name: str, limit: int) -> bytes | None:
        """Return all bytes of a small file, at most `limit` and one more; None if it is missing."""
        ...

    def put(self, name: str, data: bytes) -> None:
        """Write a small file, in place of an older one."""
        ...

    def create(self, name: str, data: bytes) -> bool:
        """Write a small file; return False if there is one of that name already."""
        ...

    def scratch(self) -> contextlib.AbstractContextManager[Path]:
        """Make an empty folder on this machine for the block, for files that are being written."""
        ...

    def take(self, file: Path, name: str) -> str | None:
        """Move a whole, synced file of a scratch folder to its name; return the mark it has there.

        A mark changes if the file is written anew. Folders have none.
        """
        ...

    def is_intact(self, file: NewFile, mark: str | None, advanced: Callable[[int], None]) -> bool:
        """Return whether a file is as it was taken: by its mark, or else by its bytes.

        `advanced` is called with the bytes read and found correct since its last call.
        """
        ...

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""
        ...

    def clean_up(self) -> None:
        """Remove what killed writers have left. Nobody may be writing any more."""
        ...


def open_target(path: AnyPath) -> Target:
    """Return the target at a path or an address, there or not. Raises MoepackError."""
    if not is_remote(path):
        return _FolderTarget(Path(path))
    from moepack.storage.remote.stores import resolve  # here, since few packs are remote

    address = resolve(path)
    if address.store.startswith(("hf:", "http")):
        expected = "a folder, or an address of s3://, gs:// or az://"
        raise RequestError("nothing can be written there", path=address, expected=expected)
    if not address.key:
        raise RequestError("a bucket, not a folder in it", path=address, hint="add a name to it")
    return _StoreTarget(address)


class _FolderTarget:
    """A folder of this machine, or of a file system that several share."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._records = path / RECORDS_NAME

    def make(self) -> None:
        make_folder(self.path)

    def lengths(self) -> dict[str, int]:
        lengths: dict[str, int] = {}
        for folder, prefix in ((self.path, ""), (self._records, f"{RECORDS_NAME}/")):
            with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
                for entry in entries:
                    with contextlib.suppress(FileNotFoundError):
                        if entry.is_file(follow_symlinks=False):
                            lengths[prefix + entry.name] = entry.stat().st_size
        return lengths

    def read(self, name: str, limit: int) -> bytes | None:
        path = self.path / name
        try:
            drop([path])
            return read_back(path, limit)
        except FileNotFoundError:
            return None

    def put(self, name: str, data: bytes) -> None:
        with self._written(data) as file:
            os.replace(file, self.path / name)
        sync_directory((self.path / name).parent)

    def create(self, name: str, data: bytes) -> bool:
        with self._written(data) as file:
            try:
                os.link(file, self.path / name)
            except FileExistsError:
                return False
        sync_directory((self.path / name).parent)
        return True

    @contextlib.contextmanager
    def _written(self, data: bytes) -> Iterator[Path]:
        with self.scratch() as folder:
            file = folder / "file"
            write_synced(file, data)
            yield file

    @contextlib.contextmanager
    def scratch(self) -> Iterator[Path]:
        # Beside the records: a rename cannot cross file systems.
        self._records.mkdir(exist_ok=True)
        folder = self._records / f"writing-{secrets.token_hex(8)}"
        folder.mkdir()
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def take(self, file: Path, name: str) -> str | None:
        os.replace(file, self.path / name)
        sync_directory(self.path)
        return None

    def is_intact(self, file: NewFile, mark: str | None, advanced: Callable[[int], None]) -> bool:
        with contextlib.suppress(OSError):  # a bad sector: it is written anew, elsewhere
            return is_whole(self.path / file.name, file, advanced)
        return False

    def remove(self, name: str) -> None:
        (self.path / name).unlink(missing_ok=True)

    def clean_up(self) -> None:
        shutil.rmtree(self._records, ignore_errors=True)
        sync_directory(self.path)


class _StoreTarget:
    """A folder in a store of objects. Data files are written on this machine, then uploaded."""

    def __init__(self, address: RemotePath) -> None:
        from moepack.storage.remote.stores import store_of  # here, since few packs are remote

        self.path: Path = address
        self._store = store_of(address)
        self._prefix = address.key

    def make(self) -> None: ...  # a store has names alone

    def lengths(self) -> dict[str, int]:
        start = len(self._prefix) + 1
        return {key[start:]: stamp.length for key, stamp in self._store.objects(self._prefix)}

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

    @contextlib.contextmanager
    def scratch(self) -> Iterator[Path]:
        with tempfile.TemporaryDirectory(prefix="moepack-") as folder:
            yield Path(folder)

    def take(self, file: Path, name: str) -> str | None:
        stamp = self._store.upload(self._key(name), file)
        file.unlink()
        return stamp.etag

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
            for name in self.lengths():
                if name.startswith(f"{RECORDS_NAME}/"):
                    self.remove(name)

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}"
