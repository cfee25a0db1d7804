"""The files of packs, as a writer of other files has to know them: it spares them."""

from pathlib import Path

from moepack.format import manifest
from moepack.format.names import IN_PLACE_NAME, JOURNAL_NAME

_BEING_MADE = (JOURNAL_NAME, f"{IN_PLACE_NAME}/journal")
_MARK = f'"format": "{manifest.FORMAT}"'.encode()
_HEAD_LENGTH = 4096


def is_in_pack(path: Path) -> bool:
    """Return whether a file lies in a pack, or in one that is being made."""
    return is_pack(path.absolute().parent)


def is_pack(folder: Path) -> bool:
    """Return whether a folder is a pack, or one that is being made."""
    if folder.name == IN_PLACE_NAME and (folder / "journal").exists():
        return True
    return _has_manifest(folder) or any((folder / name).exists() for name in _BEING_MADE)


def _has_manifest(folder: Path) -> bool:
    """Return whether the manifest.json of a folder is a pack's, and not that of something else."""
    path = folder / manifest.NAME
    try:
        if not path.is_file():
            return False
        with open(path, "rb") as file:
            head = file.read(_HEAD_LENGTH)
    except OSError:
        return False
    return b"".join(_MARK.split()) in b"".join(head.split())
