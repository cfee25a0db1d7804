"""The manifest and the index of a pack that is made in place: two copies of each, read back.

Without them nobody knows where the bytes of a model that is half shards and half pack belong. They
are those of the finished pack to the byte, digests of all parts included, so that every piece can
be told by its digest wherever it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from moepack.errors import MachineError, PackError
from moepack.format import manifest
from moepack.format.index import Index
from moepack.format.manifest import Manifest
from moepack.storage.atomic import sync_directory, write_synced
from moepack.storage.page_cache import drop

_COPIES = ("", ".copy")
NAMES = tuple(f"{name}{copy}" for copy in _COPIES for name in (manifest.NAME, manifest.INDEX_NAME))


@dataclass(frozen=True, slots=True)
class Draft:
    """A pack that is described, and not yet there; `path` is its directory.

    In a draft's folder the index is called `index.bin`, whatever its name in the pack.
    """

    path: Path
    manifest: Manifest
    index: Index
    manifest_bytes: bytes
    index_bytes: bytes


def decode(path: Path, manifest_bytes: bytes, index_bytes: bytes, name: str = "") -> Draft:
    """Return the draft of a pack; `name` is what messages call the file of the manifest.

    Raises PackError where manifest or index is damaged, or they do not belong together.
    """
    described = manifest.decode(manifest_bytes, name or str(path / manifest.NAME))
    index = Index(index_bytes, str(path / manifest.INDEX_NAME))
    digests = {described.index_entry.digest, index.trailer_digest, index.computed_digest()}
    if not described.digest_matches or len(digests) != 1:
        raise PackError("manifest or index is damaged", path=name or path)
    return Draft(path, described, index, manifest_bytes, index_bytes)


def write(folder: Path, draft: Draft) -> None:
    """Write both copies of a draft into `folder`, sync them, and read them back from the drive."""
    for copy in _COPIES:
        _write_copy(folder, draft, copy)
    sync_directory(folder)


def read(folder: Path, path: Path) -> Draft:
    """Return the draft of the pack `path` from the first copy in `folder` that is sound.

    The other one is put right where it is not. Raises PackError where neither is sound.
    """
    problems = []
    for copy in _COPIES:
        names = [folder / f"{name}{copy}" for name in (manifest.NAME, manifest.INDEX_NAME)]
        try:
            manifest_bytes, index_bytes = (name.read_bytes() for name in names)
            draft = decode(path, manifest_bytes, index_bytes, str(names[0]))
        except (OSError, PackError) as error:
            problems.append(error)
            continue
        _mend(folder, draft, [other for other in _COPIES if other != copy])
        return draft
    problem = "both descriptions of the pack are damaged or missing"
    hint = f"do not remove the directory: it holds the model; {problems[0]}"
    raise PackError(problem, path=folder, found=str(problems[-1]), hint=hint)


def _is_at(path: Path, draft: Draft, copy: str) -> bool:
    return _are_at({path / f"{name}{copy}": data for name, data in _files(draft)})


def is_committed(path: Path, draft: Draft) -> bool:
    """Return whether the pack `path` has the manifest and the index of a draft, on the drive."""
    index_path = path / draft.manifest.index_entry.name
    return _are_at({path / manifest.NAME: draft.manifest_bytes, index_path: draft.index_bytes})


def _are_at(files: Mapping[Path, bytes]) -> bool:
    try:
        return all(_read_back(path) == data for path, data in files.items())
    except OSError:
        return False


def _mend(folder: Path, draft: Draft, copies: list[str]) -> None:
    for copy in copies:
        if not _is_at(folder, draft, copy):
            _write_copy(folder, draft, copy)
            sync_directory(folder)


def _write_copy(folder: Path, draft: Draft, copy: str) -> None:
    for name, data in _files(draft):
        write_synced(folder / f"{name}{copy}", data)
    if not _is_at(folder, draft, copy):
        hint = "the drive or the memory is failing: nothing was given up"
        problem = "manifest or index is not read back from the drive as it was written"
        raise MachineError(problem, path=folder, hint=hint)


def _files(draft: Draft) -> tuple[tuple[str, bytes], ...]:
    return (
        (manifest.INDEX_NAME, draft.index_bytes),
        (manifest.NAME, draft.manifest_bytes),
    )


def _read_back(path: Path) -> bytes:
    """Return the bytes of a file from the drive, not from memory."""
    drop([path])
    return path.read_bytes()
