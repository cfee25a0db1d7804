"""Traces in the logs of engines: other lines in between are ignored."""

import re
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from moepack.traces.compressed import TraceStream
from moepack.traces.formats.lines import Assembler, FileHead, Lines, numbers_in, whole_lines
from moepack.traces.model import Ints, Items, Origin, Phase, Piece, Unknown, counts_of
from moepack.traces.validation import Checks

_TOKEN, _BEGAN, _ENDED = b"---token", b"---began prompt", b"---ended prompt"
_EXPECTED = "layer L expert E"
_PROMPT_END = "---ended prompt processing---"
_TOKEN_LINE = re.compile(rb"^[ \t]*---token", re.M)
_SELECTIONS = re.compile(rb"(?:layer \d{1,18} expert \d{1,18}\n)++")
_OF_LARGE_NUMBERS = re.compile(rb"layer \d+ expert \d+").fullmatch
_ANYWHERE = re.compile(rb"layer \d+ expert \d").search
_ENOUGH_SELECTIONS = 1 << 16
"""Selections that are passed on at once."""


class _LogRows(NamedTuple):
    """Lines of selections one after another; `heads` are the request, phase and token of each."""

    rows: bytes
    heads: Ints
    lines: Ints


class ExpertLog:
    """Lines `layer 7 expert 188`, one a selection, with `---token…` between tokens.

    A request begins with `---began prompt processing---`; until `---ended prompt processing---`
    selections are those of a batch, layer by layer, so that only their counts are known. A prompt
    without that line is a fault: all behind it would be counts, also what was decoded. Where a log
    has no line `---token…`, a token begins where the number of the layer falls, which is so in
    decode, the only phase of which it is known that tokens come one after another.
    """

    def __init__(self, stream: TraceStream, checks: Checks, has_token_lines: bool) -> None:
        self._lines = Lines(stream, checks)
        self._checks = checks
        self._assembler = Assembler(checks)
        self._has_token_lines = has_token_lines
        self._request = self._token = 0
        self._phase = Phase.UNKNOWN
        self._began_line = 0
        """The line where the last prompt began."""
        self._has_open_prompt = False
        """Whether it has selections, and no end so far."""
        self._waiting: list[_LogRows] = []
        """Rows to be passed on, together."""
        self._line_layer = self._fall_count = 0
        """The layer of the last line, and how often layers have fallen."""
        self._last_layer = self._last_fall_count = 0
        """The same of the last selection that the model can have made."""
        self._token_count = 0
        """How often a token began with a layer that fell."""

    def read(self) -> Iterator[Piece]:
        """Read a whole log."""
        count = 0
        for rows, lines in self._lines.rows(_SELECTIONS, self._add_other):
            self._has_open_prompt |= self._phase == Phase.PREFILL
            head = np.array((self._request, self._phase, self._token), np.int64)
            self._waiting.append(_LogRows(rows, np.broadcast_to(head, (len(lines), 3)), lines))
            count += len(lines)
            if count >= _ENOUGH_SELECTIONS:
                count = 0
                yield from self._pieces()
        self._expect_end("the end of the file")
        yield from self._pieces()
        yield from self._assembler.end()

    def _add_other(self, line: bytes) -> None:
        if line.startswith(_TOKEN):
            self._token += self._has_token_lines
        elif line.startswith((_BEGAN, _ENDED)):
            self._add_prompt(is_began=line.startswith(_BEGAN))
        elif _OF_LARGE_NUMBERS(line) or (self._lines.is_cut and line.startswith(b"layer ")):
            self._lines.fault("not a selection", _EXPECTED, line)
        elif _ANYWHERE(line):
            self._checks.warn("selections within other lines", 1)

    def _pieces(self) -> Iterator[Piece]:
        """Yield the counts of prompts, and the tokens, of the selections so far."""
        if not self._waiting:
            return
        rows = b"".join(one.rows for one in self._waiting)
        heads = np.concatenate([one.heads for one in self._waiting])
        lines = np.concatenate([one.lines for one in self._waiting])
        self._waiting = []
        layer, expert = numbers_in(rows).astype(np.int64).reshape(-1, 2).T
        falls = self._fall_count + np.cumsum(np.diff(layer, prepend=self._line_layer) < 0)
        self._line_layer, self._fall_count = layer[-1], falls[-1]
        right = self._checks.fitting(layer, expert, lambda index: f"line {lines[index]}")
        columns = heads, layer, expert, lines, falls
        heads, layer, expert, lines, falls = (column[right] for column in columns)
        is_prompt = heads[:, 1] == Phase.PREFILL
        if is_prompt.any():
            yield counts_of(Phase.PREFILL, layer[is_prompt], expert[is_prompt])
        if not self._has_token_lines and len(layer):
            # Among selections that were left out the layer may have fallen, and risen again.
            begins = np.diff(falls, prepend=self._last_fall_count) > 0
            begins &= np.diff(layer, prepend=self._last_layer) <= 0
            self._last_layer, self._last_fall_count = layer[-1], falls[-1]
            heads[:, 2] += self._token_count + np.cumsum(begins)
            self._token_count += int(np.count_nonzero(begins))
        is_decoded = ~is_prompt
        heads, layer, expert = heads[is_decoded], layer[is_decoded], expert[is_decoded]
        token = np.zeros_like(layer)  # each is a call
        yield from self._assembler.add(heads, token, layer, expert, lines[is_decoded])

    def _add_prompt(self, *, is_began: bool) -> None:
        """Begin or end a prompt."""
        if is_began:
            self._expect_end(f"the next prompt, in line {self._lines.number}")
            self._began_line = self._lines.number
            self._request += 1
        self._phase = Phase.PREFILL if is_began else Phase.DECODE
        self._has_open_prompt = False
        self._token += 1

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
    yield from ExpertLog(stream, checks, has_token_lines).read()


def _any_token_line(path: str) -> bool:
    with TraceStream(path) as stream:
        return any(_has_token_line(lines) for lines, _ in whole_lines(stream))


def _has_token_line(lines: bytes) -> bool:
    return _TOKEN in lines and _TOKEN_LINE.search(lines) is not None
