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
from typing import Any, NamedTuple

import numpy as np

from moepack.traces.compressed import TraceStream
from moepack.traces.expert_places import ExpertPlaces, padded, sums_by_place
from moepack.traces.formats.number_text import (
    MAX_DIGITS,
    Fault,
    Places,
    Text,
    out_of_bounds,
    report,
    texts,
)
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
    rb"^#[ \t]*(tokens|requests|held_out_tokens|held_out|origin)[ \t]*=[ \t]*(.*)$", re.M
)
_UNKNOWN = frozenset({Unknown.REQUESTS, Unknown.PHASES, Unknown.TOKENS})


class CountFacts:
    """The facts that the comments of a file of counts state."""

    def __init__(self, checks: Checks) -> None:
        self._checks = checks
        self.heading_count = 0
        self._sums: Counter[str] = Counter()
        self._stated: Counter[str] = Counter()
        self.held_out_by = "requests"
        self.origins: list[dict[str, Any]] = []

    def add(self, name: str, value: str, place: str) -> None:
        """Add a fact; numbers of joined files add up."""
        if name == "held_out":
            self.held_out_by = value
        elif name == "origin":
            self.origins.append(self._origin(value, place))
        elif self._is_number(name, value):
            self._sums[name] += int(value)
            self._stated[name] += 1
        else:
            problem = f"not a {name.removesuffix('s').replace('_', ' ')} count"
            raise self._checks.error(problem, place, f"# {name}=N", value)

    def number(self, name: str) -> int | None:
        """Return a number; None unless each of the joined files states it."""
        is_everywhere = 0 < self._stated[name] >= self.heading_count
        return self._sums[name] if is_everywhere else None

    def _is_number(self, name: str, value: str) -> bool:
        """Return whether this is a number that can be added to those before."""
        is_number = re.fullmatch(rf"\d{{1,{MAX_DIGITS}}}", value, re.ASCII) is not None
        return is_number and self._sums[name] + int(value) <= MAX_COUNT

    def _origin(self, text: str, place: str) -> dict[str, Any]:
        try:
            return dict(json.loads(text))
        except (ValueError, TypeError, RecursionError):
            raise self._checks.error("not an origin", place) from None


class CountsFile(NamedTuple):
    """The content of a file of counts: each expert once, and the facts.

    `held_out` are the held-out parts of the counts, None without such a column.
    """

    layer: Ints
    expert: Ints
    counts: Ints
    held_out: Ints | None
    facts: CountFacts


class _CountRows:
    """Reads rows and adds them up; `column_count` is 0 before the first row."""

    def __init__(self, checks: Checks) -> None:
        self._checks = checks
        self.facts = CountFacts(checks)
        self.column_count = 0
        self.places = ExpertPlaces()
        self.counts = self.held_out = np.zeros(0, np.int64)
        self._total = 0

    def add(self, text: Text) -> None:
        """Check the rows of the next text, and add them up."""
        self._add_facts(text)
        first = text.line_starts()
        if not self.column_count and len(first):
            self.column_count = _column_count(text, int(first[0]))
        gaps = (b",",) * (self.column_count - 1)
        first = first[text.follow(first, gaps)]
        first = first[text.ends_line(text.ends[first + len(gaps)])]
        columns = text.columns(first, self.column_count or 2)
        is_wrong = np.any(columns < 0, axis=1)
        faults = self._other_lines(text, first)
        for row in np.flatnonzero(is_wrong):
            faults.append(out_of_bounds(text, int(first[row]), columns[row].tolist(), EXAMPLE))
        if self.column_count > 3:
            is_more = (columns[:, 3] > columns[:, 2]) & ~is_wrong
            starts = text.starts[first[is_more]].tolist()
            faults += [Fault(at, "more held out than counted", "<= the count") for at in starts]
            is_wrong |= is_more
        report(self._checks, text, faults)
        first, columns = first[~is_wrong], columns[~is_wrong]
        layer, expert = columns[:, 0], columns[:, 1]
        right = self._checks.fitting(layer, expert, text.place_of(first))
        if right is not None:
            layer, expert, columns = layer[right], expert[right], columns[right]
        places = self.places.index_of(shorts(layer), shorts(expert))
        counts = columns[:, 2] if self.column_count > 2 else np.ones(len(columns), np.int64)
        self._check_total(sum(counts.tolist()))  # may pass 64 bits
        self.counts = self._sum(self.counts, places, counts)
        if self.column_count > 3:
            self.held_out = self._sum(self.held_out, places, columns[:, 3])

    def _other_lines(self, text: Text, first: Places) -> list[Fault]:
        """Count the headings; return the faults of the lines that are nothing known."""
        others = text.other_lines(first)
        line_count = len(others)
        for heading in _HEADINGS:
            others = others[~(text.has(others, heading) & text.ends_line(others + len(heading)))]
        self.facts.heading_count += line_count - len(others)
        return [_fault(text, int(offset)) for offset in others]

    def _add_facts(self, text: Text) -> None:
        if b"#" not in text.data:  # a look for lines takes 400 times as long
            return
        for match in _FACT.finditer(text.data):
            place = f"line {text.line_of(match.start())}"
            try:
                value = match[2].decode().strip()
            except UnicodeDecodeError:
                raise self._checks.error("not UTF-8 text", place) from None
            self.facts.add(match[1].decode(), value, place)

    def _check_total(self, count: int) -> None:
        """Raise TraceError if all counts together are more than a pack can state."""
        self._total += count
        if self._total > MAX_COUNT:
            problem, expected = "counts that add up to too many", f"<= {MAX_COUNT:,} in all"
            raise self._checks.error(problem, None, expected, f"{self._total:,}")

    def _sum(self, sums: Ints, places: Ints, counts: Ints) -> Ints:
        """Add counts to the sums by place."""
        more = sums_by_place(places, counts, self.places.count)
        return padded(sums, len(more)) + more


def parse(stream: TraceStream, checks: Checks) -> CountsFile:
    """Read a whole file of counts. Raises TraceError for faults."""
    rows = _CountRows(checks)
    for text in texts(stream, _without_blanks):
        rows.add(text)
    places = np.flatnonzero(rows.counts)
    layer, expert = rows.places.keys(places)
    held_out = padded(rows.held_out, len(rows.counts))[places] if rows.column_count > 3 else None
    return CountsFile(layer, expert, rows.counts[places], held_out, rows.facts)


def read(stream: TraceStream, checks: Checks) -> Items:
    """Read a file of counts as a trace."""
    file = parse(stream, checks)
    origin = origin_of(stream.name, file.facts.number("tokens"), file.facts.origins)
    if origin.expert_counts is not None:
        checks.expect_experts(origin.expert_counts, None)
    yield origin
    if len(file.counts):
        yield Counts(Phase.UNKNOWN, shorts(file.layer), shorts(file.expert), file.counts)


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
