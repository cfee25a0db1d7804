"""Pages for people: lines and tables, laid out for a terminal or as wide as they are."""

import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from moepack.common.sizes import count_text

_GAP = "  "
_UNIT = r"[(]?[\d.,]+ (?:[KMGT]?i?B|%|s|ms|min|h|tok|[GTP]FLOP)(?!\w)\S*"
_WORD = re.compile(rf"\s*[^\s`]*(?:`[^`]*`[^\s`]*)+|\s*{_UNIT}|\s*\S+")
"""A word with the space before it; a number and its unit are one, and a command in backquotes."""
_PLAIN_WORD = re.compile(r"\s*\S+")
_LABEL = re.compile(r"\s*\S+(?: \S+)*\s{2,}(?=\S)")
_WIDEST_LABEL = 0.4
"""Of a line: text goes on below itself behind a label that is no wider."""


def text_width(text: str) -> int:
    """Return how many columns of a terminal a text takes: two for wide characters, such as CJK."""
    return len(text) if text.isascii() else sum(map(_width, text))


def _width(character: str) -> int:
    if unicodedata.category(character) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def padded(text: str, width: int, *, is_right: bool = False) -> str:
    """Return a text with spaces up to `width` columns, before it if it is to stand on the right."""
    space = " " * (width - text_width(text))
    return space + text if is_right else text + space


def shortened(text: str, width: int) -> str:
    """Return a text in up to `width` columns, its middle replaced by `…` if it takes more.

    More is left of the end, where names of files have their numbers.
    """
    if text_width(text) <= width:
        return text
    end = _start_of(text[::-1], (width - 1) * 3 // 4)[::-1]
    return f"{_start_of(text, width - 1 - text_width(end))}…{end}"


def _start_of(text: str, width: int) -> str:
    count = 0
    for character in text:
        width -= _width(character)
        if width < 0:
            break
        count += 1
    return text[:count]


def wrapped(line: str, width: int) -> list[str]:
    """Break a line at words if it takes more than `width` columns.

    It goes on below its text: behind a label with two spaces, else two columns further in than it
    began. A word that is longer than a line is left whole, as a path is copied.
    """
    if text_width(line) <= width:
        return [line]
    label = _LABEL.match(line)
    hang = len(line) - len(line.lstrip()) + 2
    if label is not None and text_width(label[0]) <= _WIDEST_LABEL * width:
        hang = text_width(label[0])
    indent = " " * hang
    lines = [""]
    for word in _words(line, width - len(indent)):
        if not lines[-1].strip() or text_width(lines[-1] + word) <= width:
            lines[-1] += word
        else:
            lines.append(indent + word.lstrip())
    return lines


def _words(line: str, width: int) -> list[str]:
    """Return the words with the space before them; quoted commands stay whole if they fit."""
    words: list[str] = []
    for word in _WORD.findall(line):
        fits = text_width(word.strip()) <= width
        words += [word] if fits else _PLAIN_WORD.findall(word)
    return words


class Column(NamedTuple):
    """A column of a table.

    `side` is the alignment of its cells, `l` or `r`. If there is too little room, columns are left
    out, those of the highest `rank` first; those of rank 0 stay. A column with `least` has names,
    which are shortened in the middle before that, down to that width.
    """

    heading: str
    side: str = "r"
    rank: int = 0
    least: int = 0


class Table(NamedTuple):
    """Columns, and rows with a cell for each; `indent` is spaces before each line."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[str]]
    indent: int = 0

    def lines(self, width: int | None = None) -> list[str]:
        """Return the table as lines of up to `width` columns, as wide as it is without."""
        widths = self.widths(width)
        headings = [column.heading for column in self.columns]
        rows = [headings, *self.rows] if any(headings) else self.rows
        lines = [self._line(row, widths) for row in rows]
        left_out_count = len(self.widths()) - len(widths)
        if width is None or not left_out_count:
            return lines
        them = "it" if left_out_count == 1 else "them"
        columns = f"{' ' * self.indent}{count_text(left_out_count, 'column')} left out"
        return [*lines, *wrapped(f"{columns}: --json or a wider terminal shows {them}", width)]

    def widths(self, width: int | None = None) -> dict[int, int]:
        """Return the widths of columns by their numbers: of those that fit into `width`.

        Columns without any text are left out, then those of the highest ranks; names are shortened,
        the widest first.
        """
        cells = list(zip(*self.rows, strict=True)) or [(one.heading,) for one in self.columns]
        widths = {
            number: max(text_width(column.heading), *map(text_width, cells[number]))
            for number, column in enumerate(self.columns)
            if any(cells[number])
        }
        if width is None:
            return widths
        least = {
            number: min(wide, self.columns[number].least or wide) for number, wide in widths.items()
        }
        while self._total(least) > width and (highest := self._highest_rank(least)):
            least = {n: wide for n, wide in least.items() if self.columns[n].rank != highest}
        fitted = {number: widths[number] for number in least}
        for number in sorted(fitted, key=lambda n: -fitted[n]):
            excess = self._total(fitted) - width
            fitted[number] = max(least[number], fitted[number] - max(0, excess))
        return fitted

    def _highest_rank(self, numbers: Iterable[int]) -> int:
        return max(self.columns[number].rank for number in numbers)

    def _total(self, widths: Mapping[int, int]) -> int:
        return self.indent + sum(widths.values()) + len(_GAP) * (len(widths) - 1)

    def _line(self, row: Sequence[str], widths: Mapping[int, int]) -> str:
        cells = []
        for number, width in widths.items():
            column = self.columns[number]
            text = shortened(row[number], width) if column.least else row[number]
            cells.append(padded(text, width, is_right=column.side == "r"))
        return (" " * self.indent + _GAP.join(cells)).rstrip()


class Verbatim(str):
    """A command to paste, or a file's text, which is never wrapped."""

    __slots__ = ()


Block = str | Table


class Page:
    """Blocks under one another: lines of text, commands and tables."""

    def __init__(self, *blocks: Block) -> None:
        self.blocks = blocks

    def __str__(self) -> str:
        return self.text()

    def text(self, width: int | None = None, change: Callable[[str], str] = str) -> str:
        """Return the page in lines of up to `width` columns; without, nothing is wrapped.

        Longer are only verbatim texts, and words that are longer by themselves. All texts are
        written as `change` returns them, but those of tables and verbatim ones.
        """
        lines: list[str] = []
        for block in self.blocks:
            if isinstance(block, Table):
                lines += block.lines(width)
            elif isinstance(block, Verbatim):
                lines.append(block)
            else:
                for line in change(block).split("\n"):
                    lines += [line] if width is None else wrapped(line, width)
        return "\n".join(lines)
