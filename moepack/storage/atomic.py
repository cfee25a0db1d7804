"""Files that appear under their name when they are whole, and not before."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from moepack.errors import MachineError, RequestError


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
    """Return a finished, synced file its name; an older file of that name is gone then."""
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
        raise RequestError("--force and --append at once", path=path)
    if not os.path.exists(path) or force or append:
        return
    hint = "--force writes over it" + ("" if append is None else ", --append adds to it")
    raise RequestError("exists already", path=path, hint=hint)


@contextlib.contextmanager
def whole_file(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield the path of a new file to write, beside `path`; rename it when it was written.

    Whatever ends the block early leaves what was at `path`, and nothing else. A link is followed;
    what is no file (`/dev/stdout`, a pipe) has no whole and is written to as it is. Raises
    MachineError for what the system refuses.
    """
    target = Path(os.path.realpath(path))
    partial = Path(f"{target}.partial")
    try:
        if target.exists() and not target.is_file():
            yield Path(path)
            return
        try:
            yield partial
            sync_file(partial)
            publish(partial, target)
        except BaseException:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
            raise
    except OSError as error:
        problem = f"cannot write: {error.strerror or error}"
        raise MachineError(problem, path=os.fspath(path)) from None


def write_whole(path: str | os.PathLike[str], data: bytes | memoryview) -> None:
    """Write a file that appears under its name when it is whole. Raises MachineError."""
    with whole_file(path) as partial:
        partial.write_bytes(data)
