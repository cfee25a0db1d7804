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
from moepack.traces.formats.number_text import (
    MAX_DIGITS,
    Fault,
    Places,
    Text,
    out_of_bounds,
    report,
    texts,
)
from moepack.traces.model import MAX_COUNT, MAX_NUMBER, Counts, Ints, Items, Origin, Phase, Unknown
from moepack.traces.validation import Checks, shorts

COLUMNS = ("layer", "expert", "count", "held_out")
EXAMPLE = "layer,expert,count"

_HEADINGS = tuple(",".join(COLUMNS[:count]).encode() for count in (4, 3, 2))
_FACT = re.compile(
    rb"^#[ \t]*(tokens|requests|held_out_tokens|held_out|origin)[ \t]*=[ \t]*(.*)$", re.M
)
_NUMBER = re.compile(rf"\d{{1,{MAX_DIGITS}}}", re.ASCII)
_COLUMNS = re.compile(rb"\d+(,\d+){1,3}")
_ROW = re.compile(_COLUMNS.pattern.decode(), re.ASCII)
_UNKNOWN = frozenset({Unknown.REQUESTS, Unknown.PHASES, Unknown.TOKENS})


class CountsFile:
    """A file of counts, read whole: each expert once, and the facts that its comments state.

    `held_out` are the held-out parts of the `counts`, None without such a column. Raises TraceError
    for faults.
    """

    def __init__(self, stream: TraceStream, checks: Checks) -> None:
        self._checks = checks
        self._column_count = 0
        self._heading_count = 0
        self._total = 0
        self._stated: dict[str, list[int]] = {}
        """The stated numbers by name, one of each of the joined files."""
        self.held_out_by = "requests"
        self.origins: list[dict[str, Any]] = []
        self._places = ExpertPlaces()
        self._counts, self._held_out = PlaceCounts(), PlaceCounts()
        for text in texts(stream, _without_blanks):
            self._add_facts(text)
            self._add_rows(text)
        counts = self._counts.values
        places = np.flatnonzero(counts)
        self.layer, self.expert = self._places.keys(places)
        self.counts: Ints = counts[places]
        self.held_out: Ints | None = None
        if self._column_count > 3:
            self.held_out = self._held_out.values[places]

    def number(self, name: str) -> int | None:
        """Return a stated number; None unless each of the joined files states it."""
        numbers = self._stated.get(name, [])
        return sum(numbers) if 0 < len(numbers) >= self._heading_count else None

    def _add_rows(self, text: Text) -> None:
        """Check the rows of the next text, and add them up."""
        first = text.rows(())
        if not self._column_count and len(first):
            line = _COLUMNS.match(text.data, int(text.starts[first[0]]))
            self._column_count = max(2, line[0].count(b",") + 1 if line else 0)
        gaps = (b",",) * (self._column_count - 1)
        first = text.rows(gaps)
        first = first[text.ends_line(text.ends[first + len(gaps)])]
        columns = text.columns(first, self._column_count or 2)
        is_wrong = np.any(columns < 0, axis=1)
        faults = self._other_lines(text, first) + out_of_bounds(text, first[is_wrong], EXAMPLE)
        if self._column_count > 3:
            is_more = (columns[:, 3] > columns[:, 2]) & ~is_wrong
            starts = text.starts[first[is_more]].tolist()
            faults += [Fault(at, "more held out than counted", "<= the count") for at in starts]
            is_wrong |= is_more
        report(self._checks, text, faults)
        first, columns = first[~is_wrong], columns[~is_wrong]
        right = self._checks.fitting(columns[:, 0], columns[:, 1], text.place_of(first))
        if right is not None:
            columns = columns[right]
        places = self._places.index_of(shorts(columns[:, 0]), shorts(columns[:, 1]))
        counts = columns[:, 2] if self._column_count > 2 else np.ones(len(columns), np.int64)
        self._total += sum(counts.tolist())  # may pass 64 bits
        if self._total > MAX_COUNT:
            problem, expected = "counts that add up to too many", f"<= {MAX_COUNT:,} in all"
            raise self._checks.error(problem, None, expected, f"{self._total:,}")
        self._counts.count(places, counts)
        if self._column_count > 3:
            self._held_out.count(places, columns[:, 3])

    def _other_lines(self, text: Text, first: Places) -> list[Fault]:
        """Count the headings; return the faults of the lines that are nothing known."""
        others = text.other_lines(first)
        line_count = len(others)
        for heading in _HEADINGS:
            others = others[~(text.has(others, heading) & text.ends_line(others + len(heading)))]
        self._heading_count += line_count - len(others)
        faults = []
        for place in others.tolist():
            is_row = _ROW.fullmatch(text.line_at(place)) is not None
            problem = "not as many columns as before" if is_row else "not a count"
            faults.append(Fault(place, problem, EXAMPLE))
        return faults

    def _add_facts(self, text: Text) -> None:
        if b"#" not in text.data:  # a look for lines takes 400 times as long
            return
        for match in _FACT.finditer(text.data):
            place = f"line {text.line_of(match.start())}"
            try:
                value = match[2].decode().strip()
            except UnicodeDecodeError:
                raise self._checks.error("not UTF-8 text", place) from None
            self._add_fact(match[1].decode(), value, place)

    def _add_fact(self, name: str, value: str, place: str) -> None:
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
