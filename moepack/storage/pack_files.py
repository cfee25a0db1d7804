"""The files of packs, as a writer of other files has to know them: it spares them."""

from pathlib import Path

from moepack.format import manifest
from moepack.format.names import IN_PLACE_NAME, JOURNAL_NAME

_MARKS = (
    (manifest.NAME, manifest.INDEX_NAME),
    (JOURNAL_NAME,),
    (f"{IN_PLACE_NAME}/journal",),
    (f"../{IN_PLACE_NAME}/journal",),
)
"""What stands beside a file of a pack: one that is whole, is being made, or is made in place."""


def is_in_pack(path: Path) -> bool:
    """Say whether a file lies in a pack, or in one that is being made."""
    return is_pack(path.absolute().parent)


def is_pack(folder: Path) -> bool:
    """Say whether a folder is a pack, or one that is being made."""
    marks = _MARKS if folder.name == IN_PLACE_NAME else _MARKS[:-1]
    return any(all((folder / name).exists() for name in mark) for mark in marks)
