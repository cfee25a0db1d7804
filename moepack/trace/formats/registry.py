"""The one registry of formats: which one a file is in, told by its content, and what reads it.

Traces, counts, importance matrices and moepack's own files alike. A new format is one entry.
"""

import os
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

from moepack.errors import RequestError, TraceError
from moepack.shape import ModelShape
from moepack.trace import file, file_frames
from moepack.trace.compressed import TraceStream
from moepack.trace.contents import Contents
from moepack.trace.formats import arrays, counts, imatrix, mblt
from moepack.trace.formats.json_lines import AnemllLines, MerLines
from moepack.trace.formats.logs import ExpertLog, FlashLog
from moepack.trace.formats.number_text import plain_lines, whole_lines, without_blanks
from moepack.trace.formats.rows import Statement, TextFormat, read_rows
from moepack.trace.formats.tables import (
    CALL_HEADING,
    ROUTE_HEADING,
    CallTable,
    GateTable,
    RouteTable,
    TokenTable,
    UsageTable,
    route_shape,
)
from moepack.trace.model import Counts, Item, Items, Origin, Tokens, Unknown
from moepack.trace.validation import Checks

_HEAD_LENGTH = 1 << 20
_ROWS = 50
_ROWS_LENGTH = 1 << 16
_MOST_NAME = 1 << 10
_TOKEN_LINE = re.compile(rb"^[ \t]*---token", re.M)
_NO_BORDERS = frozenset({Unknown.REQUESTS, Unknown.PHASES})
_ONLY_COUNTS = _NO_BORDERS | {Unknown.TOKENS}


class Head:
    """The first bytes of a file, unpacked: as they are, and as lines of text."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    @cached_property
    def text(self) -> bytes:
        """The lines as they will be read; the last may be cut."""
        return without_blanks(plain_lines(self.data))

    @cached_property
    def rows(self) -> list[bytes]:
        """The first lines that are neither comments nor empty, without one that may be cut."""
        lines = self.text[:_ROWS_LENGTH].split(b"\n")
        lines = lines if len(lines) == 1 else lines[:-1]
        return [line for line in lines if line and not line.startswith(b"#")][:_ROWS]


class Format(NamedTuple):
    """A format: its name, what it looks like, how it is recognised, and its reader."""

    name: str
    example: str
    recognise: Callable[[Head], bool]
    read: Callable[[TraceStream, Checks], Items]


class ReadOptions(NamedTuple):
    """How traces are read.

    `format` is the name of a format, where the content shall not decide. `shape` is the model's,
    whose selections alone are taken. With `lenient` what is wrong is left out, and counted.
    """

    format: str | None = None
    shape: ModelShape | None = None
    lenient: bool = False


def read(path: str, checks: Checks, name: str | None = None) -> Items:
    """Read a trace file of any format, piece by piece, in memory that does not grow with it.

    `name` is that of a format where its content shall not decide. Raises TraceError for a file
    that is wrong, not recognised, or without any selection, MachineError for one that cannot be
    read.
    """
    with TraceStream(path) as stream:
        yield from read_as(format_of(stream, name), stream, checks)


def read_as(form: Format, stream: TraceStream, checks: Checks) -> Items:
    """Read a file that is open in a format. Raises TraceError for what is wrong in it.

    That nothing was chosen at all is wrong as well: what was to be measured is not there.
    """
    has_selections = False
    for item in form.read(stream, checks) if stream.peek(1) else ():
        has_selections = has_selections or _has_selections(item)
        yield _with_stated(item, checks) if isinstance(item, Origin) else item
    if not has_selections:
        left_out = sum(checks.warnings.values())
        raise TraceError(
            "no selections in it",
            path=stream.path,
            expected="at least one",
            found=f"none, and {left_out} left out" if left_out else "none",
            hint=f"it was read as {form.name}: did the program that wrote it run to its end?",
        )


def _with_stated(origin: Origin, checks: Checks) -> Origin:
    """Let an origin tell as well what its file said of the model before it."""
    stated = checks.stated
    if stated is None:
        return origin
    count = stated.expert_count if origin.expert_counts is None else None
    used = origin.experts_used or stated.experts_used
    return replace(origin, expert_count=count, experts_used=used)


def _has_selections(item: Item) -> bool:
    if isinstance(item, Counts):
        return bool(item.counts.any())
    return isinstance(item, Tokens) and len(item.layer) > 0


def feed(
    paths: Sequence[str],
    options: ReadOptions,
    *takers: Callable[[Item], None],
    contents: Contents | None = None,
) -> Counter[str]:
    """Read one file after another, and hand each piece to all `takers`.

    Return how much was left out, by problem. Raises what `read` and the takers raise, and
    RequestError for a file whose selections came before, in one of these or in `contents`.
    """
    warnings: Counter[str] = Counter()
    contents = contents or Contents()
    for path in paths:
        try:
            for item in read_file(path, options, contents, warnings):
                for take in takers:
                    take(item)
        except TraceError as error:
            error.path = error.path or path
            raise
    return warnings


def read_file(path: str, options: ReadOptions, contents: Contents, warnings: Counter[str]) -> Items:
    """Read one of the files that belong together; `warnings` counts what is left out, by problem.

    Raises what `read` raises, and RequestError where its selections came before in `contents`.
    """
    checks = Checks(path, options.shape, options.lenient)
    for item in read(path, checks, options.format):
        contents.add(item)
        yield item
    contents.end(path)
    warnings += checks.warnings


def recognise(path: str) -> str:
    """Return the name of the format of a file. Raises TraceError where it is none that is known."""
    with TraceStream(path) as stream:
        return format_of(stream).name


def stated_shape(paths: Sequence[str]) -> ModelShape | None:
    """Return the shape that traces state themselves, with the bytes of experts; None if none does.

    What comes through a pipe can be read once, so it states nothing. Raises TraceError for a shape
    that is none, RequestError where traces are of different shapes.
    """
    found: dict[ModelShape, str] = {}
    for path in filter(os.path.isfile, paths):
        with TraceStream(path) as stream:
            try:
                shape = route_shape(Head(stream.peek(_HEAD_LENGTH)).text)
            except TraceError as error:
                error.path = path
                raise
        if shape is not None:
            found.setdefault(shape, path)
    if len(found) > 1:
        first, other = list(found.values())[:2]
        raise RequestError("traces of different models", path=other, expected=f"as {first}")
    return next(iter(found), None)


def format_of(stream: TraceStream, name: str | None = None) -> Format:
    """Return the format of a file that is open, by its content, or the one that is named."""
    if name is not None:
        for form in FORMATS:
            if form.name == name:
                return form
        raise RequestError("no such format", expected=", ".join(NAMES), found=name)
    head = Head(stream.peek(_HEAD_LENGTH))
    _refuse(head.data, stream.path)
    fitting = [form for form in FORMATS if form.recognise(head)]
    if len(fitting) == 1:
        return fitting[0]
    hint = "`format` says what it is: " + ", ".join(NAMES)
    if fitting:
        names = " or ".join(form.name for form in fitting)
        raise TraceError(f"its content fits {names}", path=stream.path, hint=hint)
    problem = "empty" if not head.data else "not a trace of a format that is known"
    raise TraceError(problem, path=stream.path, hint=hint)


def _refuse(head: bytes, path: str) -> None:
    """Refuse by name what is often taken for a trace."""
    if head.startswith((b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")):
        problem = "a Python pickle: it could run any program"
        raise TraceError(problem, path=path, hint=arrays.CONVERTER)
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        hint = "iconv -f UTF-16 -t UTF-8 makes it readable"
        raise TraceError("not UTF-8 text but UTF-16", path=path, hint=hint)


def _text(
    make: Callable[[Checks], TextFormat[Any]],
    name: str,
    unknown: frozenset[Unknown],
    clean: Callable[[bytes], bytes] = bytes,
    statement: Statement | None = None,
) -> Callable[[TraceStream, Checks], Items]:
    def read_format(stream: TraceStream, checks: Checks) -> Items:
        if statement is not None:
            statement.check_first(Head(stream.peek(_HEAD_LENGTH)).text, checks)
        yield Origin(name, stream.name, unknown)
        yield from read_rows(stream, make(checks), clean)

    return read_format


def _read_expert_log(stream: TraceStream, checks: Checks) -> Items:
    head = Head(stream.peek(_HEAD_LENGTH)).text
    is_marked = _has_token_line(head) or (stream.is_file and _has_token_lines(stream.path))
    unknown = frozenset() if b"\n---began prompt" in b"\n" + head else _NO_BORDERS
    yield Origin("expert-log", stream.name, unknown)
    yield from read_rows(stream, ExpertLog(checks, is_marked))


def _has_token_lines(path: str) -> bool:
    with TraceStream(path) as stream:
        return any(_has_token_line(lines) for lines, _ in whole_lines(stream))


def _has_token_line(lines: bytes) -> bool:
    return b"---token" in lines and _TOKEN_LINE.search(lines) is not None


def _read_route(stream: TraceStream, checks: Checks) -> Items:
    head = Head(stream.peek(_HEAD_LENGTH)).text
    RouteTable.statement.check_first(head, checks)
    model = re.search(rb"^# model=(\S+)", head, re.M)
    name = model[1][:_MOST_NAME].decode(errors="replace") if model else None
    yield Origin("route-csv", stream.name, frozenset(), name)
    yield from read_rows(stream, RouteTable(checks))


def _read_mblt(stream: TraceStream, checks: Checks) -> Items:
    mblt.read_header(stream, checks)
    yield Origin("mblt", stream.name, frozenset({Unknown.REQUESTS}))
    yield from mblt.read_records(stream, checks)


def _all_rows(pattern: bytes) -> Callable[[Head], bool]:
    compiled = re.compile(pattern)

    def fits(head: Head) -> bool:
        return bool(head.rows) and all(compiled.fullmatch(row) for row in head.rows)

    return fits


def _is_counts(head: Head) -> bool:
    rows = [_BLANKS.sub(b"", row) for row in head.rows]
    has_heading = bool(rows) and _COUNT_HEADING.fullmatch(rows[0]) is not None
    return has_heading or (bool(rows) and all(map(_COUNT_ROW.fullmatch, rows)))


_BLANKS = re.compile(rb"(?<=,)[ \t]+|[ \t]+(?=,)")
_COUNT_HEADING = re.compile(rb"layer,expert(,count(,held_out)?)?")
_COUNT_ROW = re.compile(_COUNT_HEADING.pattern + rb"|\d+,\d+(,\d+){0,2}")


def _without_spaces(lines: bytes) -> bytes:
    return lines.replace(b" ", b"")


def _any_line(pattern: bytes) -> Callable[[Head], bool]:
    compiled = re.compile(pattern, re.M)
    return lambda head: compiled.search(head.text) is not None


def _first_row(pattern: bytes) -> Callable[[Head], bool]:
    compiled = re.compile(pattern)

    def fits(head: Head) -> bool:
        return bool(head.rows) and compiled.match(head.rows[0]) is not None

    return fits


def _is_array_json(head: Head) -> bool:
    start = re.match(rb"\s*[\[{]", head.text)
    lines = re.match(rb'\s*\{\s*"(seq|token|layer)"', head.text)
    return start is not None and lines is None


FORMATS: tuple[Format, ...] = (
    Format("moepack", "moepack's own", lambda head: head.data.startswith(file_frames.MAGIC),
           file.read),
    Format("expert-log", "layer 7 expert 188",
           _any_line(rb"^layer \d+ expert \d+$"), _read_expert_log),
    Format("moe-flash", "moe-flash: layer   7 topk=[3,14]",
           _any_line(rb"moe-flash: layer +\d+ topk=\["),
           _text(FlashLog, "moe-flash", frozenset({Unknown.REQUESTS, Unknown.LATER_TOKENS}),
                 statement=FlashLog.statement)),
    Format("anemll", '{"seq":0,"layer":7,…,"experts":[3,14]}',
           _first_row(rb'\{(?=.*"n_tokens")(?=.*"experts")'),
           _text(AnemllLines, "anemll", frozenset({Unknown.REQUESTS}), _without_spaces)),
    Format("mer", '{"token":0,"layer":7,"experts":[3,14]}',
           _first_row(rb'\{(?=.*"token")(?=.*"layer")(?=.*"experts")(?!.*"n_tokens")'),
           _text(MerLines, "mer", _NO_BORDERS, _without_spaces)),
    Format("route-csv", ROUTE_HEADING.decode() + "…", _first_row(re.escape(ROUTE_HEADING)),
           _read_route),
    Format("call-csv", CALL_HEADING.decode(), _first_row(re.escape(CALL_HEADING)),
           _text(CallTable, "call-csv", _NO_BORDERS)),
    Format("counts", counts.EXAMPLE, _is_counts, counts.read),
    Format("imatrix", "llama.cpp's importance matrix",
           lambda head: head.data.startswith(b"GGUF") or imatrix.is_legacy(head.data),
           imatrix.read),
    Format("colibri-usage", "layer expert count",
           _all_rows(rb"\d+ \d+ \d+|-\d .*"),
           _text(UsageTable, "colibri-usage", _ONLY_COUNTS, statement=UsageTable.statement)),
    Format("colibri-route", "call row layer expert:gate…",
           _all_rows(rb"\d+ \d+ \d+( \d+:\S+)+"), _text(GateTable, "colibri-route", _NO_BORDERS)),
    Format("potatomaxx", "token layer expert…",
           _all_rows(rb"\d+( \d+){2,}"), _text(TokenTable, "potatomaxx", _NO_BORDERS)),
    Format("mblt", "mbolt's stream", lambda head: head.data.startswith(mblt.MBLT_MAGIC),
           _read_mblt),
    Format("npy", "an array [tokens, layers, experts used]",
           lambda head: head.data.startswith(b"\x93NUMPY"), arrays.read_npy),
    Format("npz", "arrays", lambda head: head.data.startswith(b"PK\x03\x04"), arrays.read_npz),
    Format("json", "arrays, or mbolt's heat", _is_array_json, arrays.read_json),
)  # fmt: skip
NAMES = tuple(form.name for form in FORMATS)
