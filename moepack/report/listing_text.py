"""The rows of a pack as a table for people, as CSV and as JSON: written one by one."""

import csv
import json
import os
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from operator import attrgetter
from pathlib import Path

from moepack.escaping import one_line, short
from moepack.report.json_text import escape_delete
from moepack.report.listing import BlobRow, Row, TensorRow
from moepack.report.values import UNKNOWN
from moepack.shape import ROUTED_FAMILY
from moepack.sizes import size_text


def table(rows: Iterable[Row]) -> Iterator[str]:
    """Write rows for people: a table of blobs, then one of tensors; yields lines."""
    for kind, group in groupby(rows, attrgetter("kind")):
        yield _HEADINGS[kind]
        line: Callable[[Row], str] = _LINES[kind]
        yield from map(line, group)


def _blob_line(row: BlobRow) -> str:
    family = "" if row.family == ROUTED_FAMILY else f"  {short(row.family)}"
    return (
        f"{row.layer:>5} {row.expert:>6} {row.rank:>9,} {_known(row.hotness):>11} "
        f"{_known(row.offset):>15} {size_text(row.length):>10}  {_file(row.path)}{family}\n"
    )


def _tensor_line(row: TensorRow) -> str:
    shape = "x".join(map(str, row.shape)) or "one value"
    return (
        f"{short(row.name):<26} {row.type:<6} {row.offset:>15,} {size_text(row.length):>10}  "
        f"{_file(row.path)}  {shape}\n"
    )


def _known(number: int | None) -> str:
    return UNKNOWN if number is None else f"{number:,}"


def _file(path: Path | None) -> str:
    return UNKNOWN if path is None else one_line(path.name)


_HEADINGS = {
    "blob": f"{'layer':>5} {'expert':>6} {'rank':>9} {'hotness':>11} "
    f"{'offset':>15} {'length':>10}  file\n",
    "tensor": f"{'tensor':<26} {'type':<6} {'offset':>15} {'length':>10}  file  shape\n",
}
_LINES: dict[str, Callable[..., str]] = {"blob": _blob_line, "tensor": _tensor_line}

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
