"""The journal of a pack in the making: what is finished, safely on disk, and of which input.

`pack.journal` stands in the target directory until the manifest is committed. Each line is an
object in JSON with a digest of itself: first the identity of the input, then one for each data file
that was written whole and synced *before* its line was. A line that a crash cut off or a bad disk
changed ends what is trusted, so nothing unsynced ever is. The open journal is also the lock: one
packer at a time.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import json
import os
from array import array
from pathlib import Path
from typing import Any

from moepack import digest
from moepack.errors import MoepackError, RequestError
from moepack.storage.copying import WrittenFile
from moepack.storage.regular_file import NotRegularError, open_regular

MAX_LINE_LENGTH = 16 << 20


class Journal:
    """An open, locked journal; `open_journal` makes it."""

    def __init__(self, path: Path, file: io.FileIO) -> None:
        self.path = path
        self._file = file
        self.is_new = os.fstat(file.fileno()).st_size == 0
        self.finished: dict[str, WrittenFile] = {}

    def begin(self, identity: dict[str, Any]) -> None:
        """Start afresh with the identity of the input."""
        self._file.truncate(0)
        self._append(identity)

    def add(self, file: WrittenFile) -> None:
        """Record a file that has been synced, and sync the record."""
        # Before the record: an interruption that comes behind it must not cost the file.
        self.finished[file.name] = file
        try:
            self._append({"name": file.name, "digests": file.digests.tobytes().hex()})
        except OSError:
            del self.finished[file.name]
            raise

    def forget(self, name: str) -> None:
        """Record that a file is not finished after all, before it is written again."""
        del self.finished[name]
        self._append({"forgotten": name})

    def resume(self, identity: dict[str, Any]) -> None:
        """Take over what an interrupted pack finished; begin where it had not begun.

        Raises RequestError where it was packing other input.
        """
        self._file.seek(0)
        with open(self._file.fileno(), "rb", closefd=False) as lines:
            begun_with = _object(lines.readline(MAX_LINE_LENGTH))
            if begun_with is None:
                self.begin(identity)
                return
            changed = [key for key in identity if begun_with.get(key) != identity[key]]
            if changed:
                raise RequestError(
                    "the interrupted pack was made from other input: not the same "
                    + ", ".join(changed),
                    path=self.path,
                    hint="remove the directory and pack again, or restore the input",
                )
            length = lines.tell()
            while self._take_over(_object(lines.readline(MAX_LINE_LENGTH))):
                length = lines.tell()
        # What is not trusted must not stand before the next line either.
        self._file.truncate(length)

    def _take_over(self, entry: dict[str, Any] | None) -> bool:
        """Take over one entry; say whether it made sense."""
        if entry is None:
            return False
        if "forgotten" in entry:
            self.finished.pop(str(entry["forgotten"]), None)
            return True
        try:
            digests = array("Q", bytes.fromhex(entry["digests"]))
            file = WrittenFile(str(entry["name"]), digests)
        except (KeyError, TypeError, ValueError):
            return False
        self.finished[file.name] = file
        return True

    def remove(self) -> None:
        """Delete the journal and give up the lock."""
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()
        self.close()

    def close(self) -> None:
        """Give up the lock; the journal stays for `--resume`."""
        # A file object forgets its descriptor before it closes it, and no signal comes between.
        self._file.close()

    def _append(self, entry: dict[str, Any]) -> None:
        line = json.dumps(entry | {"check": _check(entry)}).encode() + b"\n"
        end = self._file.seek(0, os.SEEK_END)
        while line:
            written = os.pwrite(self._file.fileno(), line, end)
            line, end = line[written:], end + written
        os.fsync(self._file.fileno())


def open_journal(path: Path) -> Journal:
    """Open or create the journal at `path` and lock it.

    Raises MoepackError where another packer holds it, RequestError where the name is not a regular
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
    return Journal(path, file)


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
