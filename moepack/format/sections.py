"""The directory of sections of index.bin (FORMAT.md, "The directory of sections").

It is what lets the format grow: a section is found by its name, a record by the stated length, and
what this version does not know is passed over where it may be, and refused by name where it may
not.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple, NoReturn

from moepack.errors import PackError
from moepack.format import records
from moepack.format.names import padded_name
from moepack.sizes import align


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
    """All sections of an index by name, and what the index takes with them, in bytes."""

    __slots__ = ("index_length", "sections")

    def __init__(self, sections: dict[str, Section], index_length: int) -> None:
        self.sections = sections
        self.index_length = index_length

    def __getitem__(self, name: str) -> Section:
        """Return the section of that name; an empty one where the index has none."""
        return self.sections.get(name) or Section(name, 0, 0, records.RECORD_LENGTHS[name], False)


def place(counts: Mapping[str, int]) -> Directory:
    """Place sections of `counts` records one after the other, as a packer writes them."""
    sections = {}
    directory_length = len(counts) * records.SectionRecord.LAYOUT.size
    position = align(records.Header.LAYOUT.size + directory_length, records.SECTION_ALIGNMENT)
    for name, count in counts.items():
        is_required = name in records.REQUIRED_SECTIONS
        section = Section(name, position, count, records.RECORD_LENGTHS[name], is_required)
        sections[name] = section
        position = align(section.end, records.SECTION_ALIGNMENT)
    return Directory(sections, position + records.TRAILER.size)


def encode(directory: Directory) -> bytes:
    """Return the bytes of the directory."""
    return b"".join(
        records.SectionRecord(
            name=section.name.encode(),
            offset=section.offset,
            record_count=section.record_count,
            record_length=section.record_length,
            flags=records.SECTION_REQUIRED if section.is_required else 0,
        ).pack()
        for section in directory.sections.values()
    )


def decode(data: Any, header: records.Header, path: str) -> Directory:
    """Read the directory after `header`; raise PackError where a rule of the format is broken."""
    return _DirectoryDecoder(data, header, path).decode()


class _DirectoryDecoder:
    def __init__(self, data: Any, header: records.Header, path: str) -> None:
        self.data = data
        self.header = header
        self.path = path

    def decode(self) -> Directory:
        header = self.header
        position = header.header_length + header.section_count * header.section_record_length
        sections: dict[str, Section] = {}
        for number in range(header.section_count):
            section = self.section(number)
            if section.name in sections:
                self.fail(section.name, "the section stands twice")
            position = self.follow(section, position)
            sections[section.name] = section
        length = align(position, records.SECTION_ALIGNMENT) + records.TRAILER.size
        if length != header.index_length:
            expected, found = f"{length:,} bytes", f"{header.index_length:,}"
            self.fail("index_length", "does not fit the sections", expected, found)
        self.padded(position, "the trailer")
        for name in records.NEEDED_SECTIONS:
            if name not in sections:
                self.fail(name, "the section is missing")
        for name, expected in zip(sections, records.FIRST_SECTIONS, strict=False):
            if name != expected:
                problem = "does not begin with files, families and part_kinds"
                self.fail("directory", problem, expected, name)
        self.check_counts(sections)
        return Directory(sections, header.index_length)

    def check_counts(self, sections: dict[str, Section]) -> None:
        """Check that sections with a record for each part, or for all that is read, have it."""
        counts = {name: section.record_count for name, section in sections.items()}
        parts = counts["parts"]
        everything = parts + counts.get("tensors", 0) + counts.get("shard_bytes", 0)
        for name, expected in (
            ("stored_digests", parts),
            ("second_places", parts),
            ("strong_digests", everything),
        ):
            if counts.get(name, expected) != expected:
                problem = "not one for each part"
                if name == "strong_digests":
                    problem += ", tensor and shard bytes"
                self.fail(name, problem, f"{expected:,}", f"{counts[name]:,}")
        if "codecs" not in sections:
            return
        if not sections["codecs"].is_required:
            self.fail("codecs", "not flagged as required")
        if "stored_digests" not in sections:
            self.fail("stored_digests", "the section is missing")

    def section(self, number: int) -> Section:
        offset = self.header.header_length + number * self.header.section_record_length
        record = records.SectionRecord.unpack(self.data, offset)
        place = f"section {number}"
        name = padded_name(record.name, self.path, place)
        if record.flags & ~records.SECTION_REQUIRED:
            self.fail(name, "unknown flags", f"0 or {records.SECTION_REQUIRED}", record.flags)
        section = Section(
            name, record.offset, record.record_count, record.record_length, bool(record.flags)
        )
        if not 1 <= section.record_length <= records.MAX_RECORD_LENGTH:
            expected = f"1 to {records.MAX_RECORD_LENGTH:,} bytes"
            self.fail(name, "record length out of bounds", expected, section.record_length)
        self.check_known(section)
        return section

    def check_known(self, section: Section) -> None:
        """Check a section that this version knows; refuse one that it does not and needs to."""
        name, length = section.name, section.record_length
        known = records.RECORD_LENGTHS.get(name)
        if known is None and section.is_required:
            raise PackError(
                f"needs the section {name!r}, which this reader does not know",
                path=self.path,
                place="directory",
                hint="read it with a newer moepack",
            )
        if known is None:
            return
        step = records.RANK.size if name == "ranks" else 8
        if length < known or length % step:
            expected = f"{known} bytes or more, a multiple of {step}"
            self.fail(name, "wrong record length", expected, length)
        least, most = records.COUNTS[name]
        if not least <= section.record_count <= most:
            self.fail(
                name, "count out of bounds", f"{least:,} to {most:,}", f"{section.record_count:,}"
            )

    def follow(self, section: Section, end: int) -> int:
        """Check that a section starts where the one before it ends; return its own end."""
        expected = self.padded(end, section.name)
        if section.offset != expected:
            self.fail(
                section.name, "not where the section before it ends", expected, section.offset
            )
        if section.end > self.header.index_length:
            most = f"<= {self.header.index_length:,}"
            self.fail(section.name, "ends past the index", most, f"byte {section.end:,}")
        return section.end

    def padded(self, end: int, place: str) -> int:
        """Round up to where the next section starts, and check the zeros before it."""
        start = align(end, records.SECTION_ALIGNMENT)
        if any(self.data[end:start]):
            self.fail(place, "bytes before it are not zero", "zeros", f"bytes {end:,} to {start:,}")
        return start

    def fail(
        self, place: str, problem: str, expected: object = None, found: object = None
    ) -> NoReturn:
        raise PackError(problem, path=self.path, place=place, expected=expected, found=found)
