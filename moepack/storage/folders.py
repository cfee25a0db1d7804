"""Places to write to: one process at a time, with the space that is needed, or the user's own."""

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from moepack.common.errors import MachineError, RequestError
from moepack.common.paths import AnyPath
from moepack.common.sizes import exact_size_text, size_text

_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EBADF)


def try_lock(descriptor: int, path: AnyPath, *, is_needed: bool = False) -> bool:
    """Lock the open file at `path` until it is closed.

    Returns false if another process has locked it, or has just moved or removed it. A file system
    without locks goes without, unless the lock `is_needed`. Raises OSError.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        if is_needed or error.errno not in _NO_LOCKS:
            raise
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def lock(descriptor: int, path: AnyPath) -> None:
    """Lock as `try_lock` does; raises RequestError if another process has the file, and OSError."""
    if not try_lock(descriptor, path):
        hint = "wait until it is done, or choose another place"
        raise RequestError("another moepack is writing here", path=path, hint=hint)


@contextlib.contextmanager
def locked_folder(folder: AnyPath) -> Iterator[None]:
    """Lock a folder during the block. Raises what `lock` does."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        lock(descriptor, os.path.realpath(folder) if os.path.islink(folder) else folder)
        yield
    finally:
        os.close(descriptor)


def free_space(path: Path) -> int:
    """Return the free bytes of the file system that `path` is or will be on."""
    existing = next(p for p in (path.absolute(), *path.absolute().parents) if p.exists())
    status = os.statvfs(existing)
    return status.f_bavail * status.f_frsize


def check_space(path: Path, length: int) -> None:
    """Raise MachineError if fewer than `length` bytes are free for `path`."""
    if (error := shortage(path, length)) is not None:
        raise error


def shortage(path: Path, length: int) -> MachineError | None:
    """Return the error if fewer than `length` bytes are free for `path`; None if they suffice."""
    free = free_space(path)
    if free >= length:
        return None
    text = size_text if size_text(length) != size_text(free) else exact_size_text
    expected, actual = text(length), f"{text(free)} free"
    hint = "free some space or choose another file system"
    return MachineError("not enough space", path=path, expected=expected, found=actual, hint=hint)


def user_folder(variable: str, default: str) -> Path | None:
    """Return moepack's folder in that of an XDG `variable`, or in `default` of the home.

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
