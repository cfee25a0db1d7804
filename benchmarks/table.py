"""The rows of a benchmark: what was measured, round by round, its limit, and how it is printed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from moepack.bench.measuring import Spread, spread

_WIDTHS = (44, 24, 24, 22, 12, 0)
HEADING = ("what: against what", "moepack", "peer", "ratio (spread)", "limit", "")


@dataclass(frozen=True, slots=True)
class Row:
    """One thing that was measured, in the order of its rounds.

    `what` is the peer of a `case`, or the figure that was measured of it. `ours` and `theirs` are
    in `unit`. The value of a round is ours in relation to theirs, or ours alone if there is no
    peer. Its median is judged: at most `limit`, or at least if `higher_is_better`. Rounds that are
    `excluded`, the first is 1, are thrown away for the reasons given. `note` is the set-up, or why
    nothing was measured.
    """

    case: str
    what: str
    unit: str = ""
    ours: Sequence[float] = ()
    theirs: Sequence[float] = ()
    relation: Literal["ratio", "difference"] = "ratio"
    limit: float | None = None
    higher_is_better: bool = False
    note: str = ""
    excluded: Mapping[int, str] = field(default_factory=dict)

    @property
    def is_ratio(self) -> bool:
        """Whether the value of a round is a ratio, without a unit."""
        return bool(self.theirs) and self.relation == "ratio"

    @property
    def value(self) -> Spread | None:
        """What is judged; None where nothing was measured."""
        if not self.theirs:
            return self.our_spread
        pairs = zip(self.ours, self.theirs, strict=True)
        if self.relation == "difference":
            return self._spread([mine - other for mine, other in pairs])
        return self._spread([mine / other for mine, other in pairs])

    @property
    def our_spread(self) -> Spread | None:
        """Our rounds, but for those that are excluded."""
        return self._spread(self.ours)

    @property
    def their_spread(self) -> Spread | None:
        """The rounds of the peer, but for those that are excluded."""
        return self._spread(self.theirs)

    @property
    def met(self) -> bool | None:
        """Whether the limit is met; None without one, and where nothing was measured."""
        if self.value is None or self.limit is None:
            return None
        if self.higher_is_better:
            return self.value.median >= self.limit
        return self.value.median <= self.limit

    def _spread(self, values: Sequence[float]) -> Spread | None:
        kept = [one for number, one in enumerate(values, start=1) if number not in self.excluded]
        return spread(kept) if kept else None


def line(row: Row) -> str:
    """Write a row of the table."""
    peer, value = "", ""
    if row.their_spread is not None:
        peer = f"{number_text(row.their_spread.median)} {row.unit}"
    if row.value is not None:
        unit = "" if row.is_ratio else row.unit
        value = spread_text(row.value, unit)
    ours = row.note
    if row.our_spread is not None:
        ours = f"{number_text(row.our_spread.median)} {row.unit}"
    verdict = {True: "met", False: "NOT met", None: ""}[row.met]
    name = f"{row.case}: {row.what}" if row.what else row.case
    return cells((name, ours, peer, value, limit_text(row), verdict))


def cells(texts: Sequence[str]) -> str:
    """Write the cells of one line of the table."""
    columns = (text.ljust(width) for text, width in zip(texts, _WIDTHS, strict=True))
    return "  ".join(columns).rstrip()


def limit_text(row: Row) -> str:
    """Write the limit of what was measured."""
    if row.value is None or row.limit is None:
        return ""
    sign = ">=" if row.higher_is_better else "<="
    return f"{sign} {_value_text(row.limit, '' if row.is_ratio else row.unit)}"


def spread_text(value: Spread, unit: str) -> str:
    """Write a median with the lowest and the highest round; a ratio has no unit."""
    median, lowest, highest = (_value_text(one, unit) for one in value)
    return f"{median} ({lowest} to {highest})"


def _value_text(value: float, unit: str) -> str:
    return number_text(value) if unit else f"{value:.2f}"


def number_text(value: float) -> str:
    """Write a figure with three digits, and all digits of a count or a large one."""
    is_whole = abs(value) >= 1000 or value == round(value)
    return f"{value:,.0f}" if is_whole else f"{value:#.3g}".rstrip(".")
