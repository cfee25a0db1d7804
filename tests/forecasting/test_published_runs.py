"""Forecasts against published runs, which are no part of the project.

MOEPACK_PUBLISHED_RUNS names the file of them; `-s` shows the tables of docs/numbers.md.
"""

import os
from collections.abc import Sequence

import numpy as np
import pytest

from tests.support import published_runs
from tests.support.published_runs import Forecast, Run

PATH = os.environ.get("MOEPACK_PUBLISHED_RUNS")
pytestmark = pytest.mark.skipif(PATH is None, reason="MOEPACK_PUBLISHED_RUNS names no file")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Run]:
    assert PATH is not None
    return published_runs.read_runs(PATH, tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def by_evidence(runs: list[Run]) -> dict[str, list[Forecast]]:
    return published_runs.evidence(runs)


def p90(forecasts: Sequence[Forecast]) -> float:
    return float(np.percentile([abs(one.error) for one in forecasts], 90))


def held(forecasts: Sequence[Forecast]) -> float:
    return sum(one.is_held for one in forecasts) / len(forecasts)


def test_the_tables(runs: list[Run], by_evidence: dict[str, list[Forecast]]) -> None:
    print("", *published_runs.HEADING, sep="\n")
    for name, forecasts in by_evidence.items():
        print(published_runs.row(name, forecasts))
        assert forecasts
    print("", *published_runs.HEADING, sep="\n")
    for name, kind in published_runs.KIND_NAMES.items():
        print(
            published_runs.row(f"{name}, its group left out", published_runs.left_out(runs, kind))
        )


def test_ranges_without_receipts_hold_nine_of_ten(by_evidence: dict[str, list[Forecast]]) -> None:
    found = [
        one
        for name, forecasts in by_evidence.items()
        if name.endswith("without receipts")
        for one in forecasts
    ]
    assert len(found) > 50
    assert held(found) >= 0.9


@pytest.mark.parametrize("count", ["one receipt", "two receipts", "any two receipts"])
def test_ranges_with_receipts_hold_nine_of_ten(
    count: str, by_evidence: dict[str, list[Forecast]]
) -> None:
    found = {name: held(some) for name, some in by_evidence.items() if f", {count}" in name}
    assert found
    assert min(found.values()) >= 0.9


def test_two_receipts_predict_the_rest_of_a_sweep(by_evidence: dict[str, list[Forecast]]) -> None:
    found = by_evidence["experts in memory, two receipts at the ends"]
    assert len(found) > 10
    assert p90(found) <= 0.1


def test_receipts_narrow_ranges(by_evidence: dict[str, list[Forecast]]) -> None:
    widths = [
        np.median([one.highest / one.lowest for one in by_evidence[f"experts in memory, {name}"]])
        for name in ("without receipts", "one receipt", "two receipts at the ends")
    ]
    assert widths == sorted(widths, reverse=True)
    assert len(set(widths)) == len(widths)


def test_no_range_is_above_the_ceiling(by_evidence: dict[str, list[Forecast]]) -> None:
    for forecasts in by_evidence.values():
        for one in forecasts:
            assert 0 < one.lowest <= one.speed <= one.highest
