"""Whether README.md and docs/numbers.md say what the records say; `python -m benchmarks.claims`.

The program writes their tables from the records (`benchmarks/rendering.py`) and prints what is
wrong. Each number of the text around the tables, except in code, has to be in a record that a block
of the same section names: as a median or an end of what was measured there, rounded as it is
written and in the same unit, or in the set-up. README.md is one section.
"""

import contextlib
import importlib
import io
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks import record
from benchmarks.record import FOLDER, ROOT, Record
from benchmarks.rendering import BLOCK, UNITS, render
from benchmarks.table import Row

DOCUMENTS = (ROOT / "README.md", ROOT / "docs" / "numbers.md")
_NUMBER = r"(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?"
_A_NUMBER = re.compile(rf"(?<![\w.,/-]){_NUMBER}(?![\w/]|[.,]\d)")
_NO_CLAIM = re.compile(
    r"^(?: {4}|#)[^\n]*$"  # code, headings
    r"|^```.*?^```$|`[^`]*`|<!--.*?-->|\]\([^)]*\)"  # code, comments, the targets of links
    r"|\b(?:Python|version|versions) \d[\d.]*",
    re.MULTILINE | re.DOTALL,
)
_OTHER_UNITS = {"times", "KiB", "GiB", "TB", "MiB/s", "GiB/s", "min", "layers", "tokens", "experts"}
_UNIT = "|".join(sorted(map(re.escape, {*UNITS.values(), *_OTHER_UNITS}), key=len, reverse=True))
_UNIT_AFTER = re.compile(rf"(?:(?:,| \(| to| and| or)? ?{_NUMBER})*\)? ?(?P<unit>{_UNIT})(?![\w/])")
_UNIT_BEFORE = re.compile(rf"(?P<unit>{_UNIT}) \((?:{_NUMBER} to )?$")
_CONNECTING = {"to", "and", "or", "of", "at", "in", "with", "from", "is", "are", "was", "were"}


class Number(NamedTuple):
    """A number of a text: its digits, its unit, empty if it has none, and the word after it."""

    digits: str
    unit: str
    word: str
    line: int


def numbers(text: str) -> Iterator[Number]:
    """Find the numbers of a text, except in code, comments, headings and names."""
    text = _NO_CLAIM.sub(lambda match: "\n" * match[0].count("\n") or "…", text)
    for match in _A_NUMBER.finditer(text):
        after, before = text[match.end() :][:80].replace("\n", " "), text[: match.start()][-40:]
        unit = _UNIT_AFTER.match(after) or _UNIT_BEFORE.search(before.replace("\n", " "))
        word = re.match(r" ?([A-Za-zµ%][\w/%]*)", after)
        following = "" if word is None or word[1] in _CONNECTING else word[1]
        line = text.count("\n", 0, match.start()) + 1
        yield Number(match[0], unit["unit"] if unit else "", following, line)


def is_measured(number: Number, records: Sequence[Record]) -> bool:
    """Return whether a number is a median or an end of what one of the records measured."""
    digits = number.digits.replace(",", "")
    decimals = len(digits.partition(".")[2])
    return any(
        f"{value:.{decimals}f}" == digits
        for known in records
        if not known.thrown_away
        for row in known.rows
        for value, unit in _values(row)
        if unit == number.unit or (not unit and number.unit == "times")
    )


def _values(row: Row) -> Iterator[tuple[float, str]]:
    """Yield what can be claimed of a row, with the unit as documents write it."""
    unit = UNITS.get(row.unit, "")
    for spread, its_unit in (
        (row.our_spread, unit),
        (row.their_spread, unit),
        (row.value, "" if row.is_ratio else unit),
    ):
        for value in spread or ():
            yield value, its_unit


def is_set_up(number: Number, records: Sequence[Record]) -> bool:
    """Return whether a number, and the word after it, is in the set-up of one of the records."""
    return any(
        (one.digits, one.word) == (number.digits, number.word)
        for known in records
        for text in _set_up(known)
        for one in numbers(text)
    )


def _set_up(known: Record) -> Iterator[str]:
    machine = known.machine
    yield from (machine.machine, machine.kernel, machine.file_system, machine.note)
    yield known.command.replace("-", " ")
    for row in known.rows:
        yield from (row.case, row.what, row.note)


def sections(document: Path, text: str) -> Iterator[tuple[int, str]]:
    """Yield the first line and the text of each section whose claims have records of their own."""
    if document.name == "README.md":
        yield 1, text
        return
    line = 1
    for part in re.split(r"^(?=##)", text, flags=re.MULTILINE):
        yield line, part
        line += part.count("\n")


def problems(document: Path, text: str) -> Iterator[str]:
    """Yield what a document claims without a record, or otherwise than its record."""
    name = document.name
    try:
        rendered = render(document, text)
    except (OSError, ValueError, KeyError, TypeError) as error:
        yield f"{name}: {error}"
        return
    if rendered != text:
        yield f"{name}: a table is not that of its record: python -m benchmarks.claims"
    if len(BLOCK.findall(text)) != len(re.findall(r"<!-- (?:record|published|end)", text)) / 2:
        yield f"{name}: a block does not begin or end as it should"
    for first, section in sections(document, text):
        named = [one[1] for one in BLOCK.findall(section) if one[0] == "record"]
        records = [record.read(FOLDER / one) for one in named]
        rest = BLOCK.sub(lambda match: "\n" * match[0].count("\n"), section)
        for number in numbers(rest):
            if not (is_measured(number, records) or is_set_up(number, records)):
                what = " ".join(one for one in (number.digits, number.unit or number.word) if one)
                where = f"{name}, line {first + number.line - 1}"
                yield f"{where}: {what} is in no record that its section names: {named}"


def record_problems(folder: Path, texts: Sequence[str]) -> Iterator[str]:
    """Yield what is wrong with the records: fields, rounds, commands that are gone, no claim."""
    blocks = [match for text in texts for match in BLOCK.findall(text)]
    kinds = {name: kind for kind, name, *_ in blocks}
    for path in sorted(folder.glob("*.json")):
        if path.name not in kinds:
            yield f"{path.name}: no claim names it"
            continue
        try:
            if kinds[path.name] == "published":
                commands = [one.by.strip("`") for one in record.read_published(path)]
            else:
                commands = [record.read(path).command]
        except (ValueError, KeyError, TypeError) as error:
            yield f"{path.name}: {error}"
            continue
        for command in commands:
            if command.startswith("python -m ") and not exists(command):
                yield f"{path.name}: its command is gone: {command}"


def exists(command: str) -> bool:
    """Return whether a benchmark and the options of a command are there."""
    _, _, module, *words = shlex.split(command)
    name = f"{module}.__main__" if module == "benchmarks" else module
    with contextlib.redirect_stderr(io.StringIO()):
        try:
            importlib.import_module(name).parser().parse_args(words)
        except (ImportError, AttributeError, SystemExit):
            return False
    return True


def main() -> int:
    """Write the tables, and print what is wrong; return the exit code."""
    found: list[str] = []
    texts = []
    for document in DOCUMENTS:
        text = document.read_text()
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            text = render(document, text)
            document.write_text(text)
        texts.append(text)
        found += problems(document, text)
    found += record_problems(FOLDER, texts)
    print(*found, sep="\n", end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
