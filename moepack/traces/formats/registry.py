"""The registry of formats: recognising the format of a file by its content, and reading it.

Traces, counts, importance matrices and moepack's own files alike. A new format is one entry.
"""

import re
from collections.abc import Callable
from typing import NamedTuple

from moepack.common.errors import RequestError, TraceError
from moepack.common.shape import ModelShape
from moepack.traces import file
from moepack.traces.compressed import TraceStream
from moepack.traces.formats import counts, imatrix, logs, tables
from moepack.traces.formats.lines import BLANKS, FileHead, refuse_utf16
from moepack.traces.model import Counts, Items, Origin
from moepack.traces.validation import Checks


class Format(NamedTuple):
    """A format: its name, how it is recognised, and its reader."""

    name: str
    recognise: Callable[[FileHead], bool]
    read: Callable[[TraceStream, Checks], Items]


class ReadOptions(NamedTuple):
    """How traces are read.

    `format` is the name of a format, instead of detecting it. `shape` is the model's: other
    selections are refused. With `lenient` bad lines and selections are skipped and counted.
    """

    format: str | None = None
    shape: ModelShape | None = None
    lenient: bool = False


def read(path: str, checks: Checks, name: str | None = None) -> Items:
    """Read a trace file of any format, piece by piece, in memory that does not grow with it.

    `name` is that of a format, which overrules the content. Raises TraceError for a file that is
    wrong, not recognised, or without any selection, MachineError for one that cannot be read.
    """
    with TraceStream(path) as stream:
        yield from read_as(format_of(stream, name), stream, checks)


def read_as(trace_format: Format, stream: TraceStream, checks: Checks) -> Items:
    """Read an open file in a format. Raises TraceError for faults, and if it has no selections."""
    has_selections = False
    for item in trace_format.read(stream, checks) if stream.peek(1) else ():
        if not isinstance(item, Origin):
            numbers = item.counts if isinstance(item, Counts) else item.starts
            has_selections |= bool(numbers.any())
        yield item
    if not has_selections:
        left_out = sum(checks.warnings.values())
        actual = f"none, and {left_out} left out" if left_out else "none"
        hint = f"it was read as {trace_format.name}: did its writer run to its end?"
        raise checks.error("no selections in it", None, "at least one", actual, hint)


def format_of(stream: TraceStream, name: str | None = None) -> Format:
    """Return the format of an open file, by its content, or the one of that name.

    Raises RequestError for an unknown name, TraceError for content of no format, or of several.
    """
    if name is None:
        head = FileHead(stream)
        refuse_utf16(stream)
        fitting = [one for one in FORMATS if one.recognise(head)]
    else:
        fitting = [one for one in FORMATS if one.name == name]
        if not fitting:
            raise RequestError("no such format", expected=", ".join(NAMES), found=name)
    if len(fitting) == 1:
        return fitting[0]
    names = " or ".join(one.name for one in fitting)
    problem = "not a trace of a format that is known" if head.data else "empty"
    raise TraceError(
        f"its content fits {names}" if fitting else problem,
        path=stream.path,
        hint=f"`format` says what it is: {', '.join(NAMES)}; a script makes `call-csv` of others",
    )


def _first_row(pattern: bytes) -> Callable[[FileHead], bool]:
    match = re.compile(pattern).match
    return lambda head: bool(head.rows) and match(head.rows[0]) is not None


def _is_counts(head: FileHead) -> bool:
    rows = [BLANKS.sub(b",", row) for row in head.rows]
    has_heading = bool(rows) and _COUNT_HEADING.fullmatch(rows[0]) is not None
    return has_heading or (bool(rows) and all(map(_COUNT_ROW.fullmatch, rows)))


_SELECTION = re.compile(rb"^layer \d+ expert \d+$", re.M)
_COUNT_HEADING = re.compile(rb"layer,expert(,count(,held_out)?)?")
_COUNT_ROW = re.compile(_COUNT_HEADING.pattern + rb"|\d+,\d+(,\d+){0,2}")


FORMATS = (
    Format("moepack", lambda head: head.data.startswith(file.MAGIC), file.read),
    Format("expert-log", lambda head: _SELECTION.search(head.text) is not None, logs.read),
    Format("route-csv", _first_row(re.escape(tables.ROUTE_HEADING)), tables.read_route),
    Format("call-csv", _first_row(re.escape(tables.CALL_HEADING)), tables.read_calls),
    Format("counts", _is_counts, counts.read),
    Format("imatrix", lambda head: head.data.startswith(b"GGUF"), imatrix.read),
)
NAMES = tuple(one.name for one in FORMATS)
