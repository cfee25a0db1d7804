"""What a check found."""

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["fine", "limit", "problem", "unknown"]
"""`limit` works, and is what slows it down; `problem` keeps something from working."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of a report: `name` is what was looked at, `measured` what was found there.

    `measured` is None where nothing could be; `hint` says what to do, None where there is nothing.
    """

    name: str
    measured: str | None
    verdict: Verdict
    hint: str | None = None
