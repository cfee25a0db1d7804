"""The folder that a mount covers: what it must be, and the command that ends the mount."""

import errno
import os
import sys
from pathlib import Path

from moepack.errors import MachineError, RequestError
from moepack.escaping import shell_word
from moepack.sizes import count_text


def check_mount_point(folder: Path) -> None:
    """Raise RequestError for what is no empty folder, or where something is mounted already."""
    try:
        is_mount_point = os.path.ismount(folder)
        names = os.listdir(folder)
    except FileNotFoundError:
        hint = f"mkdir {shell_word(os.fspath(folder))}"
        raise RequestError("no such folder to mount at", path=folder, hint=hint) from None
    except NotADirectoryError:
        hint = "name an empty folder: mkdir shards"
        raise RequestError("not a folder to mount at", path=folder, hint=hint) from None
    except OSError as error:
        if error.errno == errno.ENOTCONN:
            problem = "what was mounted here was killed and not unmounted"
            raise RequestError(problem, path=folder, hint=unmount_command(folder)) from None
        raise MachineError(f"cannot read: {error.strerror}", path=folder) from None
    if is_mount_point:
        problem = "something is mounted here already"
        raise RequestError(problem, path=folder, hint=unmount_command(folder))
    if names:
        problem = "the folder to mount at is not empty"
        expected, found = "an empty folder", count_text(len(names), "name")
        raise RequestError(problem, path=folder, expected=expected, found=found)


def unmount_command(folder: Path) -> str:
    """Return what a person types to unmount it."""
    program = "umount" if sys.platform == "darwin" else "fusermount3 -u"
    return f"{program} {shell_word(os.fspath(folder))}"
