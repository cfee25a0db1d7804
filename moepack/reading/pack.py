"""An open pack: which experts it holds and where each of them lies.

This is the door of the reading side: it needs neither the GGUF parser nor anything that only
packing needs. It reads the manifest and maps the index; the data files are opened by a `Reader`.
"""

import mmap
import os
from bisect import bisect_right
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Self, overload

from moepack import digest
from moepack.errors import MachineError, PackError, RequestError
from moepack.format import manifest
from moepack.format.index import Family, Index, PartKind
from moepack.reading.budget import DEPTH, MAX_LENGTH
from moepack.reading.reader import Reader
from moepack.sizes import ranges_text
from moepack.storage.backend import Backend
from moepack.storage.buffers import BufferPool

JOURNAL_NAME = "pack.journal"
"""The packer's journal: a directory that has it and no manifest is a pack that is not whole."""


class BlobLocation(NamedTuple):
    """Where one expert's blob lies.

    `offset` counts from the start of the file at `path`, `length` is bytes with padding. `rank` 0
    is the hottest blob of the pack. `hotness` is how often the expert was chosen, None where that
    was not measured.
    """

    layer: int
    expert: int
    family: str
    path: Path
    offset: int
    length: int
    rank: int
    hotness: int | None


class PartLocation(NamedTuple):
    """Where one part lies.

    `offset` counts from the start of the file at `path`, `offset_in_blob` from the blob's. `length`
    is the part's bytes, without padding; `stored_length` is what it takes on disk, the same as long
    as no codec is used. `digest` is the XXH3-64 of the part's bytes.
    """

    layer: int
    expert: int
    part: str
    path: Path
    offset: int
    offset_in_blob: int
    stored_length: int
    length: int
    digest: int
    codec: int


class Pack:
    """An opened pack. Use `moepack.open(path)` to get one; it is a context manager.

    A Pack may be used from several threads. Offsets count from the start of the file they name.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.manifest = manifest.decode(read_manifest(self.path), str(self.path / manifest.NAME))
        if not self.manifest.digest_matches:
            raise PackError(
                "the manifest is damaged: its own digest differs",
                path=self.path / manifest.NAME,
                hint="run `moepack verify` on the pack",
            )
        self._mapped = map_index(self.path)
        self.index = Index(self._mapped, str(self.path / manifest.INDEX_NAME))
        _check_index(self.index, self.manifest)
        self.file_paths = tuple(self.path / file.name for file in self.index.files)
        self._families: dict[tuple[int, str], Family] = {}
        self._main_families: dict[int, Family] = {}
        self._parts: dict[tuple[int, str | None, str], tuple[Family, int]] = {}
        for family in self.index.families:
            self._add(family)
        self._first_blobs = [family.first_blob for family in self.index.families]
        self.layers = tuple(self._main_families)

    def _add(self, family: Family) -> None:
        layer = family.layer
        self._families[layer, family.name] = family
        is_main = self._main_families.setdefault(layer, family) is family
        for number, kind in enumerate(family.part_kinds):
            found = (family, number)
            self._parts[layer, None, kind.name] = self._parts[layer, family.name, kind.name] = found
            for name in (None, family.name) if is_main else (family.name,):
                self._parts.setdefault((layer, name, _short_name(kind.name)), found)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Unmap the index; the pack cannot be used afterwards."""
        self._families.clear()
        self._main_families.clear()
        self._parts.clear()
        if isinstance(self._mapped, mmap.mmap):
            self._mapped.close()

    def families(self, layer: int) -> tuple[str, ...]:
        """Name the families of experts in `layer`, the main one first."""
        self._family(layer, None)
        return tuple(name for number, name in self._families if number == layer)

    def expert_count(self, layer: int, *, family: str | None = None) -> int:
        """Say how many experts `layer` has in `family` (the layer's main one by default)."""
        return self._family(layer, family).expert_count

    def parts(self, layer: int, *, family: str | None = None) -> tuple[PartKind, ...]:
        """List what one expert of `layer` consists of: name, GGML type, shape, length in bytes."""
        return self._family(layer, family).part_kinds

    @overload
    def locate(
        self, layer: int, expert: int, part: None = None, *, family: str | None = None
    ) -> BlobLocation: ...

    @overload
    def locate(
        self, layer: int, expert: int, part: str, *, family: str | None = None
    ) -> PartLocation: ...

    def locate(
        self, layer: int, expert: int, part: str | None = None, *, family: str | None = None
    ) -> BlobLocation | PartLocation:
        """Say where an expert's blob, or one part of it, lies.

        `part` is a full name (`ffn_up_exps.weight`) of any family, or a short one (`up`, `up.bias`)
        of the layer's main family; where `family` is named, either is looked for there. Raises
        RequestError for what the pack does not hold, PackError for a record that breaks the format.
        """
        if part is not None:
            return self._locate_part(layer, expert, part, family)
        owner = self._family(layer, family)
        if not 0 <= expert < owner.expert_count:
            raise self._no_expert(owner, expert)
        offset, length, hotness, rank, file = self.index.blob(owner.first_blob + expert)
        measured = hotness if owner.hotness_measured else None
        path = self.file_paths[file]
        return BlobLocation(layer, expert, owner.name, path, offset, length, rank, measured)

    def _locate_part(self, layer: int, expert: int, part: str, name: str | None) -> PartLocation:
        try:
            family, number = self._parts[layer, name, part]
        except KeyError:
            raise self._no_part(layer, part, name) from None
        if not 0 <= expert < family.expert_count:
            raise self._no_expert(family, expert)
        kind = family.part_kinds[number]
        first = family.first_part + expert * len(family.part_kinds)
        offset, stored_length, stored_digest, file, codec, _ = self.index.part(first + number, kind)
        blob_offset, blob_length, _, _, blob_file = self.index.blob(family.first_blob + expert)
        inside = offset - blob_offset
        if file != blob_file or not 0 <= inside <= blob_length - stored_length:
            raise PackError(
                "a part lies outside its blob",
                path=self.index.path,
                place=f"layer {layer} expert {expert} {kind.name}",
                expected=f"file {blob_file}, bytes {blob_offset} to {blob_offset + blob_length}",
                found=f"file {file}, bytes {offset} to {offset + stored_length}",
            )
        return PartLocation(
            layer,
            expert,
            kind.name,
            self.file_paths[file],
            offset,
            inside,
            stored_length,
            kind.length,
            stored_digest,
            codec,
        )

    def hottest(self, byte_budget: int, *, family: str | None = None) -> list[tuple[int, int]]:
        """List (layer, expert), hottest first, until the next blob would exceed `byte_budget`.

        Counts blobs with their padding, of each layer's main family or of the `family` named.
        Without measured hotness the order is the source's.
        """
        chosen = []
        for rank in range(self.index.blob_count):
            number = self.index.blob_at_rank(rank)
            owner = self.index.families[bisect_right(self._first_blobs, number) - 1]
            wanted = self._main_families[owner.layer].name if family is None else family
            if owner.name != wanted:
                continue
            byte_budget -= self.index.blob(number)[1]
            if byte_budget < 0:
                break
            chosen.append((owner.layer, number - owner.first_blob))
        return chosen

    def warm(
        self,
        byte_budget: int,
        *,
        family: str | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> int:
        """Bring the hottest blobs, up to `byte_budget` bytes, into the page cache.

        For engines that map the pack or read it buffered. Reads in the order of the files, so that
        neighbours are one sequential read; gives the bytes read, and calls `progress` with those of
        each blob. Raises what reading raises.
        """
        keys = self.hottest(byte_budget, family=family)
        blobs = [self.locate(*key, family=family) for key in keys]
        blobs.sort(key=lambda blob: (blob.path, blob.offset))
        scratch = bytearray(max((blob.length for blob in blobs), default=0))
        with self.reader(backend="buffered", check_digests=False) as reader:
            for blob in blobs:
                length = reader.read_into(scratch, blob.layer, blob.expert, family=family)
                if progress is not None:
                    progress(length)
        return sum(blob.length for blob in blobs)

    def reader(
        self,
        *,
        backend: str | Backend = "auto",
        depth: int = DEPTH,
        max_in_flight: int = MAX_LENGTH,
        pool: BufferPool | None = None,
        check_digests: bool = True,
    ) -> Reader:
        """Make a reader of this pack's data files; the arguments are those of `Reader`."""
        return Reader(
            self,
            backend=backend,
            depth=depth,
            max_in_flight=max_in_flight,
            pool=pool,
            check_digests=check_digests,
        )

    def _family(self, layer: int, name: str | None) -> Family:
        try:
            return self._main_families[layer] if name is None else self._families[layer, name]
        except KeyError:
            raise self._no_family(layer, name) from None

    def _no_family(self, layer: int, name: str | None) -> RequestError:
        if not self._main_families:
            return RequestError("the pack is closed", path=self.path)
        if layer not in self._main_families:
            return RequestError(
                f"the pack has no experts in layer {layer}",
                path=self.path,
                hint=f"it holds layers {ranges_text(self.layers)}",
            )
        names = ", ".join(self.families(layer))
        return RequestError(
            f"layer {layer} has no family {name}", path=self.path, hint=f"it has {names}"
        )

    def _no_part(self, layer: int, part: str, family: str | None) -> RequestError:
        self._family(layer, family)
        families = self.families(layer) if family is None else (family,)
        names = [kind.name for name in families for kind in self.parts(layer, family=name)]
        where = f"layer {layer}" if family is None else f"{family} of layer {layer}"
        hint = f"it has {', '.join(names)}"
        return RequestError(f"{where} has no part {part}", path=self.path, hint=hint)

    def _no_expert(self, family: Family, expert: int) -> RequestError:
        return RequestError(
            f"layer {family.layer} has no expert {expert} in {family.name}",
            path=self.path,
            expected=f"0 to {family.expert_count - 1}",
        )


def _short_name(part: str) -> str:
    """Shorten a part's name: `ffn_up_exps.weight` to `up`, `ffn_up_exps.bias` to `up.bias`."""
    stem, _, suffix = part.partition(".")
    projection = stem.removeprefix("ffn_").removesuffix("_exps").removesuffix("_chexps")
    return projection if suffix == "weight" else f"{projection}.{suffix}"


def read_manifest(path: Path) -> bytes:
    """Read manifest.json of the pack at `path`; say what the directory is where there is none."""
    name = path / manifest.NAME
    try:
        with open(name, "rb") as file:
            return file.read(manifest.MAX_LENGTH + 1)
    except (FileNotFoundError, NotADirectoryError):
        raise _not_a_pack(path) from None
    except OSError as error:
        raise MachineError(f"cannot read: {error.strerror}", path=name) from None


def _not_a_pack(path: Path) -> PackError:
    if not path.is_dir():
        problem = "not a pack: not a directory" if path.exists() else "no such pack"
        return PackError(
            problem, path=path, hint="a pack is the directory that `moepack pack` made"
        )
    if (path / JOURNAL_NAME).exists():
        hint = "it was interrupted: run the same `moepack pack` again with --resume"
        return PackError("not a whole pack: no manifest.json", path=path, hint=hint)
    hint = "a pack is the directory that `moepack pack` made"
    return PackError("not a pack: no manifest.json", path=path, hint=hint)


def map_index(path: Path) -> mmap.mmap | bytes:
    """Map index.bin of the pack at `path` into memory, read-only."""
    name = path / manifest.INDEX_NAME
    try:
        with open(name, "rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                return b""
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise PackError("the index is missing", path=name) from None
    except OSError as error:
        raise MachineError(f"cannot read: {error.strerror}", path=name) from None


def _check_index(index: Index, described: manifest.Manifest) -> None:
    """Check that index and manifest belong together and that no bit of the index has changed."""
    expected = described.index_file.digest
    for name, found in (("stored", index.stored_digest), ("computed", index.computed_digest())):
        if found != expected:
            raise PackError(
                f"the index is damaged or of another pack: its {name} digest differs",
                path=index.path,
                place="trailer",
                expected=digest.to_text(expected),
                found=digest.to_text(found),
                hint="run `moepack verify` on the pack",
            )
    if described.index_file.length != index.header.index_length:
        raise PackError(
            "the index is not as long as the manifest says",
            path=index.path,
            expected=described.index_file.length,
            found=index.header.index_length,
        )
    listed = [(entry.name, entry.length) for entry in described.files]
    if listed != list(index.files):
        raise PackError("index and manifest list other files", path=index.path, place="files")
