"""Make a directory a pack: index and manifest are written, and a rename commits them."""

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from moepack.common.errors import MachineError
from moepack.pack.format import manifest
from moepack.storage.atomic import sync_directory, write_synced
from moepack.storage.page_cache import drop
from moepack.storage.regular_file import read_back

TEMPORARY_NAME = f"{manifest.NAME}.tmp"


class UnsettledError(MachineError):
    """The pack was committed; a later step failed."""


@contextlib.contextmanager
def settling(path: Path, problem: str) -> Iterator[None]:
    """Turn an OSError of a step after the commit into UnsettledError."""
    try:
        yield
    except OSError as error:
        problem = f"the pack is whole, but {problem}: {error.strerror}"
        hint = "find out what is wrong with the drive, then run `moepack verify`"
        raise UnsettledError(problem, path=path, hint=hint) from error


def is_on_drive(path: Path, data: bytes) -> bool:
    """Return whether the drive, rather than the page cache, has a file with these bytes."""
    try:
        return _has_bytes(path, data)
    except OSError:
        return False


def _has_bytes(path: Path, data: bytes) -> bool:
    drop([path])
    return read_back(path, len(data)) == data


def write_proven(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write those of `files` that are missing or wrong in `folder`, synced, and read all back.

    Raises MachineError if the drive does not give back one of them, and OSError.
    """
    for name, data in files.items():
        if not is_on_drive(folder / name, data):
            write_synced(folder / name, data)
    sync_directory(folder)
    for name, data in files.items():
        if not _has_bytes(folder / name, data):
            problem = "the drive returned other bytes than were written"
            hint = "the drive or the memory is failing: the original bytes were kept"
            raise MachineError(problem, path=folder / name, hint=hint)


def commit(path: Path, index_name: str, index: bytes, manifest_bytes: bytes) -> None:
    """Write index and manifest of the pack `path`, read them back, and rename the manifest.

    An index that is there already is left alone: readers may have it open. Raises OSError or
    MachineError before the rename, UnsettledError after it.
    """
    write_proven(path, {index_name: index, TEMPORARY_NAME: manifest_bytes})
    os.replace(path / TEMPORARY_NAME, path / manifest.NAME)
    with settling(path, "may not outlive a loss of power"):
        sync_directory(path)
