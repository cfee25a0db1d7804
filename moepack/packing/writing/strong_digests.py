"""Give an index a SHA-256 of all that it lists (FORMAT.md, "Strong digest")."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

from moepack.common import digest
from moepack.common.errors import MachineError
from moepack.pack.format import records, sections
from moepack.pack.format.index import Index
from moepack.pack.reading.shard_map import shard_pieces
from moepack.storage.copying import read_extent
from moepack.storage.extents import Extent
from moepack.storage.inputs import Inputs
from moepack.storage.thread_pool import ThreadPool

_PIECE_LENGTH = 1 << 20


def add(index: bytes, paths: Sequence[Path], threads: int) -> bytes:
    """Return an index with a SHA-256 of each part, tensor and shard bytes, read from `paths`.

    Raises MachineError for bytes that cannot be read, or have another digest than in the index.
    """
    decoded = Index(index, "index.bin")
    with Inputs(paths, MachineError) as inputs:

        def compute(extent: Extent) -> bytes:
            sha256, xxh3 = hashlib.sha256(), digest.stream()
            buffer = memoryview(bytearray(min(_PIECE_LENGTH, extent.length)))
            for piece in read_extent(inputs, extent, lambda left: buffer[:left]):
                sha256.update(piece)
                xxh3.update(piece)
            if xxh3.intdigest() != extent.digest:
                raise MachineError(
                    "the file was changed after it was written",
                    path=paths[extent.input],
                    place=f"{extent.label} at byte {extent.input_offset:,}",
                    hint="run the same again with `resume=True`: it is written anew",
                )
            return sha256.digest()

        with ThreadPool(max_workers=threads) as pool:
            # In the order of the section.
            extents = [extent for _, extent in shard_pieces(decoded)]
            digests = b"".join(pool.map(compute, extents))
    return _with_section(index, decoded, digests)


def _with_section(index: bytes, decoded: Index, data: bytes) -> bytes:
    """Return an index with one section more, behind the others."""
    old = decoded.directory.sections
    counts = {name: section.record_count for name, section in old.items()}
    counts["strong_digests"] = len(data) // records.STRONG_DIGEST.size
    new = sections.place(counts)
    header = decoded.header._replace(index_length=new.index_length, section_count=len(counts))
    body = bytearray(new.index_length - records.TRAILER.size)
    chunks = {name: index[section.offset : section.end] for name, section in old.items()}
    for name, chunk in (chunks | {"strong_digests": data}).items():
        body[new[name].offset : new[name].offset + len(chunk)] = chunk
    start = records.HEADER.pack(*header) + sections.encode(new)
    body[: len(start)] = start
    return bytes(body) + records.TRAILER.pack(digest.xxh3(body))
