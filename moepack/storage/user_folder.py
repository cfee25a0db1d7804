"""moepack's own folders among the user's, as the XDG Base Directory Specification names them."""

import os
from pathlib import Path


def user_folder(variable: str, default: str) -> Path | None:
    """Return moepack's folder in the one of `variable`, or in `default` of the home.

    It is made if it does not exist. None if it cannot be made, and for a folder that others may
    write to: its files are trusted.
    """
    # The specification: a relative path is to be ignored.
    base = os.environ.get(variable, "")
    try:
        folder = Path(base) if os.path.isabs(base) else Path.home() / default
        folder = folder / "moepack"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return folder if is_ours(folder) else None
    except (OSError, RuntimeError):  # RuntimeError: there is no home
        return None


def is_ours(path: Path) -> bool:
    """Return whether nobody but this user and root can have written the file at `path`."""
    status = path.stat()
    return status.st_uid in {0, os.geteuid()} and not status.st_mode & 0o022
