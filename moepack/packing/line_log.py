"""A log of what is safely on disk: lines that are synced as they are written, and a lock.

Each line is an object in JSON with a digest of itself. A line that a crash cut off or a bad disk
changed ends what is trusted. The open log is also the lock: one process at a time.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from moepack import digest
from moepack.errors import MoepackError, RequestError
from moepack.storage.regular_file import NotRegularError, open_regular

MAX_LINE_LENGTH = 16 << 20


class LineLog:
    """An open, locked log; `open_log` makes it."""

    def __init__(self, path: Path, file: io.FileIO) -> None:
        self.path = path
        self._file = file
        self.is_new = os.fstat(file.fileno()).st_size == 0

    def begin(self, entry: dict[str, Any]) -> None:
        """Start afresh with a first line."""
        self._file.truncate(0)
        self.append(entry)

    def entries(self) -> Iterator[dict[str, Any] | None]:
        """Yield the entry of each line; None for a line that is cut off or damaged."""
        self._file.seek(0)
        with open(self._file.fileno(), "rb", closefd=False) as lines:
            while line := lines.readline(MAX_LINE_LENGTH):
                yield _object(line)

    def trusted(self) -> Iterator[dict[str, Any]]:
        """Yield the entries from the first on, as far as they were written whole."""
        for entry in self.entries():
            if entry is None:
                return
            yield entry

    def keep(self, count: int) -> None:
        """Cut off all lines but the first `count`: the next one must not stand behind the rest."""
        self._file.seek(0)
        with open(self._file.fileno(), "rb", closefd=False) as lines:
            for _ in range(count):
                lines.readline(MAX_LINE_LENGTH)
            length = lines.tell()
        self._file.truncate(length)

    def append(self, entry: dict[str, Any]) -> None:
        """Add a line and sync it."""
        line = json.dumps(entry | {"check": _check(entry)}).encode() + b"\n"
        end = self._file.seek(0, os.SEEK_END)
        while line:
            written = os.pwrite(self._file.fileno(), line, end)
            line, end = line[written:], end + written
        os.fsync(self._file.fileno())

    def remove(self) -> None:
        """Delete the log and give up the lock."""
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()
        self.close()

    def close(self) -> None:
        """Give up the lock; the log stays."""
        # A file object forgets its descriptor before it closes it, and no signal comes between.
        self._file.close()


def open_log(path: Path) -> LineLog:
    """Open or create the log at `path` and lock it.

    Raises MoepackError where another process holds it, RequestError where the name is not a regular
    file's: what a link points to is not ours to write to.
    """
    try:
        file = io.FileIO(os.fspath(path), "r+", opener=_open)
    except OSError as error:
        if not isinstance(error, NotRegularError) and error.errno != errno.ELOOP:
            raise
        hint = "remove the directory, and pack again"
        problem = "not a journal: a link, or no regular file"
        raise RequestError(problem, path=path, hint=hint) from None
    try:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(file.fileno()).st_nlink == 0:  # another packer finished between the two calls
            raise OSError(errno.EWOULDBLOCK, "")
    except OSError as error:
        file.close()
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            raise
        raise MoepackError(
            "another moepack is packing into this directory",
            path=path.parent,
            hint="wait until it is done, or choose another directory",
        ) from None
    return LineLog(path, file)


def _open(path: str, flags: int) -> int:
    return open_regular(path, flags | os.O_CREAT | os.O_NOFOLLOW)


def _object(line: bytes) -> dict[str, Any] | None:
    """Read a line; None where it is not one that was written whole."""
    try:
        entry = json.loads(line) if line.endswith(b"\n") else None
    except (ValueError, RecursionError):
        return None
    if not isinstance(entry, dict):
        return None
    return entry if entry.pop("check", None) == _check(entry) else None


def _check(entry: dict[str, Any]) -> str:
    return digest.to_text(digest.of(json.dumps(entry, sort_keys=True).encode()))
