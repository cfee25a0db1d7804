"""The tables of an index that are read as it is opened: files, families and part kinds."""

import math
from typing import Any, NamedTuple, NoReturn

from moepack.errors import PackError
from moepack.format import records
from moepack.format.names import is_plain_name, padded_name, padded_text
from moepack.format.sections import Directory


class DataFile(NamedTuple):
    """A file that holds blobs or dense tensors: plain name and length in bytes.

    `is_shard` says that it is a file of the source as it was: what lies in it is not aligned.
    `has_digests` is false where the digests of the parts and tensors in it are not known.
    `is_second` says that it has second places of parts, and nothing else: it may be missing.
    """

    name: str
    length: int
    is_shard: bool = False
    has_digests: bool = True
    is_second: bool = False

    @property
    def has_blobs(self) -> bool:
        """Whether blobs may lie in it."""
        return not self.is_shard and not self.is_second

    def known(self, digest: int) -> int | None:
        """Return what a record says is the digest of bytes in this file, None where it cannot."""
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
    """What a part is, the same for every expert of its family in one layer.

    `shape` is one expert's, in GGUF order (contiguous axis first); `length` is bytes, without
    padding; `inferred` says that the type was unknown to the packer and the length was proven by
    the gap between tensors.
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


def read_files(data: Any, directory: Directory, path: str) -> tuple[DataFile, ...]:
    """Read the table of files; raise PackError where a rule of the format is broken."""
    decoder = _TableDecoder(data, directory, path)
    files = tuple(decoder.file(number) for number in range(directory["files"].record_count))
    if len({file.name.lower() for file in files}) != len(files):
        decoder.fail("files", "two files have the same name")
    seconds = [file.is_second for file in files]
    if seconds != sorted(seconds):
        decoder.fail("files", "a file of second places stands before another")
    return files


def read_codecs(data: Any, directory: Directory, path: str) -> tuple[str, ...]:
    """Read the names of codecs; raise PackError for one that this version does not know."""
    section = directory["codecs"]
    names = []
    for number in range(section.record_count):
        record = records.CodecRecord.unpack(data, section.at(number))
        name = padded_name(record.name, path, f"codec {number}")
        if name not in records.CODECS:
            raise PackError(
                f"needs the codec {name!r}, which this reader does not know",
                path=path,
                place=f"codec {number}",
                hint="read it with a newer moepack",
            )
        if name in names:
            raise PackError("another codec has the same name", path=path, place=f"codec {number}")
        names.append(name)
    return tuple(names)


def read_families(data: Any, directory: Directory, path: str) -> tuple[PackedFamily, ...]:
    """Read the tables of families and part kinds; raise PackError as `read_files`."""
    decoder = _TableDecoder(data, directory, path)
    families = tuple(decoder.family(number) for number in range(directory["families"].record_count))
    expected = {name: directory[name].record_count for name in decoder.next}
    if decoder.next != expected:
        what = next(name for name in expected if decoder.next[name] != expected[name])
        problem = "the families' records do not add up to the section's count"
        decoder.fail(what, problem, f"{expected[what]:,}", f"{decoder.next[what]:,}")
    keys = [(family.layer, family.name) for family in families]
    if len(set(keys)) != len(keys):
        decoder.fail("families", "two families have the same layer and name")
    layers = [family.layer for family in families]
    if layers != sorted(layers):
        decoder.fail("families", "not in the order of their layers")
    return families


class _TableDecoder:
    """Reads records one by one; `next` counts those that belong to the families so far."""

    def __init__(self, data: Any, directory: Directory, path: str) -> None:
        self.data = data
        self.directory = directory
        self.path = path
        self.next = {"blobs": 0, "part_kinds": 0, "parts": 0}

    def file(self, number: int) -> DataFile:
        place = f"file {number}"
        record = records.FileRecord.unpack(self.data, self.directory["files"].at(number))
        name = padded_text(record.name, self.path, place)
        if not is_plain_name(name):
            self.fail(place, "not a plain file name", found=repr(name))
        if record.kind not in records.FILE_KINDS:
            expected = f"{records.FILE_KINDS[0]} to {records.FILE_KINDS[-1]}"
            self.fail(place, "unknown kind of file", expected, record.kind)
        self.check_flags(place, record.flags, records.WITHOUT_DIGESTS)
        self.check_range(place, "length", record.length, 1)
        return DataFile(
            name,
            record.length,
            is_shard=record.kind == records.SHARD_FILE,
            has_digests=not record.flags,
            is_second=record.kind == records.SECOND_FILE,
        )

    def family(self, number: int) -> PackedFamily:
        place = f"family {number}"
        record = records.FamilyRecord.unpack(self.data, self.directory["families"].at(number))
        self.check_family(record, place)
        kinds = tuple(
            self.part_kind(record, number, f"{place}: part {number}")
            for number in range(record.parts_per_blob)
        )
        if len({kind.name for kind in kinds}) != len(kinds):
            self.fail(place, "two parts have the same name")
        self.next["blobs"] += record.expert_count
        self.next["part_kinds"] += record.parts_per_blob
        self.next["parts"] += record.expert_count * record.parts_per_blob
        return PackedFamily(
            layer=record.layer,
            name=padded_name(record.name, self.path, place),
            expert_count=record.expert_count,
            part_kinds=kinds,
            hotness_measured=bool(record.flags),
            first_blob=record.first_blob,
            first_part=record.first_part,
        )

    def check_family(self, record: records.FamilyRecord, place: str) -> None:
        if record.layer >= records.MAX_LAYERS:
            most = f"< {records.MAX_LAYERS:,}"
            self.fail(f"{place}: layer", "out of bounds", most, f"{record.layer:,}")
        self.check_count(place, "expert_count", record.expert_count, records.MAX_EXPERTS)
        self.check_count(place, "parts_per_blob", record.parts_per_blob, records.MAX_PARTS_IN_BLOB)
        stated = {
            "first_blob": (record.first_blob, self.next["blobs"]),
            "first_part_kind": (record.first_part_kind, self.next["part_kinds"]),
            "first_part": (record.first_part, self.next["parts"]),
        }
        for field, (found, expected) in stated.items():
            if found != expected:
                self.fail(f"{place}: {field}", "not the next record", expected, found)
        held = self.directory["part_kinds"].record_count
        last = record.first_part_kind + record.parts_per_blob
        if last > held:
            self.fail(place, "more part kinds than the index holds", f"<= {held:,}", f"{last:,}")
        self.check_flags(place, record.flags, records.HOTNESS_MEASURED)

    def part_kind(self, family: records.FamilyRecord, number: int, place: str) -> PartKind:
        at = self.directory["part_kinds"].at(family.first_part_kind + number)
        record = records.PartKindRecord.unpack(self.data, at)
        name = padded_name(record.name, self.path, place)
        count = record.dimension_count
        if count > 2:
            self.fail(place, "dimension_count out of bounds", "0 to 2", count)
        shape = self.shape(place, count, (record.ne0, record.ne1))
        self.check_range(place, "length", record.length, 1)
        self.check_flags(place, record.flags, records.TYPE_INFERRED | records.OWN_TENSORS)
        return PartKind(
            name=name,
            type_id=record.type_id,
            type_name=padded_name(record.type_name, self.path, place),
            shape=shape,
            length=record.length,
            inferred=bool(record.flags & records.TYPE_INFERRED),
            interleaved_row_count=record.interleaved_row_count,
            origin=self.origin(record, family.expert_count, place),
        )

    def shape(self, place: str, count: int, axes: tuple[int, ...]) -> tuple[int, ...]:
        if any(axes[count:]) or 0 in axes[:count] or math.prod(axes[:count]) > records.MAX_LENGTH:
            self.fail(place, f"not a shape of {count} dimensions", found=axes)
        return axes[:count]

    def origin(self, record: records.PartKindRecord, expert_count: int, place: str) -> SliceOrigin:
        has_own = bool(record.flags & records.OWN_TENSORS)
        if record.shard >= records.MAX_SHARDS:
            self.fail(place, "shard out of bounds", f"< {records.MAX_SHARDS:,}", record.shard)
        stacked = (record.shard, record.shard_offset, record.stride)
        if any(stacked) if has_own else record.first_slice or not record.stride:
            expected = "first_slice alone" if has_own else "a stride, and no first_slice"
            self.fail(place, "its origin is of two kinds, or of none", expected)
        if has_own:
            return SliceOrigin(0, 0, 0, record.first_slice)
        end = record.shard_offset + expert_count * record.stride
        self.check_range(place, "end of its slices", end)
        return SliceOrigin(*stacked)

    def check_count(self, place: str, field: str, count: int, most: int) -> None:
        if not 1 <= count <= most:
            self.fail(f"{place}: {field}", "out of bounds", f"1 to {most:,}", f"{count:,}")

    def check_flags(self, place: str, flags: int, known: int) -> None:
        if flags & ~known:
            self.fail(place, "unknown flags", f"none but {known:#x}", f"{flags:#x}")

    def check_range(self, place: str, what: str, value: int, least: int = 0) -> None:
        if not least <= value <= records.MAX_LENGTH:
            expected = f"{least} to {records.MAX_LENGTH:,}"
            self.fail(place, f"{what} out of bounds", expected, f"{value:,}")

    def fail(
        self, place: str, problem: str, expected: object = None, found: object = None
    ) -> NoReturn:
        raise PackError(problem, path=self.path, place=place, expected=expected, found=found)
