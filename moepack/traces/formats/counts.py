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
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from moepack.traces.compressed import TraceStream
from moepack.traces.expert_places import ExpertPlaces, PlaceCounts
from moepack.traces.formats.lines import BLANKS, Lines, numbers_in
from moepack.traces.model import (
    MAX_COUNT,
    MAX_NUMBER,
    Counts,
    Ints,
    Items,
    Origin,
    Phase,
    Unknown,
)
from moepack.traces.validation import Checks, shorts

COLUMNS = ("layer", "expert", "count", "held_out")
EXAMPLE = "layer,expert,count"

_HEADINGS = tuple(",".join(COLUMNS[:count]).encode() for count in (4, 3, 2))
_FACT = re.compile(
    rb"#[ \t]*(tokens|requests|held_out_tokens|held_out|origin)[ \t]*=[ \t]*(.*)"
).fullmatch
_MAX_DIGITS = len(str(MAX_COUNT))
_NUMBER = re.compile(rf"\d{{1,{_MAX_DIGITS}}}", re.ASCII)
_ROWS = re.compile(
    b"|".join(rb"(?:%b\n)++" % b",".join([_NUMBER.pattern.encode()] * count) for count in (2, 3, 4))
)
_OF_LARGE_NUMBERS = re.compile(rb"\d++(?:,\d++){1,3}").fullmatch
_UNKNOWN = frozenset({Unknown.REQUESTS, Unknown.PHASES, Unknown.TOKENS})


class CountsFile:
    """A file of counts, read whole: each expert once, and the facts that its comments state.

    `counts` [places] are by place in `places`, as `held_out`, the held-out parts of them: None
    without such a column. Raises TraceError for faults.
    """

    def __init__(self, stream: TraceStream, checks: Checks) -> None:
        self._checks = checks
        self._lines = Lines(stream, checks)
        self._column_count = 0
        self._heading_count = 0
        self._counts, self._held_out = PlaceCounts(), PlaceCounts()
        self._total = 0
        self._stated: dict[str, list[int]] = {}
        """The stated numbers by name, one of each of the joined files."""
        self.held_out_by = "requests"
        self.origins: list[dict[str, Any]] = []
        self.places = ExpertPlaces(checks.path)
        for rows, lines in self._lines.rows(_ROWS, self._add_line):
            self._add_rows(rows, lines)
        self.counts = self._counts.values
        self.held_out = self._held_out.values if self._column_count > 3 else None

    def number(self, name: str) -> int | None:
        """Return a stated number; None unless each of the joined files states it."""
        numbers = self._stated.get(name, [])
        return sum(numbers) if 0 < len(numbers) >= self._heading_count else None

    def _add_line(self, line: bytes) -> None:
        if line.startswith(b"#"):
            self._add_fact(line)
        elif BLANKS.sub(b",", line) in _HEADINGS:
            self._heading_count += 1
        elif line:
            is_long = _OF_LARGE_NUMBERS(BLANKS.sub(b",", line))
            problem = "a number out of bounds" if is_long else "not a count"
            self._lines.fault(problem, EXAMPLE, line)

    def _add_rows(self, rows: bytes, lines: Ints) -> None:
        """Check rows, of as many columns each, and add their counts."""
        numbers = numbers_in(rows).reshape(len(lines), -1)
        texts, columns = rows.split(b"\n"), numbers.shape[1]
        self._column_count = self._column_count or columns
        right = np.ones(len(lines), np.bool_)
        has_other_columns = np.full(len(lines), columns != self._column_count)
        is_more = numbers[:, 3] > numbers[:, 2] if columns > 3 else ~right
        for problem, expected, wrong in (
            ("not as many columns as before", EXAMPLE, has_other_columns),
            ("a number out of bounds", EXAMPLE, numbers.max(axis=1) > MAX_COUNT),
            ("more held out than counted", "<= the count", is_more),
        ):
            for index in np.flatnonzero(right & wrong).tolist():
                self._lines.fault(problem, expected, texts[index], lines[index])
            right &= ~wrong
        numbers, lines = numbers[right].astype(np.int64), lines[right]
        layer, expert = numbers.T[:2]
        fits = self._checks.fitting(layer, expert, lambda index: f"line {lines[index]}")
        layer, expert, *others = numbers[fits].T
        counts = others[0] if others else np.ones(len(layer), np.int64)
        self._total += sum(counts.tolist())
        if self._total > MAX_COUNT:
            problem, expected = "counts that add up to too many", f"<= {MAX_COUNT:,} in all"
            raise self._checks.error(problem, None, expected, f"{self._total:,}")
        places = self.places.index_of(shorts(layer), shorts(expert))
        self._counts.count(places, counts)
        if len(others) > 1:
            self._held_out.count(places, others[1])

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
    if file.counts.any():
        layer, expert, counts = file.places.counted(file.counts)
        yield Counts(Phase.UNKNOWN, shorts(layer), shorts(expert), counts)


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
