"""The rows of a pack as a table for people, as CSV and as JSON: written one by one."""

import csv
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, groupby, islice
from operator import attrgetter
from pathlib import Path
from typing import Any

from moepack.common.escaping import one_line, shorten
from moepack.common.paths import is_remote
from moepack.common.shape import ROUTED_FAMILY
from moepack.common.sizes import size_text
from moepack.inspection.listing import BlobRow, Row, TensorRow
from moepack.report.json_text import escape_delete
from moepack.report.table import Column, Table
from moepack.report.values import number_text


def table(rows: Iterable[Row], width: int | None = None) -> Iterator[str]:
    """Write rows for people: a table of blobs, then one of tensors; yields lines.

    A line has up to `width` columns, if that is given. Cells are as wide as in the first rows, or
    in most models.
    """
    for kind, group in groupby(rows, attrgetter("kind")):
        first = list(islice(group, _MEASURED_ROWS))
        columns, cells = _layout(first[0])
        usual = _USUAL if kind == "blob" else ()
        fitted = Table(columns, list(map(cells, first))).fitted(width, usual)
        yield from (f"{line}\n" for line in fitted.heading())
        for row in chain(first, group):
            yield fitted.line(cells(row)) + "\n"
        yield from (f"{line}\n" for line in fitted.note())


_MEASURED_ROWS = 1024
_USUAL = (5, 6, 7, 9, 9, 14)
"""The widths of layer, expert, rank, hotness, length and offset, up to files of 90 GiB."""

_BLOB_COLUMNS = (
    *(Column("layer"), Column("expert"), Column("rank", rank=4), Column("hotness", rank=2)),
    *(Column("length", rank=1), Column("offset", rank=3), Column("file", "l", rank=3, least=24)),
    Column("family", "l", rank=5),
)
_TENSOR_COLUMNS = (
    *(Column("tensor", "l", least=16), Column("type", "l", rank=2), Column("length", rank=1)),
    *(Column("offset", rank=4), Column("file", "l", rank=4, least=24)),
    Column("shape", "l", rank=3),
)


def _layout(row: Row) -> tuple[Sequence[Column], Callable[[Any], Sequence[str]]]:
    """Return the columns for rows of a kind, and a function for the cells of a row."""
    if isinstance(row, TensorRow):
        return _TENSOR_COLUMNS, _tensor_cells
    return _BLOB_COLUMNS, _blob_cells


def _blob_cells(row: BlobRow) -> Sequence[str]:
    numbers = (str(row.layer), str(row.expert), f"{row.rank:,}", number_text(row.hotness))
    # An expert without a blob has no place; if none has one, these columns are left out.
    place = ("", "") if row.path is None else (number_text(row.offset), _file(row.path))
    family = "" if row.family == ROUTED_FAMILY else shorten(row.family)
    return (*numbers, size_text(row.length), *place, family)


def _tensor_cells(row: TensorRow) -> Sequence[str]:
    shape = "x".join(map(str, row.shape)) or "one value"
    place = f"{row.offset:,}", _file(row.path)
    return (shorten(row.name), row.type, size_text(row.length), *place, shape)


def _file(path: Path) -> str:
    return one_line(str(path) if is_remote(path) else path.name)


COLUMNS = (
    *("kind", "layer", "expert", "family", "path", "offset", "length", "rank", "hotness"),
    *("name", "type", "shape"),
)
"""The columns of CSV; unknown cells are empty."""


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
    """A file that returns each line written to it."""

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
