"""What a document shows of a record: tables, results of earlier days, and where they are from.

A block begins with a comment that names the record and the columns, and ends with another:

    <!-- record NAME.json | HEADER OF THE CASES | HEADER = WHAT | HEADER = WHAT.ours.median -->
    <!-- end -->

A column shows WHAT of each case: the value with its spread, `.ours` and `.theirs` of one side, and
`.median` without the spread. The header of a column names its unit. Without columns there is only
the line that says where the record is from. `<!-- published NAME.json | TOPIC -->` lists results
whose rounds were not kept.
"""

import os
import re
import textwrap
from pathlib import Path
from typing import NamedTuple

from benchmarks import record
from benchmarks.record import FOLDER, Record
from benchmarks.table import Row, number_text, spread_text
from moepack.bench.measuring import Spread

BLOCK = re.compile(
    r"^<!-- (record|published) (\S+\.json)((?: \|[^\n]*?)?) -->\n(.*?)^<!-- end -->$",
    re.MULTILINE | re.DOTALL,
)
UNITS = {
    "%": "%",
    "s": "s",
    "ms": "ms",
    "us": "µs",
    "tok/s": "tokens per second",
    "s/GiB": "s/GiB",
    "GB/s": "GB/s",
    "GB": "GB",
    "MB": "MB",
    "MiB": "MiB",
}
"""Units of rows, and how documents write them."""
_WIDTH = 120


class _Column(NamedTuple):
    header: str
    what: str
    side: str
    has_spread: bool


def render(document: Path, text: str) -> str:
    """Return the text of a document with all blocks written anew from their records."""
    shown: set[str] = set()

    def block(match: re.Match[str]) -> str:
        kind, name, columns, _ = match.groups()
        path = FOLDER / name
        words = [word.strip() for word in columns.split("|")[1:]]
        link = f"[{name}]({os.path.relpath(path, document.parent)})"
        if kind == "published":
            lines = _published(path, words[0], link)
        else:
            known = record.read(path)
            origin = [f"{link}, as above."] if name in shown else _origin(known, link)
            lines = [*_table(known, words), *origin]
            shown.add(name)
        body = "\n".join(lines)
        return f"<!-- {kind} {name}{columns} -->\n{body}\n<!-- end -->"

    return BLOCK.sub(block, text)


def _table(known: Record, words: list[str]) -> list[str]:
    if not words:
        return []
    if known.thrown_away:
        raise ValueError(f"nothing can be claimed by a run that was thrown away: {words}")
    columns = [_column(word) for word in words[1:]]
    by_name = {(row.case, row.what): row for row in known.rows if row.ours}
    shown = {column.what for column in columns}
    cases = dict.fromkeys(case for case, what in by_name if what in shown)
    for one in shown - {what for _, what in by_name}:
        raise ValueError(f"no row has {one!r}")
    headers = [words[0], *(column.header for column in columns)]
    lines = [f"| {' | '.join(headers)} |", f"|{' --- |' * len(headers)}"]
    for case in cases:
        cells = [_cell(by_name.get((case, column.what)), column) for column in columns]
        lines.append(f"| {' | '.join([case, *cells])} |")
    return [*lines, ""]


def _column(word: str) -> _Column:
    match = re.fullmatch(r"(.+?) = (.+?)(\.ours|\.theirs|)(\.median|)", word)
    if match is None:
        raise ValueError(f"not a column: {word!r}")
    return _Column(match[1], match[2], match[3], not match[4])


def _cell(row: Row | None, column: _Column) -> str:
    if row is None:
        return "–"
    spread, unit = _of_a_side(row, column.side)
    is_one = len(row.ours) - len(row.excluded) == 1
    if unit and not re.search(rf"(?<!\w){re.escape(UNITS[unit])}(?!\w)", column.header):
        raise ValueError(f"the header {column.header!r} does not name {UNITS[unit]}")
    if column.has_spread and not is_one:
        return spread_text(spread, unit)
    return number_text(spread.median) if unit else f"{spread.median:.2f}"


def _of_a_side(row: Row, side: str) -> tuple[Spread, str]:
    if not side:
        assert row.value is not None
        return row.value, "" if row.is_ratio else row.unit
    spread = row.our_spread if side == ".ours" else row.their_spread
    if spread is None:
        raise ValueError(f"{row.case}: {row.what} has no {side}")
    return spread, row.unit


def _origin(known: Record, link: str) -> list[str]:
    """Write where a record is from: command, rounds, day, commit, machine, load."""
    counts = sorted({len(row.ours) for row in known.rows if row.ours})
    rounds = " to ".join(str(count) for count in dict.fromkeys((counts[0], counts[-1])))
    thrown = sum(len(row.excluded) for row in known.rows)
    words = [
        f"{link}: `{known.command}`, {rounds} {'round' if counts[-1] == 1 else 'rounds'}",
        f"{known.began[:10]}, commit {known.commit[:8]}" + " with changes" * known.has_changes,
        known.machine.machine,
    ]
    if known.load is not None:
        words.append(f"load {known.load[0]:.1f} before and {known.load[1]:.1f} after")
    if known.other_load is not None:
        words.append(f"other processes took {known.other_load:.0%} of the CPUs")
    if thrown:
        words.append(f"figures that were thrown away, with reasons in the record: {thrown}")
    if known.thrown_away:
        words.insert(1, f"thrown away, since {known.thrown_away}")
    if known.machine.note:
        words.append(known.machine.note)
    return _wrap("; ".join(words) + ".")


def _published(path: Path, topic: str, link: str) -> list[str]:
    lines = []
    for one in record.read_published(path):
        if one.topic == topic:
            origin = f"({one.by}; [{one.date}, {one.commit}]({link.partition('](')[2]})"
            lines += _wrap(f"- {one.text} {origin}", "  ")
    if not lines:
        raise ValueError(f"{path.name} has nothing about {topic!r}")
    return lines


def _wrap(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(
        text, _WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
