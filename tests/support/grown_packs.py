"""Packs as a later version of the format may write them: longer records, sections that are new."""

import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from moepack import digest
from moepack.format import manifest, records, sections
from moepack.sizes import align

_LATER = b"\xa5\x5a\xff\x01"
"""What stands in bytes that are not known yet: anything but zeros."""


class NewSection(NamedTuple):
    """A section to add; `before` names the one that it stands before, None for the end."""

    name: str
    record_count: int = 3
    record_length: int = 20
    is_required: bool = False
    before: str | None = None


class _Table(NamedTuple):
    name: str
    flags: int
    record_length: int
    records: tuple[bytes, ...]


def grow(
    path: Path,
    *,
    header: int = 0,
    directory: int = 0,
    longer: Mapping[str, int] | None = None,
    new: Iterable[NewSection] = (),
) -> None:
    """Rewrite the pack in the directory `path` as `grown` does, and sign index and manifest."""
    index = (path / manifest.INDEX_NAME).read_bytes()
    index = grown(index, header=header, directory=directory, longer=longer, new=new)
    (path / manifest.INDEX_NAME).write_bytes(index)
    held = manifest.decode((path / manifest.NAME).read_bytes(), str(path))
    described = held._replace(index_entry=manifest.describe_index(index))
    (path / manifest.NAME).write_bytes(manifest.encode(described))


def grown(
    index: bytes,
    *,
    header: int = 0,
    directory: int = 0,
    longer: Mapping[str, int] | None = None,
    new: Iterable[NewSection] = (),
) -> bytes:
    """Return an index with more in it, signed.

    `header` and `directory` are bytes that the header and each record of the directory get behind
    what they have, `longer` those that each record of a section gets.
    """
    head = records.Header.unpack(index, 0)
    longer = longer or {}
    tables = [_longer(table, longer.get(table.name, 0)) for table in _tables(index, head)]
    for section in new:
        names = [table.name for table in tables]
        at = len(tables) if section.before is None else names.index(section.before)
        tables.insert(at, _new_table(section))
    head = head._replace(
        header_length=head.header_length + header,
        section_count=len(tables),
        section_record_length=head.section_record_length + directory,
    )
    return _encoded(head, tables)


def _tables(index: bytes, head: records.Header) -> list[_Table]:
    held = sections.decode(index, head, "index.bin").sections.values()
    return [
        _Table(
            section.name,
            records.SECTION_REQUIRED if section.is_required else 0,
            section.record_length,
            tuple(
                index[section.at(number) : section.at(number + 1)]
                for number in range(section.record_count)
            ),
        )
        for section in held
    ]


def _longer(table: _Table, count: int) -> _Table:
    return table._replace(
        record_length=table.record_length + count,
        records=tuple(record + _later(count) for record in table.records),
    )


def _new_table(section: NewSection) -> _Table:
    flags = records.SECTION_REQUIRED if section.is_required else 0
    held = (_later(section.record_length),) * section.record_count
    return _Table(section.name, flags, section.record_length, held)


def _encoded(head: records.Header, tables: list[_Table]) -> bytes:
    at = head.header_length + len(tables) * head.section_record_length
    directory, bodies = b"", b""
    end = at
    for table in tables:
        offset = align(end, records.SECTION_ALIGNMENT)
        body = b"".join(table.records)
        place = (offset, len(table.records), table.record_length, table.flags)
        record = records.SectionRecord(table.name.encode(), *place).pack()
        directory += record + _later(head.section_record_length - len(record))
        bodies += bytes(offset - end) + body
        end = offset + len(body)
    length = align(end, records.SECTION_ALIGNMENT) + records.TRAILER.size
    first = head._replace(index_length=length).pack()
    signed = first + _later(head.header_length - len(first)) + directory + bodies
    signed += bytes(length - records.TRAILER.size - len(signed))
    return signed + struct.pack("<Q", digest.of(signed))


def _later(count: int) -> bytes:
    return (_LATER * (count // len(_LATER) + 1))[:count]
