"""Rows of cells under one another, for people: as many columns as a terminal has room for."""

from collections.abc import Sequence
from typing import NamedTuple

from moepack.common.sizes import count_text
from moepack.report.widths import padded, shortened, text_width, wrapped

_GAP = "  "


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


class Fitted(NamedTuple):
    """The columns of a table that fit: how wide they are, by their numbers."""

    columns: Sequence[Column]
    widths: dict[int, int]
    left_out_count: int
    indent: int
    width: int | None

    def heading(self) -> list[str]:
        """Return the line of headings; none if no column has one."""
        headings = [column.heading for column in self.columns]
        return [self.line(headings)] if any(headings) else []

    def line(self, row: Sequence[str]) -> str:
        """Return a row of cells as a line."""
        cells = (
            self._cell(self.columns[number], row[number], width)
            for number, width in self.widths.items()
        )
        return (" " * self.indent + _GAP.join(cells)).rstrip()

    def _cell(self, column: Column, cell: str, width: int) -> str:
        text = shortened(cell, width) if column.least else cell
        return padded(text, width, is_right=column.side == "r")

    def note(self) -> list[str]:
        """Return the lines about columns that were left out."""
        if not self.left_out_count or self.width is None:
            return []
        them = "it" if self.left_out_count == 1 else "them"
        columns = f"{' ' * self.indent}{count_text(self.left_out_count, 'column')} left out"
        return wrapped(f"{columns}: --json or a wider terminal shows {them}", self.width)


class Table(NamedTuple):
    """Columns, and rows with a cell for each; `indent` is spaces before each line."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[str]]
    indent: int = 0

    def lines(self, width: int | None = None) -> list[str]:
        """Return the table as lines of up to `width` columns, as wide as it is without."""
        fitted = self.fitted(width)
        return [*fitted.heading(), *map(fitted.line, self.rows), *fitted.note()]

    def fitted(self, width: int | None = None, usual: Sequence[int] = ()) -> Fitted:
        """Choose the columns with text that fit into `width`.

        Columns are at least as wide as `usual` says, where other rows follow.
        """
        cells = list(zip(*self.rows, strict=True)) or [(column.heading,) for column in self.columns]
        widths = {
            number: max(
                text_width(column.heading),
                *map(text_width, cells[number]),
                *usual[number : number + 1],
            )
            for number, column in enumerate(self.columns)
            if any(cells[number])
        }
        count = len(widths)
        if width is not None:
            self._leave_out(widths, width)
            self._narrow(widths, width)
        return Fitted(self.columns, widths, count - len(widths), self.indent, width)

    def _leave_out(self, widths: dict[int, int], width: int) -> None:
        """Leave out columns until the others fit, with their names as short as can be."""
        while self._total({n: self._least(n, wide) for n, wide in widths.items()}) > width:
            highest = max(self.columns[n].rank for n in widths)
            if not highest:
                return
            for number in [n for n in widths if self.columns[n].rank == highest]:
                del widths[number]

    def _narrow(self, widths: dict[int, int], width: int) -> None:
        """Narrow columns of names until lines fit, the widest first."""
        for number in sorted(widths, key=lambda n: -widths[n]):
            excess = self._total(widths) - width
            if excess > 0:
                wide = widths[number]
                widths[number] = max(self._least(number, wide), wide - excess)

    def _least(self, number: int, width: int) -> int:
        return min(width, self.columns[number].least or width)

    def _total(self, widths: dict[int, int]) -> int:
        return self.indent + sum(widths.values()) + len(_GAP) * (len(widths) - 1)
