"""Traces in the logs of engines: other lines in between are ignored."""

import re
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from moepack.traces.compressed import TraceStream
from moepack.traces.formats.assembler import Assembler, Rows
from moepack.traces.formats.number_text import (
    Fault,
    FileHead,
    Places,
    Text,
    Truths,
    out_of_bounds,
    report,
    texts,
    whole_lines,
    word,
)
from moepack.traces.model import Ints, Items, Origin, Phase, Piece, Unknown, counts_of
from moepack.traces.validation import Checks, shorts

_TOKEN, _PROMPT_BEGAN, _PROMPT_ENDED = b"---token", b"---began prompt", b"---ended prompt"
_END = b""
"""Kinds of markers, by the beginnings of their lines; the last is no line."""


class _Marker(NamedTuple):
    """A line between selections: the index of the one behind it, its kind, and its line."""

    selection: int
    kind: bytes
    line: int


class _Selections(NamedTuple):
    """The selections of a text, and the markers between them, in order.

    `line` counts the lines of the text from 0, here and in markers.
    """

    layer: Ints
    expert: Ints
    line: Ints
    markers: list[_Marker]
    faults: list[Fault]
    glued_count: int
    """Selections within other lines, from two programs that printed at once."""


class ExpertLog:
    """Lines `layer 7 expert 188`, one a selection, with `---token…` between tokens.

    A request begins with `---began prompt processing---`; until `---ended prompt processing---`
    selections are those of a batch, layer by layer, so that only their counts are known. A prompt
    without that line is a fault: all behind it would be counts, also what was decoded. Where a log
    has no line `---token…`, a token begins where the number of the layer falls, which is so in
    decode, the only phase of which it is known that tokens come one after another.
    """

    def __init__(self, checks: Checks, has_token_lines: bool) -> None:
        self._checks = checks
        self._assembler = Assembler(checks)
        self._has_token_lines = has_token_lines
        self._request = 0
        self._phase = Phase.UNKNOWN
        self._began_line = 0
        """The line where the last prompt began."""
        self._has_open_prompt = False
        """Whether it has selections, and no end so far."""
        self._begins = True
        self._last_layer = -1

    def read(self, stream: TraceStream) -> Iterator[Piece]:
        """Read a whole log."""
        for text in texts(stream):
            yield from self._add(text)
        self._expect_no_prompt("the end of the file")
        yield from self._assembler.end()

    def _add(self, text: Text) -> Iterator[Piece]:
        """Read the next text; cut its selections at the markers."""
        parsed = _usual_lines(text) or _any_lines(text)
        report(self._checks, text, parsed.faults)
        self._checks.warn("selections within other lines", parsed.glued_count)
        layer, expert, markers = parsed.layer, parsed.expert, parsed.markers
        line = parsed.line + text.first_line
        falls = np.diff(layer, prepend=self._last_layer) < 0
        self._last_layer = int(layer[-1]) if len(layer) else self._last_layer
        right = self._checks.fitting(layer, expert, lambda index: f"line {line[index]}")
        if right is not None:
            before = np.concatenate(([0], np.cumsum(right)))
            falls = _falls_of(falls, layer, right)
            layer, expert, line = layer[right], expert[right], line[right]
            markers = [one._replace(selection=int(before[one.selection])) for one in markers]
        start, borders = 0, []
        for index, kind, marker_line in [*markers, _Marker(len(layer), _END, 0)]:
            if kind == _TOKEN:
                borders.append(index - start)
                continue
            if not self._has_token_lines:
                borders = np.flatnonzero(falls[start:index]).tolist()
            here = slice(start, index)
            yield from self._add_selections(layer[here], expert[here], line[here], borders)
            if kind == _PROMPT_BEGAN:
                self._expect_no_prompt(f"the next prompt, in line {marker_line + text.first_line}")
                self._began_line = marker_line + text.first_line
                yield from self._turn(is_began=True)
            elif kind == _PROMPT_ENDED:
                yield from self._turn(is_began=False)
            start, borders = index, []

    def _expect_no_prompt(self, instead: str) -> None:
        """Refuse a prompt without an end; `instead` came in its place."""
        if self._has_open_prompt:
            self._checks.fault(
                "a prompt without an end, so that its tokens are not known",
                f"line {self._began_line}",
                expected=_PROMPT_END,
                found=instead,
                hint="`lenient=True` takes counts; without `---began prompt processing---` they "
                "are tokens, of unknown phase",
            )

    def _turn(self, is_began: bool) -> Iterator[Piece]:
        yield from self._assembler.end()
        self._request += is_began
        self._phase = Phase.PREFILL if is_began else Phase.DECODE
        self._begins = True
        self._has_open_prompt = False

    def _add_selections(
        self, layer: Ints, expert: Ints, line: Ints, borders: list[int]
    ) -> Iterator[Piece]:
        """Add selections; tokens begin at the indices `borders`, behind the last as well."""
        if self._phase == Phase.PREFILL:
            if len(layer):
                self._has_open_prompt = True
                yield counts_of(self._phase, layer, expert)
            return
        first = np.array(borders, np.intp)
        if self._begins:
            first = np.concatenate(([0], first))
        starts = np.unique(first[first < len(layer)])
        self._begins = bool(np.any(first == len(layer)))
        request = np.full(len(starts), self._request, np.int64)
        phase = np.full(len(starts), self._phase, np.uint8)
        rows = Rows(starts, request, phase, shorts(layer), shorts(expert), line)
        yield from self._assembler.add(rows)


def read(stream: TraceStream, checks: Checks) -> Items:
    """Read a log."""
    head = FileHead(stream).text
    has_token_lines = _has_token_line(head) or (stream.is_file and _any_token_line(stream.path))
    has_prompts = b"\n---began prompt" in b"\n" + head
    unknown = frozenset() if has_prompts else frozenset({Unknown.REQUESTS, Unknown.PHASES})
    yield Origin("expert-log", stream.name, unknown)
    yield from ExpertLog(checks, has_token_lines).read(stream)


def _any_token_line(path: str) -> bool:
    with TraceStream(path) as stream:
        return any(_has_token_line(lines) for lines, _ in whole_lines(stream))


def _has_token_line(lines: bytes) -> bool:
    return b"---token" in lines and _TOKEN_LINE.search(lines) is not None


_EXPECTED = "layer L expert E"
_PROMPT_END = "---ended prompt processing---"
_TOKEN_LINE = re.compile(rb"^[ \t]*---token", re.M)
_ANYWHERE = re.compile(rb"layer \d+ expert \d")
_PAIRS = np.arange(1 << 16)
_DIGITS = [byte - 48 for byte in (_PAIRS & 0xFF, _PAIRS >> 8)]
_IS_DIGIT = [(digit >= 0) & (digit < 10) for digit in _DIGITS]
_ONE_DIGIT = 1 << 12
_LAYERS = np.where(
    _IS_DIGIT[0] & _IS_DIGIT[1],
    _DIGITS[0] * 10 + _DIGITS[1] + (2 << 8),
    np.where(_IS_DIGIT[0], _DIGITS[0] + (1 << 8), 0),
)
"""By two bytes: the number that they begin with, and 256 times its digits; 0 for none."""
_UNITS = np.where(
    _IS_DIGIT[1],
    _DIGITS[1] + _ONE_DIGIT + np.where(_IS_DIGIT[0], _DIGITS[0] * 10 + _ONE_DIGIT, 0),
    0,
)
"""By two bytes: the number that they end with, and 4096 times its digits."""
_HUNDREDS = np.array(
    [(byte - 48) * 100 + _ONE_DIGIT if 48 <= byte < 58 else 0 for byte in range(256)]
)
_SHIFT, _MASK = np.uint64(48), np.uint64((1 << 48) - 1)


def _usual_lines(text: Text) -> _Selections | None:
    """Read lines with layers below 100 and experts below 1000; None if there are others.

    That is twice as fast as finding the numbers first: the digits are looked up by two bytes.
    """
    starts, ends = text.line_ends[:-1] + 1, text.line_ends[1:]
    words = text.words(starts)
    layer = _LAYERS.take((words >> _SHIFT).view(np.int64))
    behind = starts + (layer >> 8)
    layer &= 0xFF
    right = (words & _MASK) == word(b"layer ")
    is_selection = right.copy()
    right &= text.words(behind + 6) == word(b" expert ")
    expert = _UNITS.take((text.words(ends - 8) >> _SHIFT).view(np.int64))
    expert += _HUNDREDS.take(text.bytes.take(ends - 3))
    right &= expert >> 12 == ends - behind - len("layer  expert ")
    expert &= _ONE_DIGIT - 1
    if np.any(is_selection != right):
        return None
    others = np.flatnonzero(~right)
    markers = _markers(text, starts[others], others - np.arange(len(others)))
    return _Selections(
        layer.compress(right),
        expert.compress(right),
        np.flatnonzero(right),
        markers,
        [],
        _all_count(text) - text.line_count + len(others) if len(others) > len(markers) else 0,
    )


def _any_lines(text: Text) -> _Selections:
    """Read lines with any numbers; other lines may begin like a selection."""
    first = np.flatnonzero(text.starts[1:] - text.ends[:-1] == len(b" expert "))
    first = first[text.has(text.ends[first], b" expert ")]
    first = first[text.has(text.starts[first] - 7, b"\nlayer ")]
    first = first[text.ends_line(text.ends[first + 1])]
    glued_count = _all_count(text) - len(first)
    faults = _cut_line(text, first)
    columns = text.columns(first, 2)
    for row in np.flatnonzero(np.any(columns < 0, axis=1)):
        faults.append(out_of_bounds(text, int(first[row]), columns[row].tolist(), _EXPECTED))
    right = np.all(columns >= 0, axis=1)
    first, columns = first[right], columns[right]
    dashes = np.flatnonzero(text.bytes == ord("-"))
    dashes = dashes[text.has(dashes - 1, b"\n---")]
    return _Selections(
        columns[:, 0],
        columns[:, 1],
        text.line_numbers(first) - 1,
        _markers(text, dashes, np.searchsorted(text.starts[first], dashes)),
        faults,
        glued_count,
    )


def _all_count(text: Text) -> int:
    """Count apparent selections anywhere."""
    return len(_ANYWHERE.findall(text.data))


def _falls_of(falls: Truths, layer: Ints, right: Truths) -> Truths:
    """Return the same for the selections that are `right`.

    Among the others between them the number may have risen and fallen.
    """
    fall_count = np.cumsum(falls)[right]
    left = layer[right]
    fell = np.diff(fall_count, prepend=0) > 0
    fell[1:] &= left[1:] <= left[:-1]
    return fell


def _markers(text: Text, starts: Places, indices: Places) -> list[_Marker]:
    """Find the markers among the lines at `starts`."""
    lines = np.searchsorted(text.line_ends, starts) - 1
    markers = [
        _Marker(int(index), kind, int(line))
        for kind in (_TOKEN, _PROMPT_BEGAN, _PROMPT_ENDED)
        for line, index in zip(
            *(array[text.has(starts, kind)] for array in (lines, indices)), strict=True
        )
    ]
    return sorted(markers, key=lambda marker: marker.line)


def _cut_line(text: Text, first: Places) -> list[Fault]:
    """Find a last line without an end that begins like a selection and is none."""
    place = int(text.line_ends[-2]) + 1
    if not text.is_cut or not text.data.startswith(b"layer", place):
        return []
    if len(first) and text.starts[first[-1]] > place:
        return []
    return [Fault(place, "not a selection", _EXPECTED)]
