"""Which format a trace is in, told by its content; and reading it, whatever it is."""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

from moepack.errors import RequestError, TraceError
from moepack.trace import file
from moepack.trace.compressed import Stream
from moepack.trace.formats import arrays, mblt
from moepack.trace.formats.json_lines import AnemllLines, MerLines
from moepack.trace.formats.logs import ExpertLog, FlashLog, has_token_lines
from moepack.trace.formats.rows import TextFormat
from moepack.trace.formats.rows import read as read_text
from moepack.trace.formats.tables import (
    CALL_HEADING,
    ROUTE_HEADING,
    CallTable,
    CountTable,
    GateTable,
    RouteTable,
    TokenTable,
)
from moepack.trace.model import Items, Origin, Unknown
from moepack.trace.validation import Checks

_HEAD_LENGTH = 1 << 20
_ROWS = 50
_NO_BORDERS = frozenset({Unknown.REQUESTS, Unknown.PHASES})
_ONLY_COUNTS = _NO_BORDERS | {Unknown.TOKENS}


class Format(NamedTuple):
    """A format: its name, what it looks like, how it is recognised, and its reader.

    `recognise` gets the first bytes of the file, unpacked.
    """

    name: str
    example: str
    recognise: Callable[[bytes], bool]
    read: Callable[[Stream, Checks], Items]


def read(path: str, checks: Checks, form: str | None = None) -> Items:
    """Read a trace file of any format, piece by piece, in memory that does not grow with it.

    `form` is the name of a format where its content shall not decide. Raises TraceError for a file
    that is wrong or not recognised, MachineError for one that cannot be read.
    """
    with Stream(path) as stream:
        yield from read_from(stream, checks, form)


def read_from(stream: Stream, checks: Checks, form: str | None = None) -> Items:
    """Read a trace as `read` does, from a file that is open; a pipe can be opened but once."""
    yield from _choose(stream, form).read(stream, checks)


def recognise(path: str) -> str:
    """Give the name of the format of a file. Raises TraceError where it is none that is known."""
    with Stream(path) as stream:
        return _choose(stream, None).name


def _choose(stream: Stream, form: str | None) -> Format:
    if form is not None:
        for one in FORMATS:
            if one.name == form:
                return one
        raise RequestError("no such format", expected=", ".join(NAMES), found=form)
    head = stream.peek(_HEAD_LENGTH)
    _refuse(head, stream.path)
    found = [one for one in FORMATS if one.recognise(head)]
    if len(found) == 1:
        return found[0]
    hint = "--format says what it is: " + ", ".join(NAMES)
    if found:
        names = " or ".join(one.name for one in found)
        raise TraceError(f"its content fits {names}", path=stream.path, hint=hint)
    problem = "empty" if not head else "not a trace of a format that is known"
    raise TraceError(problem, path=stream.path, hint=hint)


def _refuse(head: bytes, path: str) -> None:
    """Refuse by name what is often taken for a trace."""
    if head.startswith(b"GGUF"):
        hint = "an imatrix is for `moepack hotness` and `moepack pack --hotness`"
        raise TraceError("a GGUF, not a trace", path=path, hint=hint)
    if head.startswith((b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")):
        problem = "a Python pickle: it could run any program"
        raise TraceError(problem, path=path, hint=arrays.CONVERTER)
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        hint = "iconv -f UTF-16 -t UTF-8 makes it readable"
        raise TraceError("not UTF-8 text but UTF-16", path=path, hint=hint)


def _rows(head: bytes) -> list[bytes]:
    """Give the first lines that are neither comments nor empty; the last may be cut."""
    lines = head.removeprefix(b"\xef\xbb\xbf")[: 1 << 16].split(b"\n")
    lines = [line.strip() for line in (lines if len(lines) == 1 else lines[:-1])]
    return [line for line in lines if line and not line.startswith(b"#")][:_ROWS]


def _text(
    make: Callable[[Checks], TextFormat[Any]],
    name: str,
    unknown: frozenset[Unknown],
    drop: bytes = b"",
) -> Callable[[Stream, Checks], Items]:
    def read_format(stream: Stream, checks: Checks) -> Items:
        yield Origin(name, stream.name, unknown)
        yield from read_text(stream, make(checks), drop)

    return read_format


def _read_expert_log(stream: Stream, checks: Checks) -> Items:
    head = stream.peek(_HEAD_LENGTH)
    is_marked = has_token_lines(head) or (stream.is_file and _has_token_lines(stream.path))
    unknown = frozenset() if b"\n---began prompt" in b"\n" + head else _NO_BORDERS
    yield Origin("expert-log", stream.name, unknown)
    yield from read_text(stream, ExpertLog(checks, is_marked))


def _has_token_lines(path: str) -> bool:
    with Stream(path) as stream:
        tail = b"\n"
        while data := stream.read():
            if has_token_lines(tail + data):
                return True
            tail = data[-16:]
    return False


def _read_route(stream: Stream, checks: Checks) -> Items:
    head = stream.peek(1 << 16)
    stated = re.search(rb"^# model=(\S+).*?n_layer=(\d+) n_expert=(\d+)", head, re.M)
    model = None
    if stated:
        model = stated[1].decode(errors="replace")
        checks.expect_shape(int(stated[2]), int(stated[3]))
    yield Origin("route-csv", stream.name, frozenset(), model)
    yield from read_text(stream, RouteTable(checks))


def _read_counts(stream: Stream, checks: Checks) -> Items:
    stated = re.search(rb"^#\s*tokens\s*=\s*(\d{1,15})\s*$", stream.peek(1 << 16), re.M)
    tokens = int(stated[1]) if stated else None
    yield Origin("counts", stream.name, _ONLY_COUNTS, None, tokens)
    columns = next(iter(_rows(stream.peek(1 << 16))), b",").count(b",") + 1
    yield from read_text(stream, CountTable(checks, b",", min(max(columns, 2), 3)))


def _read_mblt(stream: Stream, checks: Checks) -> Items:
    yield Origin("mblt", stream.name, frozenset({Unknown.REQUESTS}))
    yield from mblt.read_mblt(stream, checks)


def _all_rows(pattern: bytes) -> Callable[[bytes], bool]:
    compiled = re.compile(pattern)

    def fits(head: bytes) -> bool:
        rows = _rows(head)
        return bool(rows) and all(compiled.fullmatch(row) for row in rows)

    return fits


def _any_line(pattern: bytes) -> Callable[[bytes], bool]:
    compiled = re.compile(pattern, re.M)
    return lambda head: compiled.search(head) is not None


def _first_row(pattern: bytes) -> Callable[[bytes], bool]:
    compiled = re.compile(pattern)

    def fits(head: bytes) -> bool:
        rows = _rows(head)
        return bool(rows) and compiled.match(rows[0]) is not None

    return fits


def _is_array_json(head: bytes) -> bool:
    head = head.removeprefix(b"\xef\xbb\xbf")
    start = re.match(rb"\s*[\[{]", head)
    lines = re.match(rb'\s*\{\s*"(seq|token|layer)"', head)
    return start is not None and lines is None


FORMATS: tuple[Format, ...] = (
    Format("moepack", "moepack's own", lambda head: head.startswith(file.MAGIC),
           file.read),
    Format("expert-log", "layer 7 expert 188",
           _any_line(rb"^layer \d+ expert \d+\r?$"), _read_expert_log),
    Format("moe-flash", "moe-flash: layer   7 topk=[3,14]",
           _any_line(rb"moe-flash: layer +\d+ topk=\["),
           _text(FlashLog, "moe-flash", frozenset({Unknown.REQUESTS, Unknown.LATER_TOKENS}))),
    Format("anemll", '{"seq":0,"layer":7,…,"experts":[3,14]}',
           _first_row(rb'\{(?=.*"n_tokens")(?=.*"experts")'),
           _text(AnemllLines, "anemll", frozenset({Unknown.REQUESTS}), b" ")),
    Format("mer", '{"token":0,"layer":7,"experts":[3,14]}',
           _first_row(rb'\{(?=.*"token")(?=.*"layer")(?=.*"experts")(?!.*"n_tokens")'),
           _text(MerLines, "mer", _NO_BORDERS, b" ")),
    Format("route-csv", ROUTE_HEADING.decode() + "…", _first_row(re.escape(ROUTE_HEADING)),
           _read_route),
    Format("call-csv", CALL_HEADING.decode(), _first_row(re.escape(CALL_HEADING)),
           _text(CallTable, "call-csv", _NO_BORDERS)),
    Format("counts", "layer,expert,count", _all_rows(rb"layer,expert(,count)?|\d+,\d+(,\d+)?"),
           _read_counts),
    Format("colibri-usage", "layer expert count",
           _all_rows(rb"\d+ \d+ \d+|-\d .*"),
           _text(lambda checks: CountTable(checks, b" ", 3), "colibri-usage", _ONLY_COUNTS)),
    Format("colibri-route", "call row layer expert:gate…",
           _all_rows(rb"\d+ \d+ \d+( \d+:\S+)+"), _text(GateTable, "colibri-route", _NO_BORDERS)),
    Format("potatomaxx", "token layer expert…",
           _all_rows(rb"\d+( \d+){2,}"), _text(TokenTable, "potatomaxx", _NO_BORDERS)),
    Format("mblt", "mbolt's stream", lambda head: head.startswith(mblt.MBLT_MAGIC),
           _read_mblt),
    Format("npy", "an array [tokens, layers, experts used]",
           lambda head: head.startswith(b"\x93NUMPY"), arrays.read_npy),
    Format("npz", "arrays", lambda head: head.startswith(b"PK\x03\x04"), arrays.read_npz),
    Format("json", "arrays, or mbolt's heat", _is_array_json, arrays.read_json),
)  # fmt: skip
NAMES = tuple(one.name for one in FORMATS)
