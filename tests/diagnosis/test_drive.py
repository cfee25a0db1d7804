"""Drives: random reads as long as experts, against reads in order."""

import pytest

from moepack.diagnosis.drive import check_drive
from moepack.machine.model import Drive, Figure
from tests.support.machines import GB, surface

LENGTH = 2 << 20


def drive(low: float, high: float, sequential: float | None) -> Drive:
    figure = None if sequential is None else Figure(sequential * GB, "measured")
    return surface({(LENGTH, 4): (low, high)})._replace(sequential=figure)


@pytest.mark.parametrize(
    ("low", "high", "sequential", "verdict", "word"),
    [
        (3, 3.2, 3.3, "fine", ""),
        (3, 3.2, None, "fine", ""),
        (1, 1.2, 3.3, "limit", "longer reads"),
        (0.1, 0.12, 0.15, "limit", "NVMe"),
        (1, 3, 3.3, "limit", "throttled"),
    ],
)
def test_what_slows_reads_is_named(
    low: float, high: float, sequential: float | None, verdict: str, word: str
) -> None:
    finding = check_drive(drive(low, high, sequential), [])
    assert finding.verdict == verdict
    assert word in (finding.hint or "")
    assert ("in order" in (finding.measured or "")) == (sequential is not None)


def test_a_drive_that_was_not_measured_says_why() -> None:
    finding = check_drive(None, ["no GPU", "the drive was not measured: files lie in memory"])
    assert (finding.measured, finding.verdict) == (None, "unknown")
    assert finding.hint == "the drive was not measured: files lie in memory"
