"""The journal of a pack in the making: the input's identity, and the files that are safely on disk.

`pack.journal` stands in the target directory until the manifest is committed. Its first line is the
identity of the input, then there is one for each data file that was written whole and synced
*before* its line was, so nothing unsynced is ever trusted.
"""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

from moepack.common.errors import RequestError
from moepack.packing.finished_files import FinishedFile, StoredParts
from moepack.packing.line_log import LineLog


class Journal(LineLog):
    """An open, locked journal; `finished` are its files by name."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.finished: dict[str, FinishedFile] = {}

    def add(self, file: FinishedFile) -> None:
        """Record a file that has been synced, and sync the record."""
        # Before the record: an interruption that comes behind it must not cost the file.
        self.finished[file.name] = file
        entry = {"name": file.name, "digests": file.digests.tobytes().hex()}
        if file.stored is not None:
            entry["stored_lengths"] = file.stored.lengths.tobytes().hex()
            entry["stored_digests"] = file.stored.digests.tobytes().hex()
        try:
            self.append(entry)
        except OSError:
            del self.finished[file.name]
            raise

    def forget(self, name: str) -> None:
        """Record that a file is not finished after all, before it is written again."""
        del self.finished[name]
        self.append({"forgotten": name})

    def resume(self, identity: dict[str, Any]) -> None:
        """Take over the files of an interrupted pack, or begin if it had not begun.

        Raises RequestError if it was packing other input.
        """
        entries = self.trusted()
        begun_with = next(entries, None)
        if begun_with is None:
            self.begin(identity)
            return
        changed = [key for key in identity if begun_with.get(key) != identity[key]]
        if changed:
            problem = "the interrupted pack was made from other input: not the same "
            hint = "remove the directory and pack again, or restore the input"
            raise RequestError(problem + ", ".join(changed), path=self.path, hint=hint)
        count = 1
        for entry in entries:
            try:
                self._take_over(entry)
            except (KeyError, TypeError, ValueError):
                break
            count += 1
        self.keep(count)

    def _take_over(self, entry: dict[str, Any]) -> None:
        """Apply an entry; raise KeyError, TypeError or ValueError if it makes no sense."""
        if "forgotten" in entry:
            self.finished.pop(str(entry["forgotten"]), None)
            return
        stored = None
        if "stored_lengths" in entry:
            lengths, digests = entry["stored_lengths"], entry["stored_digests"]
            stored = StoredParts(_numbers(lengths), _numbers(digests))
        name = str(entry["name"])
        self.finished[name] = FinishedFile(name, _numbers(entry["digests"]), stored)


def _numbers(text: str) -> array[int]:
    return array("Q", bytes.fromhex(text))
