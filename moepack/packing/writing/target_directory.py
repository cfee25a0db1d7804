"""The directory that a pack is written into: taken, measured, and its finished files watched."""

import errno
import os
import stat
from pathlib import Path

from moepack.common.errors import ErrorCode, MachineError, RequestError
from moepack.common.pack_files import IN_PLACE_NAME, JOURNAL_NAME, RECORDS_NAME
from moepack.pack.format import manifest
from moepack.storage.atomic import make_folder, require_folder_of
from moepack.storage.extents import NewFile, is_whole
from moepack.storage.folders import check_space
from moepack.storage.regular_file import FileStamp


def prepare(path: Path, resume: bool) -> bool:
    """Make the target directory; return whether it is new. An existing pack is never touched."""
    is_new = make_folder(path)
    if not is_new:
        check_existing(path, resume)
    return is_new


def check_existing(path: Path, resume: bool) -> None:
    """Raise RequestError if the file or folder at `path` is in the way of a pack."""
    if not path.is_dir():
        raise RequestError("exists, and is not a directory", path=path)
    names = {name for name in os.listdir(path) if name != "lost+found"}
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
    if RECORDS_NAME in names:
        problem = "parts of a pack are here, or being written"
        hint = "go on with `part` or `executor`, and then `commit`; or remove the directory"
        raise RequestError(problem, path=path, hint=hint)
    if JOURNAL_NAME in names and not resume:
        hint = "continue it with `resume=True`, or remove the directory"
        problem = "an interrupted pack is here, or one that is being written"
        raise RequestError(problem, path=path, hint=hint)
    if names and JOURNAL_NAME not in names:
        raise RequestError(
            "not empty, and not an interrupted pack",
            path=path,
            found=", ".join(sorted(names)[:3]),
            hint="choose a new or an empty directory",
        )


def check_as_if_packing(path: Path, length: int, resume: bool) -> None:
    """Raise the error with which a pack of `length` bytes at `path` would end before it wrote.

    The files of an interrupted pack are taken over or removed, so that their space is not needed.
    """
    require_folder_of(path)
    existing_length = 0
    folder = path
    if os.path.lexists(path):
        check_existing(path, resume)
        existing_length = sum(e.stat().st_size for e in os.scandir(path) if e.is_file())
    else:
        folder = path.absolute().parent
    if not os.access(folder, os.W_OK | os.X_OK):
        is_read_only = os.statvfs(folder).f_flag & os.ST_RDONLY
        problem = os.strerror(errno.EROFS if is_read_only else errno.EACCES)
        raise MachineError(f"cannot create: {problem}", path=path)
    check_space(path, length - existing_length)


class WatchedFiles:
    """The finished data files of a pack in the making, and their stamps when they were added."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamps: dict[str, FileStamp] = {}

    def add(self, name: str, length: int) -> bool:
        """Watch a file from now on; return whether it is a regular file of `length` bytes."""
        stamp = self._stamp(name)
        if stamp is None or stamp.length != length:
            return False
        self._stamps[name] = stamp
        return True

    def is_unchanged(self, file: NewFile) -> bool:
        """Return whether a file with digests is as it was when it was added.

        If its stamp differs its bytes decide: some file systems forget a file's inode number and
        the fractions of its times, and whoever links to a file changes its ctime.
        """
        before, now = self._stamps.get(file.name), self._stamp(file.name)
        if before is None or now is None or before.length != now.length:
            return False
        return before == now or is_whole(self._path / file.name, file, lambda _: None)

    def _stamp(self, name: str) -> FileStamp | None:
        """Return the stamp of a file; None if no regular file has that name."""
        try:
            status = os.stat(self._path / name, follow_symlinks=False)
        except FileNotFoundError:
            return None
        return FileStamp.from_stat(status) if stat.S_ISREG(status.st_mode) else None
