"""Traces that engines print into their logs: lines of another kind in between are ignored."""

import re
from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from moepack.trace.formats.assembler import Assembler, Rows
from moepack.trace.formats.call_rows import LayerCalls, Table, without_large
from moepack.trace.formats.number_text import Places, Text, Truths, word
from moepack.trace.formats.rows import (
    Fault,
    Lists,
    Statement,
    line_numbers,
    report,
    rows_in_brackets,
    too_long,
)
from moepack.trace.model import Dimensions, Ints, Phase, Piece, counts_of
from moepack.trace.validation import Checks, shorts


class _Kind(IntEnum):
    TOKEN = 0
    PROMPT_BEGAN = 1
    PROMPT_ENDED = 2
    END = 3


class _Marker(NamedTuple):
    """A line between selections: the index of the one behind it, its kind, and its line."""

    selection: int
    kind: _Kind
    line: int


class _Selections(NamedTuple):
    """What is in a text: selections, and the markers between them, in order.

    `line` counts the lines of the text from 0, here and in markers.
    """

    layer: Ints
    expert: Ints
    line: Ints
    markers: list[_Marker]
    faults: list[Fault]
    glued_count: int
    """How many more stand within other lines, where two programs printed at once."""


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
        self._has_token_lines = has_token_lines
        self._assembler = Assembler(checks)
        self._request = 0
        self._phase = Phase.UNKNOWN
        self._began_line = 0
        """Where the last prompt began."""
        self._has_open_prompt = False
        """Whether it has selections, and no end so far."""
        self._begins = True
        self._last_layer = -1

    def parse(self, text: Text) -> _Selections:
        """Read a text line by line, or number by number where lines are not the usual ones."""
        return _usual_lines(text) or _any_lines(text)

    def take(self, text: Text, parsed: _Selections) -> Iterator[Piece]:
        """Cut the selections at the markers."""
        report(self._checks, text, parsed.faults)
        self._checks.warn("selections within other lines", parsed.glued_count)
        layer, expert, markers = parsed.layer, parsed.expert, parsed.markers
        line = parsed.line + text.first_line
        falls = self._falls(layer)
        right = self._checks.fitting(layer, expert, lambda index: f"line {line[index]}")
        if right is not None:
            before = np.concatenate(([0], np.cumsum(right)))
            falls = _falls_of(falls, layer, right)
            layer, expert, line = layer[right], expert[right], line[right]
            markers = [one._replace(selection=int(before[one.selection])) for one in markers]
        start, borders = 0, []
        for index, kind, marker_line in [*markers, _Marker(len(layer), _Kind.END, 0)]:
            if kind == _Kind.TOKEN:
                borders.append(index - start)
                continue
            if not self._has_token_lines:
                borders = np.flatnonzero(falls[start:index]).tolist()
            here = slice(start, index)
            yield from self._add(layer[here], expert[here], line[here], borders)
            if kind == _Kind.PROMPT_BEGAN:
                self._expect_no_prompt(f"the next prompt, in line {marker_line + text.first_line}")
                self._began_line = marker_line + text.first_line
                yield from self._turn(is_began=True)
            elif kind == _Kind.PROMPT_ENDED:
                yield from self._turn(is_began=False)
            start, borders = index, []

    def end(self) -> Iterator[Piece]:
        """Return the last token."""
        self._expect_no_prompt("the end of the file")
        return iter(self._assembler.end())

    def _expect_no_prompt(self, found: str) -> None:
        """Refuse a prompt without an end; `found` is what came instead."""
        if self._has_open_prompt:
            self._checks.fault(
                "a prompt without an end, so that its tokens are not known",
                f"line {self._began_line}",
                expected=_PROMPT_END,
                found=found,
                hint="`lenient=True` takes counts; without `---began prompt processing---` they "
                "are tokens, of a phase that is not known",
            )

    def _falls(self, layer: Ints) -> Truths:
        """Say where the number of the layer is lower than before."""
        layers = np.concatenate(([self._last_layer], layer))
        self._last_layer = int(layers[-1])
        falls: Truths = layers[1:] < layers[:-1]
        return falls

    def _turn(self, is_began: bool) -> Iterator[Piece]:
        yield from self._assembler.end()
        self._request += is_began
        self._phase = Phase.PREFILL if is_began else Phase.DECODE
        self._begins = True
        self._has_open_prompt = False

    def _add(self, layer: Ints, expert: Ints, line: Ints, borders: list[int]) -> Iterator[Piece]:
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


_EXPECTED = "layer L expert E"
_PROMPT_END = "---ended prompt processing---"
_NUMBER = re.compile(r"\d{1,9}", re.ASCII)
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
    """Read lines with layers below 100 and experts below 1000; None where others are among them.

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
    """Read lines with any numbers; what begins like a selection and is none is another line."""
    first = np.flatnonzero(text.starts[1:] - text.ends[:-1] == len(b" expert "))
    first = first[text.has(text.ends[first], b" expert ")]
    first = first[text.has(text.starts[first] - 7, b"\nlayer ")]
    first = first[text.ends_line(text.ends[first + 1])]
    glued_count = _all_count(text) - len(first)
    faults = _cut_line(text, first)
    columns = text.columns(first, 2)
    for row in np.flatnonzero(np.any(columns < 0, axis=1)):
        number = int(first[row] + np.argmin(columns[row]))
        faults.append(too_long(text, int(text.starts[first[row]]), number, _EXPECTED))
    right = np.all(columns >= 0, axis=1)
    first, columns = first[right], columns[right]
    dashes = np.flatnonzero(text.bytes == ord("-"))
    dashes = dashes[text.has(dashes - 1, b"\n---")]
    return _Selections(
        columns[:, 0],
        columns[:, 1],
        line_numbers(text, first) - 1,
        _markers(text, dashes, np.searchsorted(text.starts[first], dashes)),
        sorted(faults),
        glued_count,
    )


def _all_count(text: Text) -> int:
    """Count what looks like a selection anywhere."""
    return len(_ANYWHERE.findall(text.data))


def _falls_of(falls: Truths, layer: Ints, right: Truths) -> Truths:
    """Say the same of the selections that are left when some are left out.

    Among those that are left out the number may have risen and fallen.
    """
    seen = np.cumsum(falls)[right]
    left = layer[right]
    fell = np.diff(seen, prepend=0) > 0
    fell[1:] &= left[1:] <= left[:-1]
    return fell


def _markers(text: Text, starts: Places, indices: Places) -> list[_Marker]:
    """Find the markers among the lines at `starts`."""
    kinds = [
        (_Kind.TOKEN, b"---token"),
        (_Kind.PROMPT_BEGAN, b"---began prompt"),
        (_Kind.PROMPT_ENDED, b"---ended prompt"),
    ]
    lines = np.searchsorted(text.line_ends, starts) - 1
    markers = [
        _Marker(int(index), kind, int(line))
        for kind, prefix in kinds
        for line, index in zip(
            *(array[text.has(starts, prefix)] for array in (lines, indices)), strict=True
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


def _manifest_dimensions(words: Sequence[str]) -> Dimensions | None:
    """Read `48 layers, 128 experts/layer`; it does not say which layers these are."""
    if words[1:2] != ["layers,"] or not words[2:3] or not _NUMBER.fullmatch(words[2]):
        return None
    return Dimensions(expert_count=int(words[2]))


class FlashLog(LayerCalls):
    """Lines `moe-flash: layer   7 topk=[3,14,15]`, one a layer and call, of llama-cpp-moe-flash.

    A call of several tokens has ` (12 tokens)` behind it, and tells of the first alone. The line
    `moe-flash: loaded manifest: 48 layers, 128 experts/layer` says how many experts the first of
    its layers has, and how many layers, but not which (its patch I10b, 2026).
    """

    expected = "moe-flash: layer L topk=[E,E,…]"
    statement = Statement(b"moe-flash: loaded manifest: ", _manifest_dimensions)

    def parse(self, text: Text) -> Table:
        """Find the lines by what stands around their first number, padded to three places."""
        first = np.flatnonzero(text.has(text.ends, b" "))
        first = first[text.has(text.ends[first], b" topk=[")]
        width = np.maximum(text.ends[first] - text.starts[first], 3)
        first = first[text.has(text.ends[first] - width - 17, b"moe-flash: layer ")]
        lists = rows_in_brackets(text, first, (b" topk=[",))
        wrong = np.setdiff1d(first, lists.first) if len(first) > len(lists.first) else first[:0]
        faults = [Fault(int(text.starts[n]), "no list of experts", self.expected) for n in wrong]
        columns = np.concatenate((lists.columns, _token_counts(text, lists)), axis=1)
        return without_large(text, lists._replace(columns=columns), self.expected, faults)

    def take(self, text: Text, parsed: Table) -> Iterator[Piece]:
        """Look as well for what the log says of the model."""
        self.statement.check(text, self._checks)
        yield from super().take(text, parsed)


def _token_counts(text: Text, lists: Lists) -> Ints:
    """Read how many tokens each line's call had [lines, 1]."""
    last = lists.first + lists.counts
    behind = np.minimum(last + 1, len(text.starts) - 1)
    is_batch = text.has(text.ends[last], b"] (") & text.has(text.ends[behind], b" tokens)")
    return np.where(is_batch, text.values(behind), 1)[:, None]
