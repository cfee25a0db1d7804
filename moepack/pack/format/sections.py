"""The directory of sections of index.bin (FORMAT.md, "The directory of sections").

It lets the format grow: a section is found by its name, a record by the stated length. A section
that this version does not know is passed over, or refused by name if it is required.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple, NoReturn

from moepack.common.errors import PackError
from moepack.common.sizes import align
from moepack.pack.format import records
from moepack.pack.format.names import padded_name
from moepack.pack.format.records import later_format


class Section(NamedTuple):
    """Where a section's records lie: offset from the start of index.bin, lengths in bytes."""

    name: str
    offset: int
    record_count: int
    record_length: int
    is_required: bool

    @property
    def end(self) -> int:
        """The end of the last record."""
        return self.offset + self.record_count * self.record_length

    def at(self, number: int) -> int:
        """Return the offset of record `number`."""
        return self.offset + number * self.record_length


class Directory:
    """All sections of an index by name, and the length of the whole index in bytes."""

    def __init__(self, sections: dict[str, Section], index_length: int) -> None:
        self.sections = sections
        self.index_length = index_length

    def __getitem__(self, name: str) -> Section:
        """Return the section of that name; an empty one if the index has none."""
        return self.sections.get(name) or Section(name, 0, 0, records.RECORD_LENGTHS[name], False)


def place(counts: Mapping[str, int]) -> Directory:
    """Place sections of `counts` records one after the other, as a packer writes them."""
    sections = {}
    directory_length = len(counts) * records.SECTION.size
    position = align(records.HEADER.size + directory_length, records.SECTION_ALIGNMENT)
    for name, count in counts.items():
        is_required = name in records.REQUIRED_SECTIONS
        section = Section(name, position, count, records.RECORD_LENGTHS[name], is_required)
        sections[name] = section
        position = align(section.end, records.SECTION_ALIGNMENT)
    return Directory(sections, position + records.TRAILER.size)


def encode(directory: Directory) -> bytes:
    """Return the bytes of the directory."""
    return b"".join(
        records.SECTION.pack(
            *records.SectionRecord(
                name=section.name.encode(),
                offset=section.offset,
                record_count=section.record_count,
                record_length=section.record_length,
                flags=records.SECTION_REQUIRED if section.is_required else 0,
            )
        )
        for section in directory.sections.values()
    )


class IndexBytes:
    """The bytes of an index, and the error for a rule that they break."""

    def __init__(self, data: Any, path: str) -> None:
        self.path = path
        self._data = data

    def _fail(
        self, place: str, problem: str, expected: object = None, actual: object = None
    ) -> NoReturn:
        raise PackError(problem, path=self.path, place=place, expected=expected, found=actual)

    def _check_shard(self, place: str, shard: int, offset: int = 0, length: int = 0) -> None:
        """Check a place in the source: the number of a shard, and a range of bytes there."""
        if shard >= records.MAX_SHARDS:
            self._fail(place, "shard out of bounds", f"< {records.MAX_SHARDS:,}", shard)
        if offset + length > records.MAX_LENGTH:
            most = f"<= {records.MAX_LENGTH - length:,}"
            self._fail(place, "shard_offset out of bounds", most, f"{offset:,}")


def decode(data: Any, header: records.Header, path: str) -> Directory:
    """Read the directory after `header`; raise PackError if it breaks a rule of the format."""
    return _DirectoryDecoder(data, path).decode(header)


class _DirectoryDecoder(IndexBytes):
    def decode(self, header: records.Header) -> Directory:
        end = header.header_length + header.section_count * header.section_record_length
        sections: dict[str, Section] = {}
        for number in range(header.section_count):
            section = self._section(header, number)
            name = section.name
            if name in sections:
                self._fail(name, "the section stands twice")
            start = self._padded(end, name)
            if section.offset != start:
                self._fail(name, "not where the section before it ends", start, section.offset)
            if section.end > header.index_length:
                most = f"<= {header.index_length:,}"
                self._fail(name, "ends past the index", most, f"byte {section.end:,}")
            end = section.end
            sections[name] = section
        length = align(end, records.SECTION_ALIGNMENT) + records.TRAILER.size
        if length != header.index_length:
            length_in_header = f"{header.index_length:,} bytes"
            self._fail(
                "index_length", "does not fit the sections", f"{length:,} bytes", length_in_header
            )
        self._padded(end, "the trailer")
        self._check_names(sections)
        self._check_counts(sections)
        return Directory(sections, header.index_length)

    def _check_names(self, sections: dict[str, Section]) -> None:
        for name in records.REQUIRED_SECTIONS:
            if name not in sections:
                self._fail(name, "the section is missing")
        for name, expected in zip(sections, records.FIRST_SECTIONS, strict=False):
            if name != expected:
                problem = "does not begin with files, families and part_kinds"
                self._fail("directory", problem, expected, name)

    def _check_counts(self, sections: dict[str, Section]) -> None:
        """Check the section that has a record for each part, tensor and shard bytes."""
        counts = {name: section.record_count for name, section in sections.items()}
        expected = counts["parts"] + counts.get("tensors", 0) + counts.get("shard_bytes", 0)
        count = counts.get("strong_digests", expected)
        if count != expected:
            problem = "not one for each part, tensor and shard bytes"
            self._fail("strong_digests", problem, f"{expected:,}", f"{count:,}")

    def _section(self, header: records.Header, number: int) -> Section:
        offset = header.header_length + number * header.section_record_length
        record = records.SectionRecord._make(records.SECTION.unpack_from(self._data, offset))
        name = padded_name(record.name, self.path, f"section {number}")
        if record.flags & ~records.SECTION_REQUIRED:
            self._fail(name, "unknown flags", f"0 or {records.SECTION_REQUIRED}", record.flags)
        if not 1 <= record.record_length <= records.MAX_RECORD_LENGTH:
            expected = f"1 to {records.MAX_RECORD_LENGTH:,} bytes"
            self._fail(name, "record length out of bounds", expected, record.record_length)
        section = Section(name, *record[1:4], is_required=bool(record.flags))
        if name in records.RECORD_LENGTHS:
            self._check_records(section)
        elif section.is_required:
            problem = f"needs the section {name!r}, which this reader does not know"
            raise later_format(problem, self.path, "directory")
        return section

    def _check_records(self, section: Section) -> None:
        name, length = section.name, section.record_length
        shortest = records.RECORD_LENGTHS[name]
        step = records.RANK.size if name == "ranks" else 8
        if length < shortest or length % step:
            expected = f"{shortest} bytes or more, a multiple of {step}"
            self._fail(name, "wrong record length", expected, length)
        least, most = records.COUNTS[name]
        count = section.record_count
        if not least <= count <= most:
            self._fail(name, "count out of bounds", f"{least:,} to {most:,}", f"{count:,}")

    def _padded(self, end: int, place: str) -> int:
        """Return where the section after byte `end` starts, and check the zeros before it."""
        start = align(end, records.SECTION_ALIGNMENT)
        if any(self._data[end:start]):
            gap = f"bytes {end:,} to {start:,}"
            self._fail(place, "bytes before it are not zero", "zeros", gap)
        return start
