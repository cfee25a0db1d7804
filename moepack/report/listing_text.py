"""The rows of a pack as a table for people, as CSV and as JSON: written one by one."""

import csv
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, groupby, islice
from operator import attrgetter
from pathlib import Path

from moepack.escaping import one_line, short
from moepack.report.json_text import escape_delete
from moepack.report.listing import BlobRow, Row, TensorRow
from moepack.report.table import Column, Table
from moepack.report.values import UNKNOWN
from moepack.shape import ROUTED_FAMILY
from moepack.sizes import size_text


def table(rows: Iterable[Row], width: int | None = None) -> Iterator[str]:
    """Write rows for people: a table of blobs, then one of tensors; yields lines.

    A line has up to `width` columns, where that is given: so wide are the cells of the first rows,
    or as those of most models.
    """
    for kind, group in groupby(rows, attrgetter("kind")):
        first = list(islice(group, _MEASURED_ROWS))
        columns, cells = _KINDS[kind](first[0].path is None)
        usual = _USUAL if kind == "blob" else ()
        fitted = Table(columns, list(map(cells, first))).fitted(width, usual)
        yield from _ended(fitted.heading())
        for row in chain(first, group):
            yield fitted.line(cells(row)) + "\n"
        yield from _ended(fitted.note())


def _ended(lines: Iterable[str]) -> Iterator[str]:
    return (f"{line}\n" for line in lines)


_MEASURED_ROWS = 1024
_USUAL = (5, 6, 7, 9, 9, 14)
"""The widths of layer, expert, rank, hotness, length and offset, up to files of 90 GiB."""

_BLOBS = (
    *(Column("layer"), Column("expert"), Column("rank", rank=4), Column("hotness", rank=2)),
    Column("length", rank=1),
)
_PLACED_BLOBS = (*_BLOBS, Column("offset", rank=3), Column("file", "l", rank=3, least=24))
_FAMILY = Column("family", "l", rank=5)
_TENSOR_COLUMNS = (
    *(Column("tensor", "l", least=16), Column("type", "l", rank=2), Column("length", rank=1)),
    *(Column("offset", rank=4), Column("file", "l", rank=4, least=24)),
    Column("shape", "l", rank=3),
)


def _blobs(is_apart: bool) -> tuple[Sequence[Column], Callable[[BlobRow], Sequence[str]]]:
    """Return the columns of blobs, and what makes the cells of one."""

    def cells(row: BlobRow) -> Sequence[str]:
        numbers = (str(row.layer), str(row.expert), f"{row.rank:,}", _known(row.hotness))
        place = () if is_apart else (_known(row.offset), _file(row.path))
        family = "" if row.family == ROUTED_FAMILY else short(row.family)
        return (*numbers, size_text(row.length), *place, family)

    return (*(_BLOBS if is_apart else _PLACED_BLOBS), _FAMILY), cells


def _tensors(_is_apart: bool) -> tuple[Sequence[Column], Callable[[TensorRow], Sequence[str]]]:
    """Return the columns of tensors, and what makes the cells of one."""

    def cells(row: TensorRow) -> Sequence[str]:
        shape = "x".join(map(str, row.shape)) or "one value"
        place = f"{row.offset:,}", _file(row.path)
        return (short(row.name), row.type, size_text(row.length), *place, shape)

    return _TENSOR_COLUMNS, cells


_KINDS: dict[str, Callable[[bool], tuple[Sequence[Column], Callable[..., Sequence[str]]]]] = {
    "blob": _blobs,
    "tensor": _tensors,
}


def _known(number: int | None) -> str:
    return UNKNOWN if number is None else f"{number:,}"


def _file(path: Path | None) -> str:
    return UNKNOWN if path is None else one_line(path.name)


COLUMNS = (
    *("kind", "layer", "expert", "family", "path", "offset", "length", "rank", "hotness"),
    *("name", "type", "shape"),
)
"""Of CSV; what a row does not have, or is not known, is empty."""


def csv_text(rows: Iterable[Row]) -> Iterator[str]:
    """Write rows as CSV with a heading; yields lines. A shape is `2048x768`."""
    line = csv.writer(_Lines(), lineterminator="\n").writerow
    yield line(COLUMNS)
    for row in rows:
        values = row._asdict()
        if isinstance(row, TensorRow):
            values["shape"] = "x".join(map(str, row.shape))
        yield line([row.kind, *map(values.get, COLUMNS[1:])])


class _Lines:
    """A file that gives back what is written to it."""

    def write(self, line: str) -> str:
        return line


def json_text(rows: Iterable[Row]) -> Iterator[str]:
    """Write rows as one JSON object, `blobs` and `tensors`, a row on each line; yields pieces."""
    yield '{\n  "blobs": ['
    encode = json.JSONEncoder(default=os.fspath).encode  # a generic way takes twice as long
    kind, separator = "blob", "\n    "
    for row in rows:
        if row.kind != kind:
            yield _TENSORS
            kind, separator = row.kind, "\n    "
        yield separator + escape_delete(encode(row._asdict()))
        separator = ",\n    "
    if kind == "blob":
        yield _TENSORS
    yield "\n  ]\n}\n"


_TENSORS = '\n  ],\n  "tensors": ['
