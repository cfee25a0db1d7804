"""Recipes: what a pack is, without its bytes, so that others make the same one of their own GGUF.

    recipe.json     the manifest of the pack, byte for byte
    recipe.index    its index, with the digest of each part and the place where it lay in the source

Whoever has the shards copies each part from there to its offset in the pack. Each has to have its
digest, so the pack that is committed is the same: the manifest is that of the recipe.
"""

from __future__ import annotations

import hashlib
import os
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import Any

from moepack.common import digest
from moepack.common.errors import PackError, RequestError, SourceError, read_failure, write_failure
from moepack.common.paths import AnyPath
from moepack.pack.format import manifest
from moepack.pack.format.index import Index
from moepack.pack.format.manifest import Manifest
from moepack.pack.format.source_entry import ShardEntry, SourceEntry
from moepack.pack.reading.pack import Pack, check_index
from moepack.pack.reading.shard_map import shard_pieces
from moepack.packing.writing.commit import write_proven
from moepack.packing.writing.finished_files import FinishedFile
from moepack.packing.writing.planned_pack import copy_files, source_inputs
from moepack.source.shards import Source
from moepack.storage.atomic import make_folder
from moepack.storage.extents import Extent, NewFile
from moepack.storage.input_file import open_input
from moepack.storage.inputs import Inputs
from moepack.storage.regular_file import open_regular

_MANIFEST_NAME, _INDEX_NAME = "recipe.json", "recipe.index"
_HINT = "pack it with moepack, and share the pack itself"


@dataclass(frozen=True, slots=True)
class RecipeSummary:
    """A recipe of a pack; `length` is its bytes, `data_length` those of the pack's data files."""

    path: str
    pack: str
    length: int
    data_length: int
    shards: tuple[ShardEntry, ...]


def write_recipe(pack: AnyPath, target: AnyPath) -> RecipeSummary:
    """Write the recipe of a pack into the new folder `target`.

    The pack may be in a store, or here in part: its manifest and its index are all that is read.
    Raises PackError for a pack that cannot have one, RequestError for an existing target,
    MachineError.
    """
    with Pack(pack) as opened:
        files = {_MANIFEST_NAME: opened.manifest_bytes, _INDEX_NAME: opened.index_bytes}
        recipe = Recipe(opened.manifest, opened.index, *files.values())
        recipe.check(opened.path)
        folder = Path(target)
        try:
            if not make_folder(folder) and os.listdir(folder):
                hint = "choose a new or an empty folder"
                raise RequestError("exists already", path=target, hint=hint)
            write_proven(folder, files)
        except OSError as error:
            raise write_failure(error, target) from error
        return RecipeSummary(
            path=os.fspath(target),
            pack=os.fspath(pack),
            length=sum(map(len, files.values())),
            data_length=sum(file.length for file in opened.index.files),
            shards=opened.manifest.source.shards,
        )


@dataclass(frozen=True)
class Recipe:
    """A recipe: manifest and index of a pack, and their bytes."""

    manifest: Manifest
    index: Index
    manifest_bytes: bytes
    index_bytes: bytes

    def check(self, path: Path) -> None:
        """Raise PackError if the pack cannot be made by its index alone."""
        problem = None
        if self.index.codecs:
            problem = "some parts are stored by a codec, whose bytes depend on its version"
        elif any(file.is_shard for file in self.index.files):
            problem = "it is an index over shards"
        elif not all(file.has_digests for file in self.index.files):
            problem = "it has no digests"
        if problem is not None:
            raise PackError(f"there is no recipe of it: {problem}", path=path, hint=_HINT)


def load_recipe(folder: AnyPath) -> Recipe:
    """Read the recipe in a folder. Raises PackError if it is damaged or none."""
    path = Path(folder)
    data = _read(path / _MANIFEST_NAME, manifest.MAX_LENGTH)
    described = manifest.decode(data, str(path / _MANIFEST_NAME))
    if not described.digest_matches:
        raise PackError("the recipe is damaged: its own digest differs", path=path / _MANIFEST_NAME)
    index_bytes = _read(path / _INDEX_NAME, described.index_entry.length)
    index = Index(index_bytes, str(path / _INDEX_NAME))
    check_index(index, described)
    recipe = Recipe(described, index, data, index_bytes)
    recipe.check(path)
    return recipe


def _read(path: Path, limit: int) -> bytes:
    try:
        with open(path, "rb", opener=open_regular) as file:
            return file.read(limit + 1)
    except (FileNotFoundError, NotADirectoryError):
        hint = "a recipe is the folder that `moepack recipe` made"
        raise PackError("not a recipe", path=path.parent, hint=hint) from None
    except OSError as error:
        raise read_failure(error, path, PackError) from None


class RecipePack:
    """A pack that is to be made by a recipe from the shards of `source`, as the packer takes it."""

    def __init__(self, recipe: Recipe, source: Source) -> None:
        self._recipe = recipe
        self.source = source
        self.described: SourceEntry = recipe.manifest.source
        self.index_length = len(recipe.index_bytes)
        self.index_name = recipe.manifest.index_entry.name
        self._check_shards()

    def _check_shards(self) -> None:
        """Raise SourceError if the shards are not those that the recipe was made from."""
        entries, shards = self.described.shards, self.source.shards
        if len(shards) != len(entries):
            raise self._another(shards[0].path, f"{len(entries)} shards", f"{len(shards)}")
        for entry, shard in zip(entries, shards, strict=True):
            if shard.file_length != entry.length:
                expected = f"{entry.length:,} bytes"
                raise self._another(shard.path, expected, f"{shard.file_length:,}")
            computed = _sha256(shard.path, entry.header_length)
            if computed != entry.header_sha256:
                raise self._another(shard.path, entry.header_sha256, computed)

    def _another(self, path: str, expected: str, actual: str) -> SourceError:
        names = ", ".join(entry.name for entry in self.described.shards[:3])
        return SourceError(
            "not the model of the recipe",
            path=path,
            expected=expected,
            found=actual,
            hint=f"it was made from {names}: the same files are needed, whatever their names",
        )

    @cached_property
    def files(self) -> dict[str, NewFile]:
        """The data files by name; second places of parts, which may be missing, are left out."""
        extents: dict[int, list[Extent]] = defaultdict(list)
        for shard, piece in shard_pieces(self._recipe.index):
            extents[piece.input].append(
                piece._replace(offset=piece.input_offset, input=shard, input_offset=piece.offset)
            )
        for own in extents.values():
            own.sort(key=attrgetter("offset", "length"))
        return {
            file.name: NewFile(file.name, file.length, extents[number].copy)
            for number, file in enumerate(self._recipe.index.files)
            if not file.is_second
        }

    def identity(self) -> dict[str, Any]:
        """Return the identity of the input, as JSON."""
        return {"recipe": digest.to_text(digest.xxh3(self._recipe.manifest_bytes))}

    def on_disk(self, finished: FinishedFile) -> NewFile | None:
        """Return a finished file as it lies on the disk; None if it cannot be one of these."""
        file = self.files.get(finished.name)
        if file is None or [one.digest for one in file.extents()] != list(finished.digests):
            return None
        return file

    def inputs(self) -> Inputs:
        """Return the shards, to be opened; each must be as it was when its header was read."""
        return source_inputs(self.source)

    def write(
        self,
        names: Collection[str],
        folder: Path,
        inputs: Inputs,
        threads: int,
        advanced: Callable[[int], None],
        finished: Callable[[FinishedFile], None],
    ) -> None:
        """Write and sync the data files `names` in `folder`, as `PlannedPack.write` does."""
        files = [file for name, file in self.files.items() if name in names]
        copy_files(self.source, files, folder, inputs, threads, advanced, finished)

    def check_shard_hashes(self, inputs: Inputs, folder: Path, threads: int) -> None:
        """Do nothing: each part has had its digest."""

    def encode(
        self, finished: Mapping[str, FinishedFile], paths: Sequence[Path], strong: int | None
    ) -> tuple[bytes, bytes]:
        """Return index and manifest of the pack: those of the recipe."""
        return self._recipe.index_bytes, self._recipe.manifest_bytes


def _sha256(path: str, length: int) -> str:
    """Return the SHA-256 of the first `length` bytes of a shard. Raises SourceError."""
    computed = hashlib.sha256()
    try:
        with closing(open_input(path)) as file:
            for piece in file.stream(0, length):
                computed.update(piece)
    except OSError as error:
        raise read_failure(error, path, SourceError) from None
    return computed.hexdigest()
