"""The journal of a pack in the making: what is finished, safely on disk, and of which input.

`pack.journal` stands in the target directory until the manifest is committed. Its first line is the
identity of the input, then there is one for each data file that was written whole and synced
*before* its line was, so nothing unsynced is ever trusted.
"""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

from moepack.errors import RequestError
from moepack.packing.finished_files import FinishedFile, StoredParts
from moepack.packing.line_log import LineLog, open_log


class Journal:
    """An open, locked journal; `open_journal` makes it."""

    def __init__(self, log: LineLog) -> None:
        self._log = log
        self.is_new = log.is_new
        self.finished: dict[str, FinishedFile] = {}

    def begin(self, identity: dict[str, Any]) -> None:
        """Start afresh with the identity of the input."""
        self._log.begin(identity)

    def add(self, file: FinishedFile) -> None:
        """Record a file that has been synced, and sync the record."""
        # Before the record: an interruption that comes behind it must not cost the file.
        self.finished[file.name] = file
        try:
            self._log.append(_entry(file))
        except OSError:
            del self.finished[file.name]
            raise

    def forget(self, name: str) -> None:
        """Record that a file is not finished after all, before it is written again."""
        del self.finished[name]
        self._log.append({"forgotten": name})

    def resume(self, identity: dict[str, Any]) -> None:
        """Take over what an interrupted pack finished; begin where it had not begun.

        Raises RequestError where it was packing other input.
        """
        entries = self._log.trusted()
        begun_with = next(entries, None)
        if begun_with is None:
            self.begin(identity)
            return
        changed = [key for key in identity if begun_with.get(key) != identity[key]]
        if changed:
            raise RequestError(
                "the interrupted pack was made from other input: not the same "
                + ", ".join(changed),
                path=self._log.path,
                hint="remove the directory and pack again, or restore the input",
            )
        count = 1
        for entry in entries:
            if not self._take_over(entry):
                break
            count += 1
        self._log.keep(count)

    def _take_over(self, entry: dict[str, Any]) -> bool:
        """Take over one entry; say whether it made sense."""
        if "forgotten" in entry:
            self.finished.pop(str(entry["forgotten"]), None)
            return True
        try:
            file = _file(entry)
        except (KeyError, TypeError, ValueError):
            return False
        self.finished[file.name] = file
        return True

    def remove(self) -> None:
        """Delete the journal and give up the lock."""
        self._log.remove()

    def close(self) -> None:
        """Give up the lock; the journal stays for `--resume`."""
        self._log.close()


def _entry(file: FinishedFile) -> dict[str, Any]:
    entry = {"name": file.name, "digests": file.digests.tobytes().hex()}
    if file.stored is not None:
        entry["stored_lengths"] = file.stored.lengths.tobytes().hex()
        entry["stored_digests"] = file.stored.digests.tobytes().hex()
    return entry


def _file(entry: dict[str, Any]) -> FinishedFile:
    """Return the file that an entry is of. Raises KeyError, TypeError and ValueError."""
    stored = None
    if "stored_lengths" in entry:
        stored = StoredParts(_numbers(entry["stored_lengths"]), _numbers(entry["stored_digests"]))
    return FinishedFile(str(entry["name"]), _numbers(entry["digests"]), stored)


def _numbers(text: str) -> array[int]:
    return array("Q", bytes.fromhex(text))


def open_journal(path: Path) -> Journal:
    """Open or create the journal at `path` and lock it; raises what `open_log` does."""
    return Journal(open_log(path))
