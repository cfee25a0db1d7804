"""Traces in the logs of engines: other lines in between are ignored."""

import re
from collections.abc import Iterator

import numpy as np

from moepack.traces.compressed import TraceStream
from moepack.traces.formats.lines import ENOUGH_SELECTIONS, Assembler, FileHead, Lines, whole_lines
from moepack.traces.model import MAX_NUMBER, Items, Origin, Phase, Piece, Unknown, counts_of
from moepack.traces.validation import Checks

_TOKEN, _BEGAN, _ENDED = b"---token", b"---began prompt", b"---ended prompt"
_EXPECTED = "layer L expert E"
_PROMPT_END = "---ended prompt processing---"
_TOKEN_LINE = re.compile(rb"^[ \t]*---token", re.M)
_SELECTION = re.compile(rb"layer (\d{1,99}) expert (\d{1,99})").fullmatch
_ANYWHERE = re.compile(rb"layer \d+ expert \d").search


class ExpertLog:
    """Lines `layer 7 expert 188`, one a selection, with `---token…` between tokens.

    A request begins with `---began prompt processing---`; until `---ended prompt processing---`
    selections are those of a batch, layer by layer, so that only their counts are known. A prompt
    without that line is a fault: all behind it would be counts, also what was decoded. Where a log
    has no line `---token…`, a token begins where the number of the layer falls, which is so in
    decode, the only phase of which it is known that tokens come one after another.
    """

    def __init__(self, lines: Lines, checks: Checks, has_token_lines: bool) -> None:
        self._lines = lines
        self._checks = checks
        self._assembler = Assembler(checks)
        self._has_token_lines = has_token_lines
        self._request = 0
        self._phase = Phase.UNKNOWN
        self._began_line = 0
        """The line where the last prompt began."""
        self._prompt: list[int] = []
        """Its selections that were not passed on, each a layer and an expert in one number."""
        self._has_open_prompt = False
        """Whether it has selections, and no end so far."""
        self._is_new_token = True
        self._last_layer = MAX_NUMBER
        """Of the token, or the most if it has no selection yet."""
        self._last_line_layer = 0

    def read(self) -> Iterator[Piece]:
        """Read a whole log."""
        for line in self._lines:
            if match := _SELECTION(line):
                yield from self._add(int(match[1]), int(match[2]))
            elif line.startswith(_TOKEN):
                self._is_new_token |= self._has_token_lines
            elif line.startswith((_BEGAN, _ENDED)):
                yield from self._add_prompt(is_began=line.startswith(_BEGAN))
            elif self._lines.is_cut and line.startswith(b"layer "):
                self._lines.fault("not a selection", _EXPECTED)
            elif _ANYWHERE(line):
                self._checks.warn("selections within other lines", 1)
        self._expect_end("the end of the file")
        yield from self._prompt_counts()
        yield from self._assembler.end()

    def _add(self, layer: int, expert: int) -> Iterator[Piece]:
        """Add a selection."""
        falls, self._last_line_layer = layer < self._last_line_layer, layer
        if not self._has_token_lines:
            self._is_new_token |= falls
        if not self._checks.fits(layer, expert, self._lines.number):
            return
        if self._phase == Phase.PREFILL:
            self._has_open_prompt = True
            self._prompt.append(layer << 16 | expert)
            if len(self._prompt) >= ENOUGH_SELECTIONS:
                yield from self._prompt_counts()
            return
        # Among selections that were left out the layer may have fallen, and risen again.
        if self._is_new_token and (self._has_token_lines or layer <= self._last_layer):
            yield from self._assembler.begin_call(self._request, self._phase)
        self._is_new_token, self._last_layer = False, layer
        self._assembler.add(0, layer, expert, self._lines.number)

    def _prompt_counts(self) -> Iterator[Piece]:
        keys, self._prompt = np.array(self._prompt, np.int64), []
        if len(keys):
            yield counts_of(Phase.PREFILL, keys >> 16, keys & MAX_NUMBER)

    def _add_prompt(self, *, is_began: bool) -> Iterator[Piece]:
        """Begin or end a prompt."""
        yield from self._prompt_counts()
        if is_began:
            self._expect_end(f"the next prompt, in line {self._lines.number}")
            self._began_line = self._lines.number
            self._request += 1
        self._phase = Phase.PREFILL if is_began else Phase.DECODE
        self._has_open_prompt = False
        self._is_new_token, self._last_layer = True, MAX_NUMBER

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
    yield from ExpertLog(Lines(stream, checks), checks, has_token_lines).read()


def _any_token_line(path: str) -> bool:
    with TraceStream(path) as stream:
        return any(_has_token_line(lines) for lines, _ in whole_lines(stream))


def _has_token_line(lines: bytes) -> bool:
    return _TOKEN in lines and _TOKEN_LINE.search(lines) is not None
