"""The files that mark a pack: writers of other files spare them."""

from pathlib import Path

FORMAT = "moepack"
"""The `format` of each manifest."""

MANIFEST_NAME = "manifest.json"

JOURNAL_NAME = "pack.journal"
"""The packer's journal: a directory that has it and no manifest is a pack that is not whole."""

PARTIAL_NAME = ".pull.json"
"""The record of a partial pack: which bytes of a pack elsewhere are in its directory."""

IN_PLACE_NAME = "in-place"
"""The folder in a directory that is turned from shards into a pack in place, or back."""

RECORDS_NAME = "pack.records"
"""The folder of the records of a pack that several write, until it is committed."""

_IN_PLACE_FILES = ("journal", "lock")
_BEING_MADE = (JOURNAL_NAME, RECORDS_NAME, PARTIAL_NAME)
_MARK = f'"format": "{FORMAT}"'.encode()
_HEAD_LENGTH = 4096


def is_in_pack(path: Path) -> bool:
    """Return whether a file lies in a pack, or in one that is being made."""
    return is_pack(path.absolute().parent)


def is_pack(folder: Path) -> bool:
    """Return whether a folder is a pack, or one that is being made."""
    in_place = folder if folder.name == IN_PLACE_NAME else folder / IN_PLACE_NAME
    marks = [folder / name for name in _BEING_MADE] + [in_place / name for name in _IN_PLACE_FILES]
    return _has_manifest(folder) or any(mark.exists() for mark in marks)


def _has_manifest(folder: Path) -> bool:
    """Return whether the manifest.json of a folder is a pack's, and not that of something else."""
    path = folder / MANIFEST_NAME
    try:
        if not path.is_file():
            return False
        with open(path, "rb") as file:
            head = file.read(_HEAD_LENGTH)
    except OSError:
        return False
    return b"".join(_MARK.split()) in b"".join(head.split())
