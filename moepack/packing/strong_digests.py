"""Give an index a SHA-256 of all that it lists (FORMAT.md, "Strong digest")."""

import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from moepack import digest
from moepack.errors import MachineError
from moepack.format import records
from moepack.format.index import Index
from moepack.sizes import align
from moepack.storage.regular_file import open_regular, read_whole
from moepack.storage.thread_pool import ThreadPool

SECTION = "strong_digests"
_PIECE_LENGTH = 1 << 20


class _Extent(NamedTuple):
    """A range of file number `file` of the pack; a frame of so many bytes, or 0 for none."""

    file: int
    offset: int
    length: int
    decoded_length: int = 0


def length_of(part_count: int, tensor_count: int, shard_range_count: int) -> int:
    """Return about how many bytes the section takes in an index."""
    return (part_count + tensor_count + shard_range_count) * records.STRONG_DIGEST.size + 128


def add(index: bytes, paths: Sequence[Path], threads: int) -> bytes:
    """Return an index with a SHA-256 of each part, tensor and shard bytes, read from `paths`.

    Raises MachineError for what cannot be read.
    """
    decoded = Index(index, "index.bin")
    with ExitStack() as stack:
        descriptors = []
        for path in paths:
            descriptors.append(open_regular(path))
            stack.callback(os.close, descriptors[-1])

        def compute(extent: _Extent) -> bytes:
            return _sha256(descriptors[extent.file], extent, paths[extent.file])

        with ThreadPool(max_workers=threads) as pool:
            digests = b"".join(pool.map(compute, list(_extents(decoded))))
    return _with_section(index, decoded, digests)


def _extents(index: Index) -> Iterator[_Extent]:
    """Yield all that has a record, in the order of the section."""
    for family in index.families:
        for expert in range(family.expert_count):
            first = family.first_part + expert * len(family.part_kinds)
            parts = index.parts(first, family.part_kinds)
            for kind, (offset, length, _, file, codec) in zip(
                family.part_kinds, parts, strict=True
            ):
                yield _Extent(file, offset, length, kind.length if codec else 0)
    for tensor in index.tensors():
        yield _Extent(tensor.file, tensor.offset, tensor.length)
    for held in index.shard_bytes():
        yield _Extent(held.file, held.offset, held.length)


def _sha256(descriptor: int, extent: _Extent, path: Path) -> bytes:
    sha256 = hashlib.sha256()
    try:
        for piece in _pieces(descriptor, extent):
            sha256.update(piece)
    except (EOFError, ValueError) as error:
        problem, place = f"what was written is not read back: {error}", f"byte {extent.offset:,}"
        raise MachineError(problem, path=path, place=place) from None
    return sha256.digest()


def _pieces(descriptor: int, extent: _Extent) -> Iterator[bytearray | memoryview]:
    """Yield what an extent holds, decoded where it is a frame."""

    def read_at(offset: int, length: int) -> bytearray:
        return read_whole(descriptor, extent.offset + offset, length)

    if not extent.decoded_length:
        for start in range(0, extent.length, _PIECE_LENGTH):
            yield read_at(start, min(_PIECE_LENGTH, extent.length - start))
        return
    from moepack.storage.frames import FrameStream  # it loads the codec

    yield from FrameStream(read_at, extent.length, extent.decoded_length).pieces(_PIECE_LENGTH)


def _with_section(index: bytes, decoded: Index, data: bytes) -> bytes:
    """Return an index with one section more, behind the others."""
    header = decoded.header
    step = header.section_record_length
    directory_end = header.header_length + header.section_count * step
    count = len(data) // records.STRONG_DIGEST.size
    position = align(directory_end + step, records.SECTION_ALIGNMENT)
    entries, body = b"", b""
    for number, section in enumerate(decoded.directory.sections.values()):
        at = header.header_length + number * step
        record = records.SectionRecord.unpack(index, at)._replace(offset=position)
        known = records.SectionRecord.LAYOUT.size
        entries += record.pack() + index[at + known : at + step]
        held = index[section.offset : section.end]
        body += held + bytes(align(len(held), records.SECTION_ALIGNMENT) - len(held))
        position += align(len(held), records.SECTION_ALIGNMENT)
    name = SECTION.encode()
    new = records.SectionRecord(name, position, count, records.STRONG_DIGEST.size, 0).pack()
    entries += new + bytes(step - len(new))
    body += data + bytes(align(len(data), records.SECTION_ALIGNMENT) - len(data))
    position += align(len(data), records.SECTION_ALIGNMENT)
    length = position + records.TRAILER.size
    changed = header._replace(section_count=header.section_count + 1, index_length=length)
    known = records.Header.LAYOUT.size
    start = changed.pack() + index[known : header.header_length] + entries
    signed = start + bytes(align(len(start), records.SECTION_ALIGNMENT) - len(start)) + body
    return signed + records.TRAILER.pack(digest.of(signed))
