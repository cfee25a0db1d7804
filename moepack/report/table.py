"""Rows of cells under one another, for people."""

from collections.abc import Sequence


def aligned(rows: Sequence[Sequence[str]], sides: str = "") -> list[str]:
    """Return rows as lines, each column as wide as its longest cell.

    `sides` has an `l` or an `r` for each column: where its cells stand; by default to the right.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = sides.ljust(len(widths), "r")
    place = {"l": str.ljust, "r": str.rjust}
    return [
        "  ".join(
            place[side](cell, width) for cell, width, side in zip(row, widths, sides, strict=True)
        ).rstrip()
        for row in rows
    ]
