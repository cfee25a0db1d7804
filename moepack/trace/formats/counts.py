"""Counts as CSV: `layer,expert,count` a line. moepack's own hotness files are such files.

The heading may be absent. Without a third column each line is one selection; a fourth, `held_out`,
is the part of the count that nothing is to be learned from. Lines that start with `#` are comments,
of which some state facts: `# tokens=N` (over how many tokens was counted), `# requests=N`,
`# held_out=requests` or `time`, `# held_out_tokens=N`, `# origin={…}` (JSON, one a trace).

Files that were joined are one file: counts of an expert add up, and so do tokens and requests,
where each file states them.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from moepack.errors import TraceError
from moepack.trace.compressed import TraceStream
from moepack.trace.expert_places import ExpertPlaces, padded, sums_by_place
from moepack.trace.formats.number_text import MAX_DIGITS, Places, Text
from moepack.trace.formats.rows import Fault, line_of, other_lines, read_rows, report, too_long
from moepack.trace.model import (
    MAX_COUNT,
    MAX_NUMBER,
    Counts,
    Ints,
    Items,
    Origin,
    Phase,
    Piece,
    Unknown,
)
from moepack.trace.validation import Checks, shorts

COLUMNS = ("layer", "expert", "count", "held_out")
EXAMPLE = "layer,expert,count"

_HEADINGS = tuple(",".join(COLUMNS[:count]).encode() for count in (4, 3, 2))
_FACT = re.compile(
    rb"^#[ \t]*(tokens|requests|held_out_tokens|held_out|origin)[ \t]*=[ \t]*(.*)$", re.M
)
_UNKNOWN = frozenset({Unknown.REQUESTS, Unknown.PHASES, Unknown.TOKENS})


class CountFacts:
    """What the comments of a file of counts state."""

    def __init__(self, path: str) -> None:
        self._path = path
        self.numbers: dict[str, int] = {}
        self._stated: Counter[str] = Counter()
        self.held_out_by = "requests"
        self.origins: list[dict[str, Any]] = []

    def take(self, name: str, value: str, place: str) -> None:
        """Take a fact; numbers of files that were joined add up."""
        if name == "held_out":
            self.held_out_by = value
        elif name == "origin":
            self.origins.append(self._origin(value, place))
        elif self._is_number(name, value):
            self.numbers[name] = self.numbers.get(name, 0) + int(value)
            self._stated[name] += 1
        else:
            problem = f"not a {name.removesuffix('s').replace('_', ' ')} count"
            raise TraceError(
                problem, path=self._path, place=place, expected=f"# {name}=N", found=value
            )

    def end(self, heading_count: int) -> None:
        """Forget the numbers that only some of the files stated that were joined."""
        for name, count in self._stated.items():
            if count < heading_count:
                del self.numbers[name]

    def _is_number(self, name: str, value: str) -> bool:
        """Whether this is a number that can be added to those before."""
        is_number = re.fullmatch(rf"\d{{1,{MAX_DIGITS}}}", value, re.ASCII) is not None
        return is_number and self.numbers.get(name, 0) + int(value) <= MAX_COUNT

    def _origin(self, text: str, place: str) -> dict[str, Any]:
        try:
            return dict(json.loads(text))
        except (ValueError, TypeError, RecursionError):
            raise TraceError("not an origin", path=self._path, place=place) from None


class CountsFile(NamedTuple):
    """What is in a file of counts: each expert once, and the facts.

    `held_out` are the parts of the counts that are held out, None where the file has no such
    column.
    """

    layer: Ints
    expert: Ints
    counts: Ints
    held_out: Ints | None
    facts: CountFacts


class _Rows(NamedTuple):
    """The rows of a text [rows, columns], the number that each begins with, and other lines."""

    first: Places
    columns: Ints
    faults: list[Fault]


class _CountRows:
    """Reads rows and adds them up; `column_count` is 0 until the first row is met."""

    def __init__(self, checks: Checks) -> None:
        self._checks = checks
        self.facts = CountFacts(checks.path)
        self.column_count = self._heading_count = 0
        self.places = ExpertPlaces()
        self.counts = self.held_out = np.zeros(0, np.int64)
        self._total = 0

    def parse(self, text: Text) -> _Rows:
        """Find the rows, and the lines that are none."""
        first = text.line_starts()
        if not self.column_count and len(first):
            self.column_count = _column_count(text, int(first[0]))
        gaps = (b",",) * (self.column_count - 1)
        first = first[text.follow(first, gaps)]
        first = first[text.ends_line(text.ends[first + len(gaps)])]
        columns = text.columns(first, self.column_count or 2)
        others = other_lines(text, first)
        line_count = len(others)
        for heading in _HEADINGS:
            others = others[~(text.has(others, heading) & text.ends_line(others + len(heading)))]
        self._heading_count += line_count - len(others)
        faults = [_fault(text, int(place)) for place in others]
        is_large = np.any(columns < 0, axis=1)
        for row in np.flatnonzero(is_large):
            number = int(first[row] + np.argmin(columns[row]))
            faults.append(too_long(text, int(text.starts[first[row]]), number, EXAMPLE))
        return _Rows(first[~is_large], columns[~is_large], sorted(faults))

    def take(self, text: Text, rows: _Rows) -> Iterator[Piece]:
        """Check the rows, and add them up."""
        self._take_facts(text)
        faults = sorted([*rows.faults, *self._bad_counts(text, rows)])
        report(self._checks, text, faults)
        wrong = np.isin(text.starts[rows.first], [fault.place for fault in faults])
        first, columns = rows.first[~wrong], rows.columns[~wrong]
        layer, expert = columns[:, 0], columns[:, 1]
        right = self._checks.fitting(layer, expert, line_of(text, first))
        if right is not None:
            layer, expert, columns = layer[right], expert[right], columns[right]
        places = self.places.of(shorts(layer), shorts(expert))
        counts = columns[:, 2] if self.column_count > 2 else np.ones(len(columns), np.int64)
        self._check_total(sum(counts.tolist()))  # may pass 64 bits
        self.counts = self._sum(self.counts, places, counts)
        if self.column_count > 3:
            self.held_out = self._sum(self.held_out, places, columns[:, 3])
        return iter(())

    def end(self) -> Iterator[Piece]:
        """Nothing is held back."""
        self.facts.end(self._heading_count)
        return iter(())

    def _bad_counts(self, text: Text, rows: _Rows) -> list[Fault]:
        starts, columns = text.starts[rows.first], rows.columns
        if self.column_count < 4:
            return []
        places = starts[columns[:, 3] > columns[:, 2]].tolist()
        return [Fault(at, "more held out than counted", "<= the count") for at in places]

    def _take_facts(self, text: Text) -> None:
        if b"#" not in text.data:  # a look for lines takes 400 times as long
            return
        for match in _FACT.finditer(text.data):
            place = f"line {text.line_of(match.start())}"
            try:
                value = match[2].decode().strip()
            except UnicodeDecodeError:
                raise TraceError("not UTF-8 text", path=self._checks.path, place=place) from None
            self.facts.take(match[1].decode(), value, place)

    def _check_total(self, count: int) -> None:
        """Keep all counts together within what a pack can state."""
        self._total += count
        if self._total > MAX_COUNT:
            problem, expected = "counts that add up to too many", f"<= {MAX_COUNT:,} in all"
            found = f"{self._total:,}"
            raise TraceError(problem, path=self._checks.path, expected=expected, found=found)

    def _sum(self, sums: Ints, places: Ints, counts: Ints) -> Ints:
        """Add counts to the sums by place."""
        more = sums_by_place(places, counts, self.places.count)
        return padded(sums, len(more)) + more


def parse(stream: TraceStream, checks: Checks) -> CountsFile:
    """Read a whole file of counts. Raises TraceError for what is wrong in it."""
    rows = _CountRows(checks)
    for _ in read_rows(stream, rows, _without_blanks):
        pass
    met = np.flatnonzero(rows.counts)
    held_out = padded(rows.held_out, len(rows.counts))[met] if rows.column_count > 3 else None
    return CountsFile(*rows.places.keys(met), rows.counts[met], held_out, rows.facts)


def read(stream: TraceStream, checks: Checks) -> Items:
    """Read a file of counts as a trace."""
    file = parse(stream, checks)
    expert_counts = _expert_counts(file.facts.origins)
    if expert_counts is not None:
        checks.expect_experts(expert_counts, None)
    origin = Origin("counts", stream.name, _UNKNOWN, None, file.facts.numbers.get("tokens"))
    yield replace(
        origin, expert_counts=expert_counts, expert_count=_expert_count(file.facts.origins)
    )
    if len(file.counts):
        yield Counts(Phase.UNKNOWN, shorts(file.layer), shorts(file.expert), file.counts)


def _expert_counts(origins: Sequence[Mapping[str, Any]]) -> dict[int, int] | None:
    """Return how many experts each layer has, where origins say it, and all of them the same."""
    stated = [origin["expert_counts"] for origin in origins if origin.get("expert_counts")]
    if not stated or any(one != stated[0] for one in stated) or not isinstance(stated[0], dict):
        return None
    is_number = re.compile(r"\d{1,5}", re.ASCII).fullmatch
    if not all(is_number(layer) and type(count) is int for layer, count in stated[0].items()):
        return None
    return {int(layer): count for layer, count in stated[0].items()}


def _expert_count(origins: Sequence[Mapping[str, Any]]) -> int | None:
    """Return the same of origins that say one number for all layers."""
    stated = {
        count
        for origin in origins
        if type(count := origin.get("expert_count")) is int and 1 <= count <= MAX_NUMBER + 1
    }
    return stated.pop() if len(stated) == 1 else None


def _without_blanks(lines: bytes) -> bytes:
    """Leave out blanks around commas and at the ends of lines, but for comments."""
    if b" " not in lines and b"\t" not in lines:
        return lines
    return b"\n".join(
        line if line.startswith(b"#") else b",".join(cell.strip() for cell in line.split(b","))
        for line in lines.split(b"\n")
    )


def _column_count(text: Text, first: int) -> int:
    """Return how many numbers with commas between them the line has that begins with `first`."""
    count = 1
    while count < len(COLUMNS) and text.follow(np.array([first]), (b",",) * count)[0]:
        count += 1
    return max(count, 2)


def _fault(text: Text, place: int) -> Fault:
    line = text.line_at(place)
    is_row = re.fullmatch(r"\d+(,\d+){1,3}", line, re.ASCII) is not None
    return Fault(place, "not as many columns as before" if is_row else "not a count", EXAMPLE)
