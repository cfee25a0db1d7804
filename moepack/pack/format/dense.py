"""The dense part of a pack: dense tensors, and the bytes of shards outside of all tensors.

Decoded on demand: a reader of experts needs none of it. Together with the parts these are all bytes
of all shards that are not zero (FORMAT.md, "The dense part").
"""

import math
from collections.abc import Iterator
from typing import NamedTuple, NoReturn

from moepack.pack.format import records
from moepack.pack.format.names import padded_name, padded_text
from moepack.pack.format.records import ShardBytesRecord
from moepack.pack.format.sections import Directory, IndexBytes
from moepack.pack.format.tables import DataFile


class DenseTensor(NamedTuple):
    """A dense tensor: its type and shape, and where its bytes lie.

    `shape` is in GGUF order (contiguous axis first). `offset` counts from the start of file number
    `file` of the index, `shard_offset` from the start of the source's shard number `shard`;
    `length` is bytes, without padding. If `inferred`, the packer did not know the type.
    """

    name: str
    type_id: int
    type_name: str
    shape: tuple[int, ...]
    inferred: bool
    file: int
    offset: int
    length: int
    digest: int
    shard: int
    shard_offset: int


class DensePart(IndexBytes):
    """The dense part of an index; its methods raise PackError for a record that breaks a rule."""

    directory: Directory
    files: tuple[DataFile, ...]
    header: records.Header

    def tensors(self) -> Iterator[DenseTensor]:
        """Yield the dense tensors in the order of their records."""
        names = set()
        for number in range(self.directory["tensors"].record_count):
            tensor = self.tensor(number)
            if tensor.name in names:
                self._fail(f"tensor {number} ({tensor.name})", "another tensor has the same name")
            names.add(tensor.name)
            yield tensor

    def shard_bytes(self) -> Iterator[ShardBytesRecord]:
        """Yield the ranges of shards that belong to no tensor."""
        for number in range(self.directory["shard_bytes"].record_count):
            yield self.shard_range(number)

    def tensor(self, number: int) -> DenseTensor:
        """Return dense tensor `number`."""
        record = records.TensorRecord._make(
            records.TENSOR.unpack_from(self._data, self.directory["tensors"].at(number))
        )
        name = padded_text(record.name, self.path, f"tensor {number}")
        place = f"tensor {number} ({name})"
        if record.flags & ~records.TYPE_INFERRED:
            allowed = f"none but {records.TYPE_INFERRED:#x}"
            self._fail(place, "unknown flags", allowed, f"{record.flags:#x}")
        if record.codec != records.CODEC_RAW:
            self._fail(place, "unknown codec", records.CODEC_RAW, record.codec)
        if record.stored_length != record.length:
            problem = "stored_length is not the tensor's length"
            self._fail(place, problem, f"{record.length:,} bytes", f"{record.stored_length:,}")
        count = record.dimension_count
        axes = (record.ne0, record.ne1, record.ne2, record.ne3)
        if count > len(axes):
            self._fail(place, "dimension_count out of bounds", "0 to 4", f"{count:,}")
        if any(axes[count:]) or math.prod(max(1, axis) for axis in axes) > records.MAX_LENGTH:
            self._fail(place, f"not a shape of {count} dimensions", actual=axes)
        self._check_range(place, record.file, record.offset, record.length)
        self._check_shard(place, record.shard, record.shard_offset, record.length)
        return DenseTensor(
            name=name,
            type_id=record.type_id,
            type_name=padded_name(record.type_name, self.path, place),
            shape=axes[:count],
            inferred=bool(record.flags),
            file=record.file,
            offset=record.offset,
            length=record.length,
            digest=record.digest,
            shard=record.shard,
            shard_offset=record.shard_offset,
        )

    def shard_range(self, number: int) -> ShardBytesRecord:
        """Return range `number` of those outside of all tensors."""
        at = self.directory["shard_bytes"].at(number)
        record = ShardBytesRecord._make(records.SHARD_BYTES.unpack_from(self._data, at))
        place = f"shard_bytes {number}"
        if not record.length:
            self._fail(place, "length out of bounds", "1 or more", record.length)
        self._check_range(place, record.file, record.offset, record.length)
        self._check_shard(place, record.shard, record.shard_offset, record.length)
        return record

    def _check_range(self, place: str, number: int, offset: int, length: int) -> None:
        if number >= len(self.files):
            self._fail(place, "no such file", f"< {len(self.files)}", number)
        file = self.files[number]
        if offset + length > file.length:
            self._fail_past_end(place, file, offset, length)
        alignment = self.header.tensor_alignment
        if offset % alignment and not file.is_shard:
            self._fail(place, "offset not aligned", f"a multiple of {alignment:,}", f"{offset:,}")

    def _fail_past_end(self, place: str, file: DataFile, offset: int, length: int) -> NoReturn:
        extent = f"bytes {offset:,} to {offset + length:,}"
        self._fail(place, f"ends past the end of {file.name}", f"<= {file.length:,}", extent)
