"""The rows of a benchmark: what was measured, its limit, and how all of them are printed."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from moepack.bench.measuring import Spread

_WIDTHS = (40, 21, 21, 22, 12, 0)
HEADING = ("what: against what", "moepack", "peer", "ratio (spread)", "limit", "")


@dataclass(frozen=True, slots=True)
class Row:
    """One thing that was measured.

    `value` is judged: at most `limit`, or at least where `higher_is_better`; `unit` is empty where
    it is a ratio. `moepack` and `peer` say for people what both sides took. `value` is None for
    what could not be measured, and `moepack` says why. `met` is None for that, and without a limit.
    """

    name: str
    moepack: str
    peer: str = ""
    value: Spread | None = None
    unit: str = ""
    limit: float | None = None
    higher_is_better: bool = False

    met: bool | None = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "met", self._judge())

    def _judge(self) -> bool | None:
        if self.value is None or self.limit is None:
            return None
        if self.higher_is_better:
            return self.value.median >= self.limit
        return self.value.median <= self.limit


@dataclass(frozen=True, slots=True)
class Machine:
    """What was measured on. `huge_pages` is when the system gives them: who reads asks for them."""

    machine: str
    kernel: str
    file_system: str
    huge_pages: str
    python: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """A whole run; `other_load` is the share of the CPUs that other processes took."""

    machine: Machine
    rows: tuple[Row, ...]
    other_load: float | None

    @property
    def missed(self) -> tuple[Row, ...]:
        """The rows whose limit is not met."""
        return tuple(row for row in self.rows if row.met is False)

    @property
    def exit_code(self) -> int:
        """0 where no limit is missed, else 1; what could not be measured misses none."""
        return 1 if self.missed else 0


def line(row: Row) -> str:
    """Write a row of the table."""
    ratio = ""
    if row.value is not None:
        lowest, highest = (_number(end, row) for end in (row.value.lowest, row.value.highest))
        median = "" if row.unit else f"{_number(row.value.median, row)} "
        ratio = f"{median}({lowest} to {highest})"
    verdict = {True: "met", False: "NOT met", None: ""}[row.met]
    return cells((row.name, row.moepack, row.peer, ratio, _limit(row), verdict))


def cells(texts: Sequence[str]) -> str:
    """Write the cells of one line of the table."""
    columns = (text.ljust(width) for text, width in zip(texts, _WIDTHS, strict=True))
    return "  ".join(columns).rstrip()


def print_rows(rows: Iterable[Row]) -> None:
    """Print a table, each row as it is known."""
    print(cells(HEADING))
    for row in rows:
        print(line(row), flush=True)


def ending(outcome: Outcome) -> str:
    """Write what comes after the table: other load, and the limits that are not met."""
    lines = []
    if outcome.other_load is not None:
        lines.append(
            f"other processes took {outcome.other_load:.0%} of the CPUs meanwhile: "
            "near 0 %, or measure again"
        )
    lines.append(f"limits met: {sum(row.met is True for row in outcome.rows)}")
    for row in outcome.missed:
        assert row.value is not None
        median = f"{_number(row.value.median, row)} {row.unit}".rstrip()
        lines.append(f"NOT met: {row.name}: {median}, limit {_limit(row)}")
    return "\n".join(lines)


def _limit(row: Row) -> str:
    if row.value is None or row.limit is None:
        return ""
    sign = ">=" if row.higher_is_better else "<="
    return f"{sign} {_number(row.limit, row)} {row.unit}".rstrip()


def _number(number: float, row: Row) -> str:
    return f"{number:.3g}" if row.unit else f"{number:.2f}"
