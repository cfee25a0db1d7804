"""Files that appear under their name when they are whole, and not before."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from moepack.errors import MachineError, RequestError
from moepack.storage.regular_file import (
    NotRegularError,
    is_stream,
    open_regular,
    require_replaceable,
)


def sync_directory(path: str | os.PathLike[str]) -> None:
    """Make what was created, renamed or removed in a directory outlive a loss of power."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_file(path: str | os.PathLike[str]) -> None:
    """Make the bytes of a file outlive a loss of power."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_synced(path: str | os.PathLike[str], data: bytes | memoryview) -> None:
    """Write a whole file, and sync it."""
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def publish(partial: str | os.PathLike[str], path: str | os.PathLike[str]) -> None:
    """Return a finished, synced file its name; an older file of that name is gone then.

    Raises NotRegularError where something else has that name, and OSError.
    """
    require_replaceable(path)
    os.replace(partial, path)
    sync_directory(Path(path).absolute().parent)


def require_folder_of(path: str | os.PathLike[str]) -> None:
    """Raise RequestError where the folder that is to hold `path` does not exist."""
    folder = Path(os.path.realpath(path) if os.path.islink(path) else path).absolute().parent
    if not folder.is_dir():
        raise RequestError("no such folder", path=folder, hint="make it, or choose another")


def make_folder(path: str | os.PathLike[str]) -> bool:
    """Make a folder, synced; say whether it is new.

    Raises RequestError where no folder holds it or something else has its name, MachineError for
    what the system refuses.
    """
    require_folder_of(path)
    try:
        os.mkdir(path)
    except FileExistsError:
        if not os.path.isdir(path):
            raise RequestError("exists, and is no directory", path=path) from None
        return False
    except OSError as error:
        raise MachineError(f"cannot create: {error.strerror}", path=path) from None
    sync_directory(Path(path).absolute().parent)
    return True


def refuse_existing(
    path: str | os.PathLike[str], *, force: bool = False, append: bool | None = None
) -> None:
    """Raise RequestError where something is that was not asked to be written over, or added to.

    `append` is None where adding is not possible at all.
    """
    if force and append:
        raise RequestError("`force` and `append` at once", path=path)
    if not os.path.exists(path) or force or append:
        return
    hint = "`force=True` writes over it" + ("" if append is None else ", `append=True` adds to it")
    raise RequestError("exists already", path=path, hint=hint)


def refuse_special(path: str | os.PathLike[str]) -> None:
    """Raise RequestError where a device, a FIFO or the like is, which no file takes the place of.

    Whatever is asked for: `--force` is for files.
    """
    try:
        require_replaceable(path)
    except NotRegularError as error:
        hint = "choose another place"
        raise RequestError(f"{error.kind} has this name", path=path, hint=hint) from None


@contextlib.contextmanager
def whole_file(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """Yield a new file to write, beside `path`; rename it when it was written.

    Whatever ends the block early leaves what was at `path`, and nothing else. A link is followed; a
    stream (`/dev/null`, a pipe) has no whole and is written to as it is. Raises MachineError for
    what the system refuses, and for what is neither a file nor a stream.
    """
    target = Path(os.path.realpath(path))
    partial = Path(f"{target}.partial")
    try:
        if is_stream(path):
            with open(path, "wb") as file:
                yield file
            return
        require_replaceable(target)
        with open(partial, "wb", opener=_open_partial) as file:
            try:
                yield file
                file.flush()
                os.fsync(file.fileno())
                publish(partial, target)
            except BaseException:
                with contextlib.suppress(OSError):
                    partial.unlink(missing_ok=True)
                raise
    except NotRegularError as error:
        raise MachineError(f"cannot write: {error.strerror}", path=error.filename) from None
    except OSError as error:
        problem = f"cannot write: {error.strerror or error}"
        raise MachineError(problem, path=os.fspath(path)) from None


def _open_partial(path: str, flags: int) -> int:
    return open_regular(path, flags | os.O_NOFOLLOW)


def write_whole(path: str | os.PathLike[str], data: bytes | memoryview) -> None:
    """Write a file that appears under its name when it is whole. Raises MachineError."""
    with whole_file(path) as file:
        file.write(data)
