"""An open pack: the door of the reading side.

It reads the manifest and maps the index; the data files are opened by a `Reader`. It needs neither
the GGUF parser nor anything that only packing needs.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from moepack.common.closing import Closing
from moepack.common.errors import MachineError, PackError, RequestError
from moepack.common.escaping import shell_word
from moepack.common.paths import RemotePath, is_remote
from moepack.common.sizes import Size, ranges_text
from moepack.pack.format import manifest
from moepack.pack.format.index import Index
from moepack.pack.format.names import MIRROR_NAME
from moepack.pack.format.records import ShardBytesRecord
from moepack.pack.reading.catalog import Catalog, payload_length
from moepack.pack.reading.directory import (
    is_replaced,
    map_index,
    pack_folder,
    read_any_manifest,
)
from moepack.pack.reading.expert_read import plan_read
from moepack.pack.reading.in_flight import DEPTH, MAX_LENGTH
from moepack.pack.reading.reader import Reader
from moepack.storage.backend import Backend
from moepack.storage.extents import Extent, digests_of
from moepack.storage.regular_file import NotRegularError, open_regular

if TYPE_CHECKING:
    from typing import Any, Self

    from numpy.typing import NDArray

    from moepack.common.shape import ModelShape
    from moepack.pack.reading.copies import Mirror
    from moepack.pack.reading.tensors import Mappings
    from moepack.source.shards import Source


_MAX_HEADER_LENGTH = 256 << 20
"""Ten times the header of the largest vocabulary; a longer one is not compared."""
_HINT = "it was replaced or is not complete: restore it, or run `moepack index` again"


class Pack(Catalog, Closing):
    """An opened pack. Use `moepack.open(path)` to get one; it is a context manager.

    A Pack may be used from several threads, and after a fork in the child as well; a reader of it
    may not, so the child makes its own.

    `source` is the model that it was opened from, if that was the shards as they lie.
    """

    source: Source | None = None

    def __init__(self, path: str | os.PathLike[str]) -> None:
        folder = pack_folder(path)
        try:
            self._open(folder)
        except MemoryError:
            raise MachineError("no memory is left to open the pack", path=folder) from None

    def _open(self, folder: Path) -> None:
        name, data, partial = read_any_manifest(folder)
        try:
            described = _decode_manifest(data, name)
            mapped = map_index(folder, described.index_entry)
            index = Index(mapped, str(folder / described.index_entry.name))
            index.check_manifest(described)
        except PackError:
            if is_replaced(folder, data):
                return self._open(folder)
            raise
        paths = [folder / file.name for file in index.files]
        self._set_up(folder, index, paths, described, data, mapped)
        self.partial = partial
        _check_shards(index, self.file_paths)

    @classmethod
    def over_shards(cls, source: Source, index: Index, manifest_bytes: bytes) -> Self:
        """Return the shards of a source as a pack, by an index over them in memory."""
        paths = [Path(shard.path) for shard in source.shards]
        described = _decode_manifest(manifest_bytes, paths[0])
        pack = cls.__new__(cls)
        pack._set_up(paths[0], index, paths, described, manifest_bytes, index.data)
        pack.source = source
        return pack

    def _set_up(
        self,
        path: Path,
        index: Index,
        file_paths: Sequence[Path],
        described: manifest.Manifest,
        manifest_bytes: bytes,
        mapped: mmap.mmap | bytes,
    ) -> None:
        super().__init__(path, index, file_paths)
        self.manifest = described
        self.manifest_bytes = manifest_bytes
        self._mapped = mapped
        self._mappings: Mappings | None = None

    def __repr__(self) -> str:
        if not self.layers:
            return f"<moepack.Pack {self.path}>"
        contents = "experts and dense part" if self.index.is_whole else "experts"
        layers = f"layers {ranges_text(self.layers)}"
        if self.partial is not None:
            contents += f", some of them elsewhere: in {self.partial.origin}"
        return f"<moepack.Pack {self.path}: {contents}, {layers}, {self.index.blob_count:,} blobs>"

    @property
    def index_bytes(self) -> bytes:
        """A copy of the bytes of the index."""
        self.check_open()
        return bytes(self._mapped)

    @property
    def mirror(self) -> Mirror | None:
        """The mirror of the pack, sound or not; None if it has none."""
        if self.partial is not None or not os.path.islink(self.path / MIRROR_NAME):
            return None
        from moepack.pack.reading.copies import find_mirror  # here, since few packs have one

        self.check_open()
        return find_mirror(self.path, self.index)

    @property
    def shape(self) -> ModelShape:
        """The shape of the model in the pack; a length is bytes without padding."""
        # Here, since engines do without it.
        from moepack.common.shape import FamilyShape, ModelShape

        source = self.manifest.source
        dense_length = sum(tensor.length for tensor in self.dense())
        families = tuple(
            FamilyShape(
                layer=one.layer,
                name=one.name,
                expert_count=one.expert_count,
                expert_length=payload_length(one),
                experts_used=source.experts_used_in(one.name, one.layer),
            )
            for one in self.index.families
        )
        return ModelShape(
            families=families,
            dense_length=dense_length if self.index.is_whole else None,
            mtp_layers=tuple(layer for layer in source.mtp_layers if layer in self.layers),
        )

    def close(self) -> None:
        """Unmap the index; every call of the pack raises RequestError afterwards."""
        self.forget()
        self._mappings = None
        if isinstance(self._mapped, mmap.mmap):
            self._mapped.close()

    def is_local(self, layer: int, expert: int, *, family: str | None = None) -> bool:
        """Return whether an expert is on this machine, and not where a partial pack came from.

        Raises as `locate`.
        """
        reads = plan_read(self, layer, expert, None, family).file_reads
        return not any(isinstance(read.path, RemotePath) for read in reads)

    def require_files(self) -> None:
        """Raise RequestError if the pack's files are not on this machine, but in a store."""
        if is_remote(self.path):
            address = shell_word(str(self.path))
            hint = f"bring it to this machine first: `moepack pull {address} -o NAME.moepack`"
            raise RequestError("the pack is in a store", path=self.path, hint=hint)

    def require_complete(self) -> None:
        """Raise RequestError if the pack is a partial one."""
        if self.partial is not None:
            hint = f"bring the rest first: `moepack pull {self.partial.arguments}`"
            raise RequestError("a part of the pack is not here", path=self.path, hint=hint)

    def tensor(
        self,
        layer: int,
        expert: int,
        part: str,
        *,
        family: str | None = None,
        dequantize: bool = False,
    ) -> NDArray[Any]:
        """Return a part of an expert as a numpy array, read-only; names are those of `locate`.

        F32, F16, F64 and integers have their dtype, BF16 is uint16 (its bits), and the shape of a
        matrix is [rows, columns]. Other types are the uint8 of their blocks, [rows, bytes of a
        row]; a type that interleaves rows has a group of them in each. Nothing is copied or
        compared with a digest: it is a view of the mapped file, and stays valid after the pack is
        closed. Truncating that file meanwhile ends the program (SIGBUS).

        With `dequantize` it is float32 [rows, columns], new memory unless it was F32.

        Raises as `locate`, PackError for a file that is missing or too short, RequestError for a
        type that gguf-py does not dequantize.
        """
        location = self._locate_part(layer, expert, part, family)
        owner, number = self.part_names(layer, family=family)[part]
        kind = owner.part_kinds[number]
        place = f"layer {layer} expert {expert} {location.part}"
        mapped = self._mapped_files(location.path)
        return mapped.array(location, kind, place, kind.interleaved_row_count, dequantize)

    def dense_tensor(self, name: str, *, dequantize: bool = False) -> NDArray[Any]:
        """Return a dense tensor by its name in the source, as `tensor` does a part.

        The slowest axis is the first. Raises as `locate_dense` and `tensor`.
        """
        location = self.locate_dense(name)
        return self._mapped_files(location.path).array(location, location, name, 1, dequantize)

    def _mapped_files(self, path: Path) -> Mappings:
        """Return the mapped files; raise RequestError if the one at `path` is elsewhere."""
        self.require_files()
        if isinstance(path, RemotePath):
            self.require_complete()
        from moepack.pack.reading.tensors import Mappings  # here, since it brings numpy

        self._mappings = self._mappings or Mappings()
        return self._mappings

    def warm(
        self,
        byte_budget: Size,
        *,
        family: str | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> int:
        """Load the hottest blobs, up to `byte_budget`, into the page cache.

        `byte_budget` is bytes, or a text: `8GiB`, or `25%` of the experts. For engines that map the
        pack or read it buffered. Reads in the order of the files, so that neighbours are one
        sequential read. Returns the bytes read, and calls `progress` with those of each blob.
        Raises as reading.
        """
        self.require_files()
        keys = self.hottest(byte_budget, family=family)
        reads = [plan_read(self, *key, None, family) for key in keys]
        if self.partial is not None:  # those that are elsewhere cannot be in the page cache
            reads = [r for r in reads if not isinstance(r.file_reads[0].path, RemotePath)]
        reads.sort(key=lambda read: read.file_reads[0])
        done = 0
        reader = self.reader(backend="buffered", check="never")
        with reader, reader.submit_reads(reads) as batch:
            for expert in batch.completions(in_order=True):
                length = sum(read.length for read in reads[expert.number].file_reads)
                done += length
                if progress is not None:
                    progress(length)
        return done

    def reader(
        self,
        *,
        backend: str | Backend = "auto",
        depth: int = DEPTH,
        max_in_flight: int = MAX_LENGTH,
        check: str = "always",
        mirror: bool = True,
    ) -> Reader:
        """Return a reader of this pack's data files; the arguments are those of `Reader`."""
        return Reader(
            self,
            backend=backend,
            depth=depth,
            max_in_flight=max_in_flight,
            check=check,
            mirror=mirror,
        )


def _decode_manifest(data: bytes, path: Path) -> manifest.Manifest:
    """Decode a manifest. Raises PackError if a bit of it has changed."""
    described = manifest.decode(data, str(path))
    if not described.digest_matches:
        problem = "the manifest is damaged: its own digest differs"
        raise PackError(problem, path=path, hint="run `moepack verify` on the pack")
    return described


def _check_shards(index: Index, paths: Sequence[Path]) -> None:
    """Check the length and the header of each shard that the index lies over.

    A shard that was replaced would be read as if nothing had happened, since its slices mostly have
    no digests. Its header has one, and another model has another header. Raises PackError if one is
    missing or another file, MachineError if the system cannot read it.
    """
    if not any(file.is_shard for file in index.files):
        return
    headers: dict[int, list[ShardBytesRecord]] = {}
    for extent in index.shard_bytes():
        if not extent.shard_offset and extent.length <= _MAX_HEADER_LENGTH:
            headers.setdefault(extent.file, []).append(extent)
    for number, file in enumerate(index.files):
        if file.is_shard:
            _check_shard(paths[number], file.length, headers.get(number, ()))


def _check_shard(path: Path, length: int, headers: Sequence[ShardBytesRecord]) -> None:
    """Check the length of a shard, and its header."""
    digests: Iterable[int] = ()
    try:
        with open(path, "rb", buffering=0, opener=open_regular) as file:
            length_now = os.fstat(file.fileno()).st_size
        if length_now == length:
            extents = [Extent(header.offset, header.length, 0, 0) for header in headers]
            digests = digests_of(path, extents, follows_link=True)
    except FileNotFoundError:
        hint = "it was moved: link to it again, or run `moepack index` again"
        raise PackError("the shard is missing", path=path, hint=hint) from None
    except NotRegularError as error:
        raise PackError("not a regular file", path=path, found=error.kind, hint=_HINT) from None
    except OSError as error:
        raise MachineError(f"cannot read: {error.strerror}", path=path) from None
    if length_now != length:
        problem, expected = "the shard is not as long as it was", f"{length:,} bytes"
        raise PackError(problem, path=path, expected=expected, found=f"{length_now:,}", hint=_HINT)
    if any(header.digest != now for header, now in zip(headers, digests, strict=True)):
        raise PackError("the shard's header is not what it was", path=path, hint=_HINT)
