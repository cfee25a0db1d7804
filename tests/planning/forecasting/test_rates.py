"""Rates: by figures, by measured runs, and their standard deviations."""

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moepack.planning.forecasting.rates import Estimate, Rates, Reads, ceiling_seconds
from tests.support.machines import GB, machine
from tests.support.values import some

LAYERS = 48
DENSE, EXPERTS = 0.86 * GB, 1.092 * GB


def offloaded(share: float) -> Reads:
    """Return the reads of a token of Qwen3-30B-A3B Q4_K_M with a share of experts in memory."""
    return Reads(LAYERS, vram=DENSE + EXPERTS * (1 - share), memory=EXPERTS * share)


def offload_rates(**figures: Any) -> Rates:
    """Return the rates that a machine's figures give."""
    return Rates.from_machine(machine(**figures), "offload", None)


def estimate(rates: Rates, reads: Reads, rel_std: float = 0.05) -> Estimate:
    return some(rates.estimate(reads, rel_std, 0.0))


def test_the_ceiling_is_what_was_published() -> None:
    """An RTX 5090 with N of 0, 24 and 48 ("The MoE Lane"); its bandwidths follow from two."""
    box = machine(vram=32, vram_bandwidth=1441, bandwidth=40.2)
    ceilings = [ceiling_seconds(box, offloaded(share), None) for share in (0, 0.5, 1)]
    assert [round(1 / seconds) for seconds in ceilings if seconds] == [738, 69, 36]


def test_what_was_measured_there_lies_within_the_range() -> None:
    rates = offload_rates(vram=32, vram_bandwidth=1441, bandwidth=40.2)
    for share, speed in ((0, 302.4), (0.5, 41.9), (1, 20.4)):
        forecast = estimate(rates, offloaded(share))
        assert 1 / forecast.factor < speed * forecast.seconds < forecast.factor


RUNS = ((0.0, 0.005), (0.3, 0.02), (1.0, 0.06))


@pytest.mark.parametrize("order", list(itertools.permutations(RUNS)))
def test_the_order_of_runs_does_not_matter(order: Sequence[tuple[float, float]]) -> None:
    def after(runs: Sequence[tuple[float, float]]) -> Estimate:
        rates = offload_rates(vram=32, vram_bandwidth=936, bandwidth=40)
        for share, seconds in runs:
            rates = rates.updated(offloaded(share), seconds, 0.05)
        return estimate(rates, offloaded(0.6))

    assert after(order).seconds == pytest.approx(after(RUNS).seconds, rel=1e-3)


@given(
    st.lists(st.tuples(st.floats(0, 1), st.floats(-6, 4)), min_size=1, max_size=4), st.floats(0, 1)
)
def test_runs_that_contradict_each_other_end_in_a_speed(
    runs: list[tuple[float, float]], share: float
) -> None:
    """Without a bandwidth, nothing but runs tells the possible speeds."""
    rates = offload_rates(vram=32)
    for at, exponent in runs:
        rates = rates.updated(offloaded(at), 10**exponent, 0.05)
    forecast = rates.estimate(offloaded(share), 0.05, 0.0)
    if forecast is not None:
        assert forecast.seconds > 0
        assert 1 <= forecast.factor <= 1000.1
