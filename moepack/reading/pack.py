"""An open pack: the door of the reading side.

It reads the manifest and maps the index; the data files are opened by a `Reader`. It needs neither
the GGUF parser nor anything that only packing needs.
"""

import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Self

from moepack import digest
from moepack.errors import MachineError, PackError
from moepack.format import manifest
from moepack.format.index import Index
from moepack.reading.budget import DEPTH, MAX_LENGTH
from moepack.reading.catalog import Catalog
from moepack.reading.directory import map_index, read_manifest
from moepack.reading.reader import Reader
from moepack.storage.backend import Backend
from moepack.storage.buffers import BufferPool


class Pack(Catalog):
    """An opened pack. Use `moepack.open(path)` to get one; it is a context manager.

    A Pack may be used from several threads, and after a fork in the child as well; a reader of it
    may not, so the child makes its own.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        folder = Path(path)
        try:
            self._open(folder)
        except MemoryError:
            raise MachineError("no memory is left to open the pack", path=folder) from None

    def _open(self, folder: Path) -> None:
        name = folder / manifest.NAME
        self.manifest = manifest.decode(read_manifest(folder), str(name))
        if not self.manifest.digest_matches:
            raise PackError(
                "the manifest is damaged: its own digest differs",
                path=name,
                hint="run `moepack verify` on the pack",
            )
        self._mapped = map_index(folder)
        index = Index(self._mapped, str(folder / manifest.INDEX_NAME))
        _check_index(index, self.manifest)
        super().__init__(folder, index)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Unmap the index; every call of the pack raises RequestError afterwards."""
        self.forget()
        if isinstance(self._mapped, mmap.mmap):
            self._mapped.close()

    def warm(
        self,
        byte_budget: int,
        *,
        family: str | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> int:
        """Bring the hottest blobs, up to `byte_budget` bytes, into the page cache.

        For engines that map the pack or read it buffered. Reads in the order of the files, so that
        neighbours are one sequential read. Returns the bytes read, and calls `progress` with those
        of each blob. Raises what reading raises.
        """
        keys = self.hottest(byte_budget, family=family)
        blobs = [self.locate(*key, family=family) for key in keys]
        blobs.sort(key=lambda blob: (blob.path, blob.offset))
        scratch = bytearray(max((blob.length for blob in blobs), default=0))
        with self.reader(backend="buffered", check="never") as reader:
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
        check: str = "always",
    ) -> Reader:
        """Return a reader of this pack's data files; the arguments are those of `Reader`."""
        return Reader(
            self,
            backend=backend,
            depth=depth,
            max_in_flight=max_in_flight,
            pool=pool,
            check=check,
        )


def _check_index(index: Index, described: manifest.Manifest) -> None:
    """Check that index and manifest belong together and that no bit of the index has changed."""
    expected = described.index_file.digest
    for name, actual in (("stored", index.stored_digest), ("computed", index.computed_digest())):
        if actual != expected:
            raise PackError(
                f"the index is damaged or of another pack: its {name} digest differs",
                path=index.path,
                place="trailer",
                expected=digest.to_text(expected),
                found=digest.to_text(actual),
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
