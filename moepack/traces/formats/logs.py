"""Traces in the logs of engines: other lines in between are ignored."""

import re
from collections.abc import Iterator

import numpy as np

from moepack.traces.compressed import TraceStream
from moepack.traces.formats.number_text import (
    Assembler,
    Fault,
    FileHead,
    Places,
    Rows,
    Text,
    Truths,
    out_of_bounds,
    report,
    texts,
    whole_lines,
)
from moepack.traces.model import Ints, Items, Origin, Phase, Piece, Unknown, counts_of
from moepack.traces.validation import Checks, shorts

_TOKEN, _BEGAN, _ENDED = b"---token", b"---began prompt", b"---ended prompt"
_EXPECTED = "layer L expert E"
_PROMPT_END = "---ended prompt processing---"
_TOKEN_LINE = re.compile(rb"^[ \t]*---token", re.M)
_ANYWHERE = re.compile(rb"layer \d+ expert \d")


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
        self._token_count = 0
        self._last_layer = -1

    def read(self, stream: TraceStream) -> Iterator[Piece]:
        """Read a whole log."""
        for text in texts(stream):
            yield from self._add(text)
        self._expect_end("the end of the file")
        yield from self._assembler.end()

    def _add(self, text: Text) -> Iterator[Piece]:
        """Read the next text; cut its selections at the lines of prompts."""
        first = text.rows((b" expert ",), before=b"\nlayer ")
        first = first[text.ends_line(text.ends[first + 1])]
        columns = text.columns(first, 2)
        right = np.all(columns >= 0, axis=1)
        faults = out_of_bounds(text, first[~right], _EXPECTED) + _cut_line(text, first)
        report(self._checks, text, faults)
        borders, prompts = _marks(text)
        if text.line_count > len(first) + len(borders) + len(prompts):
            glued_count = len(_ANYWHERE.findall(text.data)) - len(first)
            self._checks.warn("selections within other lines", glued_count)
        first, columns = first[right], columns[right]
        falls = np.diff(columns[:, 0], prepend=self._last_layer) < 0
        self._last_layer = int(columns[-1, 0]) if len(first) else self._last_layer
        right = self._checks.fitting(columns[:, 0], columns[:, 1], text.place_of(first))
        if right is not None:
            falls = _falls_of(falls, columns[:, 0], right)
            first, columns = first[right], columns[right]
        places = text.starts[first]
        if not self._has_token_lines:
            borders = places[falls]
        token = self._token_count + np.searchsorted(borders, places, "right")
        self._token_count += len(borders)
        zeros = np.zeros_like(token)
        phase = zeros.astype(np.uint8)
        layer, expert = shorts(columns[:, 0]), shorts(columns[:, 1])
        selections = Rows(zeros, phase, token, zeros, layer, expert, text.lines_of(places))
        yield from self._add_between(text, selections, places, prompts)

    def _add_between(
        self, text: Text, selections: Rows, places: Places, prompts: Places
    ) -> Iterator[Piece]:
        """Add selections, which stand at `places`, and the lines of prompts between them."""
        ends = np.searchsorted(places, prompts).tolist()
        lines = text.lines_of(prompts).tolist()
        start = 0
        for place, line, end in zip(prompts.tolist(), lines, ends, strict=True):
            yield from self._add_selections(selections.part(slice(start, end)))
            yield from self._add_prompt(text.data.startswith(_BEGAN, place), line)
            start = end
        yield from self._add_selections(selections.part(slice(start, None)))

    def _add_selections(self, rows: Rows) -> Iterator[Piece]:
        """Add the selections between two lines of prompts."""
        if not len(rows.line):
            return
        if self._phase == Phase.PREFILL:
            self._has_open_prompt = True
            yield counts_of(self._phase, rows.layer, rows.expert)
            return
        request = np.full_like(rows.request, self._request)
        phase = np.full_like(rows.phase, self._phase)
        yield from self._assembler.add(rows._replace(request=request, phase=phase))

    def _add_prompt(self, is_began: bool, line: int) -> Iterator[Piece]:
        """Begin or end a prompt."""
        yield from self._assembler.end()
        if is_began:
            self._expect_end(f"the next prompt, in line {line}")
            self._began_line = line
            self._request += 1
        self._phase = Phase.PREFILL if is_began else Phase.DECODE
        self._has_open_prompt = False

    def _expect_end(self, instead: str) -> None:
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


def read(stream: TraceStream, checks: Checks) -> Items:
    """Read a log."""
    head = FileHead(stream).text
    has_token_lines = _has_token_line(head) or (stream.is_file and _any_token_line(stream.path))
    has_prompts = b"\n" + _BEGAN in b"\n" + head
    unknown = frozenset() if has_prompts else frozenset({Unknown.REQUESTS, Unknown.PHASES})
    yield Origin("expert-log", stream.name, unknown)
    yield from ExpertLog(checks, has_token_lines).read(stream)


def _any_token_line(path: str) -> bool:
    with TraceStream(path) as stream:
        return any(_has_token_line(lines) for lines, _ in whole_lines(stream))


def _has_token_line(lines: bytes) -> bool:
    return _TOKEN in lines and _TOKEN_LINE.search(lines) is not None


def _falls_of(falls: Truths, layer: Ints, right: Truths) -> Truths:
    """Return the same for the selections that are `right`.

    Among the others between them the number may have risen and fallen.
    """
    left = layer[right]
    fell = np.diff(np.cumsum(falls)[right], prepend=0) > 0
    fell[1:] &= left[1:] <= left[:-1]
    return fell


def _marks(text: Text) -> tuple[Places, Places]:
    """Find the lines between tokens, and those that begin and end prompts."""
    dashes = np.flatnonzero(text.bytes == ord("-"))
    dashes = dashes[text.has(dashes - 1, b"\n---")]
    is_prompt = text.has(dashes, _BEGAN) | text.has(dashes, _ENDED)
    return dashes[text.has(dashes, _TOKEN)], dashes[is_prompt]


def _cut_line(text: Text, first: Places) -> list[Fault]:
    """Find a last line without an end that begins like a selection and is none."""
    place = int(text.line_ends[-2]) + 1
    if not text.is_cut or not text.data.startswith(b"layer ", place):
        return []
    if len(first) and text.starts[first[-1]] > place:
        return []
    return [Fault(place, "not a selection", _EXPECTED)]
