"""How fast a drive reads, as a table: by the length of reads, and how many are in flight."""

from collections.abc import Iterable

from moepack.report.table import Column, Table
from moepack.sizes import size_text

_MIB = 1 << 20


def surface(points: Iterable[tuple[int, int, float]], indent: int) -> Table:
    """Return a table of MiB/s by length in bytes and depth; the deepest are left out first.

    A point is a length, a depth, and bytes a second.
    """
    speeds = {(length, depth): speed for length, depth, speed in points}
    depths = sorted({depth for _, depth in speeds})
    columns = [Column(""), *(Column(str(depth), rank=rank) for rank, depth in enumerate(depths))]
    rows = [
        [size_text(length), *(mib_text(speeds.get((length, depth))) for depth in depths)]
        for length in sorted({length for length, _ in speeds})
    ]
    return Table(columns, rows, indent)


def mib_text(speed: float | None) -> str:
    """Write bytes a second as MiB/s, without the unit; nothing where it was not measured."""
    return "" if speed is None else f"{speed / _MIB:,.0f}"
