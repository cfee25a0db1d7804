"""The journal of a pack in the making: the input's identity, and the files that are safely on disk.

`pack.journal` stands in the target directory until the manifest is committed. Its first line is the
identity of the input, then there is one for each data file that was written whole and synced
*before* its line was, so nothing unsynced is ever trusted.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moepack.common.errors import RequestError
from moepack.common.paths import AnyPath
from moepack.packing.writing.finished_files import from_json, to_json
from moepack.packing.writing.line_log import LineLog
from moepack.storage.extents import FinishedFile


class Journal(LineLog):
    """An open, locked journal; `finished` are its files by name."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.finished: dict[str, FinishedFile] = {}

    def add(self, file: FinishedFile) -> None:
        """Record a file that has been synced, and sync the record."""
        # Before the record: an interruption that comes behind it must not cost the file.
        self.finished[file.name] = file
        try:
            self.append(to_json(file))
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
        check_identity(begun_with, identity, self.path)
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
        file = from_json(entry)
        self.finished[file.name] = file


def check_identity(
    begun_with: Mapping[str, Any], identity: Mapping[str, Any], path: AnyPath
) -> None:
    """Raise RequestError if a pack was begun with other input than `identity` says."""
    changed = [key for key in identity if begun_with.get(key) != identity[key]]
    if changed:
        problem = "the interrupted pack was made from other input: not the same "
        hint = "remove the directory and pack again, or restore the input"
        raise RequestError(problem + ", ".join(changed), path=path, hint=hint)
