"""The file that is the lock of a directory: one process at a time makes a pack there."""

from __future__ import annotations

import errno
import io
import os
from pathlib import Path

from moepack.common.errors import MoepackError, RequestError
from moepack.storage.folders import try_lock
from moepack.storage.regular_file import NotRegularError, open_regular


class LockFile:
    """The open, locked file at `path`, created if it is missing.

    Raises MoepackError if another process has it open, RequestError if `path` is not a regular
    file: the target of a link belongs to somebody else.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = _open_locked(path)

    def remove(self) -> None:
        """Delete the file and release the lock."""
        self._path.unlink(missing_ok=True)
        self.close()

    def close(self) -> None:
        """Release the lock; the file stays."""
        # A file object forgets its descriptor before it closes it, and no signal comes between.
        self._file.close()


def _open_locked(path: Path) -> io.FileIO:
    try:
        file = io.FileIO(os.fspath(path), "r+", opener=_open)
    except OSError as error:
        if not isinstance(error, NotRegularError) and error.errno != errno.ELOOP:
            raise
        hint = "moepack did not make it: remove it, then run the same command again"
        problem = "not a journal: a link, or no regular file"
        raise RequestError(problem, path=path, hint=hint) from None
    try:
        if try_lock(file.fileno(), path, is_needed=True):
            return file
    except BaseException:
        file.close()
        raise
    file.close()
    problem = "another moepack is packing into this directory"
    hint = "wait until it is done, or choose another directory"
    raise MoepackError(problem, path=path.parent, hint=hint)


def _open(path: str, flags: int) -> int:
    return open_regular(path, flags | os.O_CREAT | os.O_NOFOLLOW)
