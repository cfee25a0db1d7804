"""One check of a machine: its measurement, its verdict, and a hint."""

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["fine", "limit", "problem", "unknown"]
"""`limit` works but is slow; `problem` keeps something from working."""


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One line of a report: a check by `name`, its measurement, its verdict and a hint.

    `measured` is None if nothing could be measured, `hint` if there is nothing to do.
    """

    name: str
    measured: str | None
    verdict: Verdict
    hint: str | None = None
