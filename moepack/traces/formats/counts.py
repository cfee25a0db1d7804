"""Counts as CSV: `layer,expert,count` a line, as in moepack's own hotness files.

The heading may be absent. Without a third column each line is one selection; a fourth, `held_out`,
is the part of the count to measure on. Lines that start with `#` are comments, of which some state
facts: `# tokens=N`, `# requests=N`, `# held_out=requests` or `time`, `# held_out_tokens=N`,
`# origin={…}` (JSON, one a trace).

Joined files are one file: counts of an expert add up, and so do tokens and requests, if each file
states them.
"""

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from moepack.traces.compressed import TraceStream
from moepack.traces.expert_places import MAX_PLACES
from moepack.traces.formats.lines import Lines
from moepack.traces.model import (
    MAX_COUNT,
    MAX_NUMBER,
    Counts,
    Ints,
    Items,
    Origin,
    Phase,
    Unknown,
    split_keys,
)
from moepack.traces.validation import Checks

COLUMNS = ("layer", "expert", "count", "held_out")
EXAMPLE = "layer,expert,count"

_HEADINGS = tuple(",".join(COLUMNS[:count]).encode() for count in (4, 3, 2))
_FACT = re.compile(
    rb"#[ \t]*(tokens|requests|held_out_tokens|held_out|origin)[ \t]*=[ \t]*(.*)"
).fullmatch
_MAX_DIGITS = len(str(MAX_COUNT))
_NUMBER = re.compile(rf"\d{{1,{_MAX_DIGITS}}}", re.ASCII)
_COMMA = rb"[ \t]*,[ \t]*"
_WITH_BLANKS = re.compile(_COMMA)
_ROW = re.compile(rb"(\d+)%b(\d+)(?:%b(\d+))?(?:%b(\d+))?" % ((_COMMA,) * 3)).fullmatch
_UNKNOWN = frozenset({Unknown.REQUESTS, Unknown.PHASES, Unknown.TOKENS})


class CountsFile:
    """A file of counts, read whole: each expert once, and the facts that its comments state.

    `layer`, `expert` and `counts` [experts] are in the order of layers and experts. `held_out` are
    the held-out parts of the counts, None without such a column. Raises TraceError for faults.
    """

    def __init__(self, stream: TraceStream, checks: Checks) -> None:
        self._checks = checks
        self._lines = Lines(stream, checks)
        self._column_count = 0
        self._heading_count = 0
        self._counts: Counter[int] = Counter()
        """By layer and expert in one number; so are the next."""
        self._held_out: Counter[int] = Counter()
        self._total = 0
        self._stated: dict[str, list[int]] = {}
        """The stated numbers by name, one of each of the joined files."""
        self.held_out_by = "requests"
        self.origins: list[dict[str, Any]] = []
        for line in self._lines:
            self._add_line(line)
        keys = sorted(key for key, count in self._counts.items() if count)
        self.layer, self.expert = split_keys(np.array(keys, np.int64))
        self.counts: Ints = np.array([self._counts[key] for key in keys], np.int64)
        self.held_out: Ints | None = None
        if self._column_count > 3:
            self.held_out = np.array([self._held_out[key] for key in keys], np.int64)

    def number(self, name: str) -> int | None:
        """Return a stated number; None unless each of the joined files states it."""
        numbers = self._stated.get(name, [])
        return sum(numbers) if 0 < len(numbers) >= self._heading_count else None

    def _add_line(self, line: bytes) -> None:
        if line.startswith(b"#"):
            self._add_fact(line)
        elif row := _ROW(line):
            self._add_row([cell for cell in row.groups() if cell is not None])
        elif _WITH_BLANKS.sub(b",", line) in _HEADINGS:
            self._heading_count += 1
        elif line:
            self._lines.fault("not a count", EXAMPLE)

    def _add_row(self, cells: Sequence[bytes]) -> None:
        """Check a row, and add its count."""
        self._column_count = self._column_count or len(cells)
        if len(cells) != self._column_count:
            self._lines.fault("not as many columns as before", EXAMPLE)
            return
        numbers = [int(cell) if len(cell) <= _MAX_DIGITS else MAX_COUNT + 1 for cell in cells]
        if max(numbers) > MAX_COUNT:
            self._lines.fault("a number out of bounds", EXAMPLE)
            return
        layer, expert = numbers[:2]
        count = numbers[2] if len(numbers) > 2 else 1
        held_out = numbers[3] if len(numbers) > 3 else 0
        if held_out > count:
            self._lines.fault("more held out than counted", "<= the count")
        elif self._checks.fits(layer, expert, self._lines.number):
            self._total += count
            if self._total > MAX_COUNT:
                problem, expected = "counts that add up to too many", f"<= {MAX_COUNT:,} in all"
                raise self._checks.error(problem, None, expected, f"{self._total:,}")
            self._counts[layer << 16 | expert] += count
            if held_out:
                self._held_out[layer << 16 | expert] += held_out
            if len(self._counts) > MAX_PLACES:
                problem = "more layers or experts than any model has"
                raise self._checks.error(problem, None, f"<= {MAX_PLACES:,} experts in all")

    def _add_fact(self, comment: bytes) -> None:
        fact, place = _FACT(comment), f"line {self._lines.number}"
        if fact is None:
            return
        try:
            name, value = fact[1].decode(), fact[2].decode().strip()
        except UnicodeDecodeError:
            raise self._checks.error("not UTF-8 text", place) from None
        if name == "held_out":
            self.held_out_by = value
        elif name == "origin":
            try:
                self.origins.append(dict(json.loads(value)))
            except (ValueError, TypeError, RecursionError):
                raise self._checks.error("not an origin", place) from None
        else:
            numbers = self._stated.setdefault(name, [])
            if not _NUMBER.fullmatch(value) or sum(numbers) + int(value) > MAX_COUNT:
                problem = f"not a {name.removesuffix('s').replace('_', ' ')} count"
                raise self._checks.error(problem, place, f"# {name}=N", value)
            numbers.append(int(value))


def read(stream: TraceStream, checks: Checks) -> Items:
    """Read a file of counts as a trace."""
    file = CountsFile(stream, checks)
    origin = origin_of(stream.name, file.number("tokens"), file.origins)
    if origin.expert_counts is not None:
        checks.expect_experts(origin.expert_counts, None)
    yield origin
    if len(file.counts):
        yield Counts(Phase.UNKNOWN, file.layer, file.expert, file.counts)


def origin_of(name: str, token_count: int | None, origins: Sequence[Mapping[str, Any]]) -> Origin:
    """Return the origin of counts, which were made from others."""
    return Origin(
        "counts",
        name,
        _UNKNOWN,
        token_count=token_count,
        expert_counts=_expert_counts(origins),
        expert_count=_expert_count(origins),
    )


def _expert_counts(origins: Sequence[Mapping[str, Any]]) -> dict[int, int] | None:
    """Return the experts of each layer, if origins state them and agree."""
    bodies = [origin["expert_counts"] for origin in origins if origin.get("expert_counts")]
    if not bodies or any(body != bodies[0] for body in bodies) or not isinstance(bodies[0], dict):
        return None
    is_number = re.compile(r"\d{1,5}", re.ASCII).fullmatch
    if not all(is_number(layer) and type(count) is int for layer, count in bodies[0].items()):
        return None
    return {int(layer): count for layer, count in bodies[0].items()}


def _expert_count(origins: Sequence[Mapping[str, Any]]) -> int | None:
    """Return the experts of every layer, if origins state one number for all layers."""
    numbers = {
        count
        for origin in origins
        if type(count := origin.get("expert_count")) is int and 1 <= count <= MAX_NUMBER + 1
    }
    return numbers.pop() if len(numbers) == 1 else None
