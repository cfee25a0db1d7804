"""An append-only log that is the lock of a directory as well: one process at a time.

Each line is an object in JSON with a digest of itself, synced as it is written. A line that a crash
cut off or a bad disk changed ends the trusted part.
"""

from __future__ import annotations

import errno
import io
import json
import os
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any

from moepack.common import digest
from moepack.common.errors import MoepackError, RequestError
from moepack.storage.folders import try_lock
from moepack.storage.regular_file import NotRegularError, open_regular, write_at

MAX_LINE_LENGTH = 16 << 20


class LineLog:
    """The open, locked log at `path`, created if it is missing; `is_new` if it was empty.

    Raises MoepackError if another process has it open, RequestError if `path` is not a regular
    file: the target of a link belongs to somebody else.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = _open_locked(path)
        self.is_new = os.fstat(self._file.fileno()).st_size == 0

    def begin(self, entry: dict[str, Any]) -> None:
        """Start afresh with a first line."""
        self._file.truncate(0)
        self.append(entry)

    def entries(self) -> Iterator[dict[str, Any] | None]:
        """Yield the entry of each line; None for a line that is cut off or damaged."""
        self._file.seek(0)
        with open(self._file.fileno(), "rb", closefd=False) as lines:
            while line := lines.readline(MAX_LINE_LENGTH):
                yield _parse(line)

    def trusted(self) -> Iterator[dict[str, Any]]:
        """Yield the entries from the first one to the last before a damaged line."""
        return takewhile(lambda entry: entry is not None, self.entries())  # type: ignore[arg-type]

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
        write_at(self._file.fileno(), line, self._file.seek(0, os.SEEK_END))
        os.fsync(self._file.fileno())

    def remove(self) -> None:
        """Delete the log and release the lock."""
        self.path.unlink(missing_ok=True)
        self.close()

    def close(self) -> None:
        """Release the lock; the log stays."""
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


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        entry = json.loads(line) if line.endswith(b"\n") else None
    except (ValueError, RecursionError):
        return None
    if not isinstance(entry, dict):
        return None
    return entry if entry.pop("check", None) == _check(entry) else None


def _check(entry: dict[str, Any]) -> str:
    return digest.to_text(digest.xxh3(json.dumps(entry, sort_keys=True).encode()))
