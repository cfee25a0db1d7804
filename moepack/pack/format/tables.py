"""The tables of an index that are read as it is opened: files, families and part kinds."""

import math
from typing import Any, NamedTuple

from moepack.pack.format import records
from moepack.pack.format.names import is_plain_name, padded_name, padded_text
from moepack.pack.format.records import later_format
from moepack.pack.format.sections import Directory, IndexBytes


class DataFile(NamedTuple):
    """A file that holds blobs or dense tensors: plain name and length in bytes.

    A file that `is_shard` belongs to the source and is as it was: nothing in it is aligned.
    `has_digests` is false if the digests of the parts and tensors in it are not known.
    """

    name: str
    length: int
    is_shard: bool = False
    has_digests: bool = True

    def known(self, digest: int) -> int | None:
        """Return a digest from a record of bytes in this file; None if the file has none."""
        return digest if self.has_digests else None


class SliceOrigin(NamedTuple):
    """Where the slices of a part lay in the source: `offset` bytes from the start of a shard.

    Expert E's is at `offset + E * stride`. Where each expert had a tensor of its own, `first_slice`
    is the number of expert 0's record in the section `slices`, and the rest is 0.
    """

    shard: int
    offset: int
    stride: int
    first_slice: int | None = None


class PartKind(NamedTuple):
    """A kind of part, the same for every expert of its family in one layer.

    `shape` is one expert's, in GGUF order (contiguous axis first); `length` is bytes, without
    padding. If `inferred`, the packer did not know the type, and the gap between tensors proved the
    length.
    """

    name: str
    type_id: int
    type_name: str
    shape: tuple[int, ...]
    length: int
    inferred: bool
    interleaved_row_count: int
    origin: SliceOrigin


class PackedFamily(NamedTuple):
    """The experts of one kind in one layer, and where their records begin."""

    layer: int
    name: str
    expert_count: int
    part_kinds: tuple[PartKind, ...]
    hotness_measured: bool
    first_blob: int
    first_part: int


class TableDecoder(IndexBytes):
    """Reads the tables once; its methods raise PackError for a record that breaks a rule.

    `_next` counts the records of the families so far.
    """

    def __init__(self, data: Any, directory: Directory, path: str) -> None:
        super().__init__(data, path)
        self._directory = directory
        self._next = {"blobs": 0, "part_kinds": 0, "parts": 0}

    def files(self) -> tuple[DataFile, ...]:
        """Read the table of files."""
        files = tuple(map(self._file, range(self._directory["files"].record_count)))
        if len({file.name.lower() for file in files}) != len(files):
            self._fail("files", "two files have the same name")
        return files

    def families(self) -> tuple[PackedFamily, ...]:
        """Read the tables of families and part kinds."""
        families = tuple(map(self._family, range(self._directory["families"].record_count)))
        for name, count in self._next.items():
            expected = self._directory[name].record_count
            if count != expected:
                problem = "the families' records do not add up to the section's count"
                self._fail(name, problem, f"{expected:,}", f"{count:,}")
        if len({(family.layer, family.name) for family in families}) != len(families):
            self._fail("families", "two families have the same layer and name")
        layers = [family.layer for family in families]
        if layers != sorted(layers):
            self._fail("families", "not in the order of their layers")
        return families

    def _file(self, number: int) -> DataFile:
        place = f"file {number}"
        record = records.FileRecord._make(
            records.FILE.unpack_from(self._data, self._directory["files"].at(number))
        )
        name = padded_text(record.name, self.path, place)
        if not is_plain_name(name):
            self._fail(place, "not a plain file name", actual=repr(name))
        if record.kind not in (records.DATA_FILE, records.SHARD_FILE):
            expected = f"{records.DATA_FILE} or {records.SHARD_FILE}"
            raise later_format("unknown kind of file", self.path, place, expected, record.kind)
        self._check_flags(place, record.flags, records.WITHOUT_DIGESTS)
        self._check_range(place, "length", record.length, 1)
        return DataFile(
            name,
            record.length,
            is_shard=record.kind == records.SHARD_FILE,
            has_digests=not record.flags,
        )

    def _family(self, number: int) -> PackedFamily:
        place = f"family {number}"
        record = records.FamilyRecord._make(
            records.FAMILY.unpack_from(self._data, self._directory["families"].at(number))
        )
        self._check_family(record, place)
        kinds = tuple(
            self._part_kind(record, number, f"{place}: part {number}")
            for number in range(record.parts_per_blob)
        )
        if len({kind.name for kind in kinds}) != len(kinds):
            self._fail(place, "two parts have the same name")
        self._next["blobs"] += record.expert_count
        self._next["part_kinds"] += record.parts_per_blob
        self._next["parts"] += record.expert_count * record.parts_per_blob
        return PackedFamily(
            layer=record.layer,
            name=padded_name(record.name, self.path, place),
            expert_count=record.expert_count,
            part_kinds=kinds,
            hotness_measured=bool(record.flags),
            first_blob=record.first_blob,
            first_part=record.first_part,
        )

    def _check_family(self, record: records.FamilyRecord, place: str) -> None:
        if record.layer >= records.MAX_LAYERS:
            most = f"< {records.MAX_LAYERS:,}"
            self._fail(f"{place}: layer", "out of bounds", most, f"{record.layer:,}")
        self._check_count(place, "expert_count", record.expert_count, records.MAX_EXPERTS)
        self._check_count(place, "parts_per_blob", record.parts_per_blob, records.MAX_PARTS_IN_BLOB)
        for section, expected in self._next.items():
            field = f"first_{section.removesuffix('s')}"
            first = getattr(record, field)
            if first != expected:
                self._fail(f"{place}: {field}", "not the next record", expected, first)
        count = self._directory["part_kinds"].record_count
        end = record.first_part_kind + record.parts_per_blob
        if end > count:
            self._fail(place, "more part kinds than the index holds", f"<= {count:,}", f"{end:,}")
        self._check_flags(place, record.flags, records.HOTNESS_MEASURED)

    def _part_kind(self, family: records.FamilyRecord, number: int, place: str) -> PartKind:
        at = self._directory["part_kinds"].at(family.first_part_kind + number)
        record = records.PartKindRecord._make(records.PART_KIND.unpack_from(self._data, at))
        name = padded_name(record.name, self.path, place)
        count = record.dimension_count
        if count > 2:
            self._fail(place, "dimension_count out of bounds", "0 to 2", count)
        axes = (record.ne0, record.ne1)
        if any(axes[count:]) or 0 in axes[:count] or math.prod(axes[:count]) > records.MAX_LENGTH:
            self._fail(place, f"not a shape of {count} dimensions", actual=axes)
        self._check_range(place, "length", record.length, 1)
        self._check_flags(place, record.flags, records.TYPE_INFERRED | records.OWN_TENSORS)
        return PartKind(
            name=name,
            type_id=record.type_id,
            type_name=padded_name(record.type_name, self.path, place),
            shape=axes[:count],
            length=record.length,
            inferred=bool(record.flags & records.TYPE_INFERRED),
            interleaved_row_count=record.interleaved_row_count,
            origin=self._origin(record, family.expert_count, place),
        )

    def _origin(self, record: records.PartKindRecord, expert_count: int, place: str) -> SliceOrigin:
        has_own = bool(record.flags & records.OWN_TENSORS)
        self._check_shard(place, record.shard)
        stacked = (record.shard, record.shard_offset, record.stride)
        if any(stacked) if has_own else record.first_slice or not record.stride:
            expected = "first_slice alone" if has_own else "a stride, and no first_slice"
            self._fail(place, "its origin is of two kinds, or of none", expected)
        if has_own:
            return SliceOrigin(*stacked, record.first_slice)
        end = record.shard_offset + expert_count * record.stride
        self._check_range(place, "end of its slices", end)
        return SliceOrigin(*stacked)

    def _check_count(self, place: str, field: str, count: int, most: int) -> None:
        if not 1 <= count <= most:
            self._fail(f"{place}: {field}", "out of bounds", f"1 to {most:,}", f"{count:,}")

    def _check_flags(self, place: str, flags: int, allowed: int) -> None:
        if flags & ~allowed:
            self._fail(place, "unknown flags", f"none but {allowed:#x}", f"{flags:#x}")

    def _check_range(self, place: str, what: str, value: int, least: int = 0) -> None:
        if not least <= value <= records.MAX_LENGTH:
            expected = f"{least} to {records.MAX_LENGTH:,}"
            self._fail(place, f"{what} out of bounds", expected, f"{value:,}")
