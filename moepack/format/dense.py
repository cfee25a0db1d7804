"""What a pack holds beside experts: dense tensors, and the bytes of shards that are no tensor's.

Decoded when it is asked for: a reader of experts needs none of it. Together with the parts these
are all bytes of all shards that are not zero (FORMAT.md, "The dense part").
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

from moepack.errors import PackError
from moepack.format import records
from moepack.format.names import padded_name, padded_text
from moepack.format.sections import Directory
from moepack.format.tables import DataFile


class DenseTensor(NamedTuple):
    """A tensor that is no expert's: what it is, and where its bytes lie.

    `shape` is in GGUF order (contiguous axis first). `offset` counts from the start of file number
    `file` of the index, `shard_offset` from the start of the source's shard number `shard`;
    `length` is bytes, without padding. `inferred` says that the type was unknown to the packer.
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


class ShardBytes(NamedTuple):
    """Bytes of a shard that belong to no tensor: its header, or padding that is not zero."""

    shard: int
    shard_offset: int
    file: int
    offset: int
    length: int
    digest: int


class DenseDecoder:
    """Reads the records of the dense part; raises PackError for one that breaks a rule."""

    def __init__(
        self,
        data: Any,
        directory: Directory,
        files: Sequence[DataFile],
        alignment: int,
        path: str,
    ) -> None:
        self.data = data
        self.directory = directory
        self.files = files
        self.alignment = alignment
        self.path = path

    def tensors(self) -> Iterator[DenseTensor]:
        """Yield the dense tensors in the order of their records."""
        names = set()
        for number in range(self.directory["tensors"].record_count):
            tensor = self.tensor(number)
            if tensor.name in names:
                self._fail(f"tensor {number} ({tensor.name})", "another tensor has the same name")
            names.add(tensor.name)
            yield tensor

    def shard_bytes(self) -> Iterator[ShardBytes]:
        """Yield the ranges of shards that belong to no tensor."""
        for number in range(self.directory["shard_bytes"].record_count):
            yield self.range_of_shard(number)

    def tensor(self, number: int) -> DenseTensor:
        """Read one record of a tensor."""
        record = records.TensorRecord.unpack(self.data, self.directory["tensors"].at(number))
        name = padded_text(record.name, self.path, f"tensor {number}")
        place = f"tensor {number} ({name})"
        if record.flags & ~records.TYPE_INFERRED:
            known = f"none but {records.TYPE_INFERRED:#x}"
            self._fail(place, "unknown flags", known, f"{record.flags:#x}")
        if record.codec != records.CODEC_RAW:
            self._fail(place, "unknown codec", records.CODEC_RAW, record.codec)
        if record.stored_length != record.length:
            expected, found = f"{record.length:,} bytes", f"{record.stored_length:,}"
            self._fail(place, "stored_length is not the tensor's length", expected, found)
        count = record.dimension_count
        axes = (record.ne0, record.ne1, record.ne2, record.ne3)
        if count > len(axes):
            self._fail(place, "dimension_count out of bounds", "0 to 4", f"{count:,}")
        if any(axes[count:]) or math.prod(max(1, axis) for axis in axes) > records.MAX_LENGTH:
            self._fail(place, f"not a shape of {count} dimensions", found=axes)
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

    def range_of_shard(self, number: int) -> ShardBytes:
        """Read one record of shard bytes."""
        at = self.directory["shard_bytes"].at(number)
        record = records.ShardBytesRecord.unpack(self.data, at)
        place = f"shard_bytes {number}"
        if not record.length:
            self._fail(place, "length out of bounds", "1 or more", 0)
        self._check_range(place, record.file, record.offset, record.length)
        self._check_shard(place, record.shard, record.shard_offset, record.length)
        return ShardBytes(
            shard=record.shard,
            shard_offset=record.shard_offset,
            file=record.file,
            offset=record.offset,
            length=record.length,
            digest=record.digest,
        )

    def _check_range(self, place: str, file: int, offset: int, length: int) -> None:
        if file >= len(self.files):
            self._fail(place, "no such file", f"< {len(self.files)}", file)
        if self.files[file].is_second:
            self._fail(place, "in a file of second places", "another file", file)
        end = self.files[file].length
        if offset + length > end:
            found = f"bytes {offset:,} to {offset + length:,}"
            problem = f"ends past the end of {self.files[file].name}"
            self._fail(place, problem, f"<= {end:,}", found)
        if offset % self.alignment and not self.files[file].is_shard:
            expected = f"a multiple of {self.alignment:,}"
            self._fail(place, "offset not aligned", expected, f"{offset:,}")

    def _check_shard(self, place: str, shard: int, offset: int, length: int) -> None:
        if shard >= records.MAX_SHARDS:
            self._fail(place, "shard out of bounds", f"< {records.MAX_SHARDS:,}", shard)
        if offset + length > records.MAX_LENGTH:
            most = f"<= {records.MAX_LENGTH - length:,}"
            self._fail(place, "shard_offset out of bounds", most, f"{offset:,}")

    def _fail(
        self, place: str, problem: str, expected: object = None, found: object = None
    ) -> NoReturn:
        raise PackError(problem, path=self.path, place=place, expected=expected, found=found)
