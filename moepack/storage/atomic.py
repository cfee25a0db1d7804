"""Files that appear under their name when they are whole, and not before."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from moepack.common.errors import MachineError, RequestError
from moepack.common.paths import AnyPath
from moepack.storage.regular_file import (
    NotRegularError,
    is_stream,
    open_regular,
    require_replaceable,
)


def sync_directory(path: AnyPath) -> None:
    """Make names that were created, changed or removed in a directory survive a loss of power."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_synced(path: AnyPath, data: bytes | memoryview) -> None:
    """Write a whole regular file, and sync it."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    with open(open_regular(path, flags), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def publish(partial: AnyPath, path: AnyPath, *, syncs_folder: bool = True) -> None:
    """Give a finished, synced file its name; an older file of that name is gone then.

    The caller syncs the folder if it is not done here. Raises NotRegularError if something other
    than a file has that name, and OSError.
    """
    require_replaceable(path)
    os.replace(partial, path)
    if syncs_folder:
        sync_directory(Path(path).absolute().parent)


def require_folder_of(path: AnyPath) -> None:
    """Raise RequestError if the folder of `path` does not exist."""
    folder = Path(os.path.realpath(path) if os.path.islink(path) else path).absolute().parent
    if not folder.is_dir():
        raise RequestError("no such folder", path=folder, hint="make it, or choose another")


def make_folder(path: AnyPath) -> bool:
    """Make a folder, synced; return whether it is new.

    Raises RequestError if its parent does not exist or something else has its name, MachineError
    if the system refuses.
    """
    require_folder_of(path)
    try:
        os.mkdir(path)
    except FileExistsError:
        if not os.path.isdir(path):
            raise RequestError("exists, and is not a directory", path=path) from None
        return False
    except OSError as error:
        raise MachineError(f"cannot create: {error.strerror}", path=path) from None
    sync_directory(Path(path).absolute().parent)
    return True


def refuse_existing(path: AnyPath, *, force: bool = False) -> None:
    """Raise RequestError if something is there, unless `force`."""
    if os.path.exists(path) and not force:
        raise RequestError("exists already", path=path, hint="`force=True` writes over it")


def refuse_special(path: AnyPath) -> None:
    """Raise RequestError if a device, a FIFO or the like is there, which no file replaces."""
    try:
        require_replaceable(path)
    except NotRegularError as error:
        hint = "choose another place"
        raise RequestError(f"{error.kind} has this name", path=path, hint=hint) from None


@contextlib.contextmanager
def whole_file(path: AnyPath, mode: int = 0o644) -> Iterator[IO[bytes]]:
    """Yield a new file to write, beside `path`; rename it when it was written.

    `mode` has its permissions. An early end of the block, for whatever reason, leaves `path` as it
    was, and nothing else. A link is followed; a stream (`/dev/null`, a pipe) has no whole and is
    written to as it is. Raises MachineError if the system refuses, and for anything that is neither
    a file nor a stream.
    """
    target = Path(os.path.realpath(path))
    partial = Path(f"{target}.partial")
    try:
        if is_stream(path):
            with open(path, "wb") as file:
                yield file
            return
        require_replaceable(target)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
        with open(open_regular(partial, flags, mode), "wb") as file:
            try:
                yield file
                file.flush()
                os.fsync(file.fileno())
                publish(partial, target)
            except BaseException:
                with contextlib.suppress(OSError):
                    partial.unlink(missing_ok=True)
                raise
    except OSError as error:
        at_fault = error.filename if isinstance(error, NotRegularError) else path
        raise MachineError(f"cannot write: {error.strerror or error}", path=at_fault) from None


def write_whole(path: AnyPath, data: bytes | memoryview, mode: int = 0o644) -> None:
    """Write a file that appears under its name when it is whole. Raises MachineError."""
    with whole_file(path, mode) as file:
        file.write(data)
