"""The folder that a mount covers: what it must be, and how the kernel reads from it."""

import contextlib
import errno
import os
import shlex
import sys
from pathlib import Path

from moepack.errors import MachineError, RequestError
from moepack.sizes import count_text

READ_AHEAD_LENGTH = 1 << 20
"""The longest range that libfuse asks for at once; the kernel's own choice is 128 KiB."""


def check_mount_point(folder: Path) -> None:
    """Raise RequestError for what is no empty folder, or where something is mounted already."""
    try:
        is_mount_point = os.path.ismount(folder)
        names = os.listdir(folder)
    except FileNotFoundError:
        hint = f"mkdir {shlex.quote(os.fspath(folder))}"
        raise RequestError("no such folder to mount at", path=folder, hint=hint) from None
    except NotADirectoryError:
        raise RequestError("not a folder to mount at", path=folder) from None
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
    return f"{program} {shlex.quote(os.fspath(folder))}"


def lengthen_read_ahead(folder: Path) -> None:
    """Let the kernel read ahead more of what is mounted at `folder`, where we may say so.

    A request costs two changes of process, so it is fewer and longer ones that make it fast. Waits
    for the kernel to have mounted it; does nothing for who is not root.
    """
    with contextlib.suppress(OSError):
        device = os.stat(folder).st_dev
        if device == os.stat(folder.parent).st_dev:  # it was unmounted already
            return
        name = f"/sys/class/bdi/{os.major(device)}:{os.minor(device)}/read_ahead_kb"
        with open(name, "w") as file:
            file.write(str(READ_AHEAD_LENGTH >> 10))
