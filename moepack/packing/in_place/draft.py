"""The manifest and the index of a pack that is made in place: two copies of each, read back.

Without them nobody knows where the bytes of a model that is half shards and half pack belong. They
are those of the finished pack to the byte, digests of all parts included, so that every piece can
be told by its digest wherever it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from moepack.common.errors import PackError
from moepack.pack.format import manifest, records
from moepack.pack.format.index import Index
from moepack.pack.format.manifest import Manifest
from moepack.packing.writing.commit import write_proven
from moepack.storage.regular_file import read_back

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
    """Return the draft of a pack; `name` stands for the manifest's file in messages.

    Raises PackError if manifest or index is damaged, or they do not belong together.
    """
    described = manifest.decode(manifest_bytes, name or str(path / manifest.NAME))
    index = Index(index_bytes, str(path / manifest.INDEX_NAME))
    digests = {described.index_entry.digest, index.trailer_digest, index.computed_digest()}
    if not described.digest_matches or len(digests) != 1:
        raise PackError("manifest or index is damaged", path=name or path)
    return Draft(path, described, index, manifest_bytes, index_bytes)


def write(folder: Path, draft: Draft) -> None:
    """Write those copies of a draft into `folder` that are missing or damaged there, synced.

    They are read back from the drive; raises MachineError if one is not as it was written.
    """
    for copy in _COPIES:
        index, body = f"{manifest.INDEX_NAME}{copy}", f"{manifest.NAME}{copy}"
        write_proven(folder, {index: draft.index_bytes, body: draft.manifest_bytes})


def read(folder: Path, path: Path) -> Draft:
    """Return the draft of the pack `path` from the first copy in `folder` that is sound.

    The other one is repaired if need be. Raises PackError if neither is sound.
    """
    problems = []
    for copy in _COPIES:
        name = folder / f"{manifest.NAME}{copy}"
        try:
            index = read_back(folder / f"{manifest.INDEX_NAME}{copy}", records.MAX_INDEX_LENGTH)
            draft = decode(path, read_back(name, manifest.MAX_LENGTH), index, str(name))
        except (OSError, PackError) as error:
            problems.append(error)
            continue
        write(folder, draft)
        return draft
    problem = "both descriptions of the pack are damaged or missing"
    hint = f"do not remove the directory: it holds the model; {problems[0]}"
    raise PackError(problem, path=folder, found=str(problems[-1]), hint=hint)
