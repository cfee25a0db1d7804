"""The journal of a pack in the making: what is finished, safely on disk, and of which input.

`pack.journal` stands in the target directory until the manifest is committed. Its first line is the
identity of the input; each further line is a data file that was written whole and synced *before*
the line was. A line that was cut by a crash is ignored, so nothing unsynced is ever trusted. The
open journal is also the lock: one packer at a time.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
from array import array
from pathlib import Path
from typing import Any, NamedTuple

from moepack import digest
from moepack.errors import MoepackError, RequestError

MAX_LENGTH = 1 << 30


class FinishedFile(NamedTuple):
    """A data file that is safely on disk: its digest, and its parts' in the order of offsets."""

    name: str
    digest: int
    part_digests: array[int]


class Journal:
    """An open, locked journal; `open_journal` makes it."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor
        self.finished: dict[str, FinishedFile] = {}

    def begin(self, identity: dict[str, Any]) -> None:
        """Start afresh with the identity of the input."""
        os.ftruncate(self._descriptor, 0)
        self._append(identity)

    def add(self, file: FinishedFile) -> None:
        """Record a file that has been synced, and sync the record."""
        self.finished[file.name] = file
        parts = array("Q", file.part_digests)
        self._append(
            {
                "name": file.name,
                "digest": digest.to_text(file.digest),
                "parts": parts.tobytes().hex(),
            }
        )

    def resume(self, identity: dict[str, Any]) -> None:
        """Take over what an interrupted pack finished; begin where it had not begun.

        Raises RequestError where it was packing other input.
        """
        data = os.pread(self._descriptor, MAX_LENGTH, 0)
        first, *lines = data.splitlines(keepends=True) or [b""]
        begun_with = _object(first)
        if begun_with is None:
            self.begin(identity)
            return
        changed = [key for key in identity if begun_with.get(key) != identity[key]]
        if changed:
            raise RequestError(
                "the interrupted pack was made from other input",
                path=self.path,
                found=f"other {', '.join(changed)}",
                hint="remove the directory and pack again, or restore the input",
            )
        length = len(first)
        for line in lines:
            file = _finished(line)
            if file is None:
                break
            self.finished[file.name] = file
            length += len(line)
        # A line that the interruption cut off must not run into the next one.
        os.ftruncate(self._descriptor, length)

    def remove(self) -> None:
        """Delete the journal and give up the lock."""
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()
        self.close()

    def close(self) -> None:
        """Give up the lock; the journal stays for `--resume`."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _append(self, entry: dict[str, Any]) -> None:
        line = json.dumps(entry, sort_keys=True).encode() + b"\n"
        end = os.lseek(self._descriptor, 0, os.SEEK_END)
        while line:
            written = os.pwrite(self._descriptor, line, end)
            line, end = line[written:], end + written
        os.fsync(self._descriptor)


def open_journal(path: Path) -> Journal:
    """Open or create the journal at `path` and lock it.

    Raises MoepackError where another packer holds it.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(descriptor).st_nlink == 0:  # the other packer finished between the two calls
            raise OSError(errno.EWOULDBLOCK, "")
    except OSError as error:
        os.close(descriptor)
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            raise
        raise MoepackError(
            "another moepack is packing into this directory",
            path=path.parent,
            hint="wait until it is done, or choose another directory",
        ) from None
    return Journal(path, descriptor)


def _object(line: bytes) -> dict[str, Any] | None:
    if not line.endswith(b"\n"):
        return None
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _finished(line: bytes) -> FinishedFile | None:
    entry = _object(line)
    if entry is None:
        return None
    try:
        parts = array("Q", bytes.fromhex(entry["parts"]))
        return FinishedFile(str(entry["name"]), digest.from_text(entry["digest"]), parts)
    except (KeyError, TypeError, ValueError):
        return None
