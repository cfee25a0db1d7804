"""What reading takes: figures, receipts, and how sure one may be."""

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moepack.forecasting.rates import Estimate, Rates, ceiling_seconds
from moepack.forecasting.reads import Reads
from moepack.machine.model import Machine
from tests.support.machines import GB, machine, surface

LENGTH = 4 << 20
LAYERS = 48
DENSE, EXPERTS = 0.86 * GB, 1.092 * GB


def offloaded(share: float) -> Reads:
    """Return what a token of Qwen3-30B-A3B Q4_K_M reads with a share of experts in memory."""
    return Reads(LAYERS, vram=DENSE + EXPERTS * (1 - share), memory=EXPERTS * share)


def estimate(rates: Rates, reads: Reads, doubt: float = 0.05) -> Estimate:
    found = rates.estimate(reads, doubt, 0.0)
    assert found is not None
    return found


def test_the_ceiling_is_what_was_published() -> None:
    """An RTX 5090 with N of 0, 24 and 48 ("The MoE Lane"); its bandwidths follow from two."""
    box = machine(vram=32, vram_bandwidth=1441, bandwidth=40.2)
    ceilings = [ceiling_seconds(box, offloaded(share), LENGTH) for share in (0, 0.5, 1)]
    assert [round(1 / seconds) for seconds in ceilings if seconds] == [738, 69, 36]


def test_what_was_measured_there_lies_within_the_range() -> None:
    rates = Rates.of(machine(vram=32, vram_bandwidth=1441, bandwidth=40.2), "offload", LENGTH)
    for share, speed in ((0, 302.4), (0.5, 41.9), (1, 20.4)):
        found = estimate(rates, offloaded(share))
        assert 1 / found.factor < speed * found.seconds < found.factor


def test_two_receipts_at_the_ends_say_what_is_between() -> None:
    rates = Rates.of(machine(vram=32, vram_bandwidth=1441, bandwidth=40.2), "offload", LENGTH)
    for share, speed in ((0, 302.4), (1, 20.4)):
        rates = rates.learned(offloaded(share), 1 / speed, 0.045)
    found = estimate(rates, offloaded(0.5))
    middle = 2 / (1 / 302.4 + 1 / 20.4)
    assert 1 / found.seconds == pytest.approx(middle, rel=0.01)
    assert 1 / found.seconds == pytest.approx(41.9, rel=0.1)
    assert found.factor < 1.15


def test_receipts_teach_also_what_no_figure_says() -> None:
    rates = Rates.of(machine(vram=32), "offload", LENGTH)
    assert rates.estimate(offloaded(0.5), 0.05, 0) is None
    assert None in rates.terms(offloaded(0.5))
    for share, seconds in ((0, 0.004), (1, 0.04)):
        rates = rates.learned(offloaded(share), seconds, 0.02)
    assert estimate(rates, offloaded(0.5)).seconds == pytest.approx(0.022, rel=0.03)


RECEIPTS = ((0.0, 0.005), (0.3, 0.02), (1.0, 0.06))


@pytest.mark.parametrize("order", list(itertools.permutations(RECEIPTS)))
def test_the_order_of_receipts_does_not_matter(order: Sequence[tuple[float, float]]) -> None:
    box = machine(vram=32, vram_bandwidth=936, bandwidth=40)

    def after(receipts: Sequence[tuple[float, float]]) -> Estimate:
        rates = Rates.of(box, "offload", LENGTH)
        for share, seconds in receipts:
            rates = rates.learned(offloaded(share), seconds, 0.05)
        return estimate(rates, offloaded(0.6))

    assert after(order).seconds == pytest.approx(after(RECEIPTS).seconds, rel=1e-3)


@given(st.floats(0, 1), st.floats(0, 1), st.floats(0.2, 5))
def test_a_receipt_makes_no_forecast_less_sure(at: float, of: float, times: float) -> None:
    rates = Rates.of(machine(vram=32, vram_bandwidth=936, bandwidth=40), "offload", LENGTH)
    before = estimate(rates, offloaded(of), 0.0)
    seconds = estimate(rates, offloaded(at)).seconds * times
    after = estimate(rates.learned(offloaded(at), seconds, 0.05), offloaded(of), 0.0)
    assert after.deviation <= before.deviation * (1 + 1e-9)


def test_figures_that_were_measured_are_trusted_more() -> None:
    sure, typed = (
        estimate(
            Rates.of(
                machine(vram=24, vram_bandwidth=936, bandwidth=40, basis=basis), "offload", LENGTH
            ),
            offloaded(1),
        )
        for basis in ("measured", "typed")
    )
    assert sure.factor < typed.factor
    assert sure.seconds < typed.seconds, "nobody reaches what data sheets promise"


def test_no_token_is_faster_than_the_bandwidths() -> None:
    box = machine(vram=24, vram_bandwidth=936)
    least = ceiling_seconds(box, offloaded(0), LENGTH)
    assert least is not None
    assert least == pytest.approx((DENSE + EXPERTS) / (936 * GB))
    fast = Rates.of(box, "gpu", LENGTH).learned(offloaded(0), least / 10, 0.01)
    found = fast.estimate(offloaded(0), 0.05, least)
    assert found is not None
    assert found.seconds == least


def repeated(box: Machine, times: float) -> tuple[float, float]:
    """Return a receipt's seconds, so many times what was guessed, and what it then forecasts."""
    rates = Rates.of(box, "offload", LENGTH)
    seconds = times * estimate(rates, offloaded(1)).seconds
    again = estimate(rates.learned(offloaded(1), seconds, 0.045), offloaded(1))
    return seconds, again.seconds


@pytest.mark.parametrize("bandwidth", [40, 400])
@given(times=st.floats(0.8, 100))
def test_a_receipt_is_believed_however_slow_it_was(bandwidth: float, times: float) -> None:
    """As where a bandwidth was typed that a machine does not come near."""
    box = machine(vram=24, vram_bandwidth=936, bandwidth=bandwidth)
    seconds, again = repeated(box, times)
    assert again == pytest.approx(seconds, rel=0.06)


@given(one=st.floats(0.8, 100), other=st.floats(0.8, 100))
def test_a_slower_receipt_makes_a_slower_forecast(one: float, other: float) -> None:
    box = machine(vram=24, vram_bandwidth=936, bandwidth=40, basis="measured")
    (_, fast), (_, slow) = (repeated(box, times) for times in sorted((one, other)))
    assert fast <= slow * (1 + 1e-9)


@given(
    st.lists(st.tuples(st.floats(0, 1), st.floats(-6, 4)), min_size=1, max_size=4), st.floats(0, 1)
)
def test_receipts_that_contradict_each_other_end_in_a_speed(
    receipts: list[tuple[float, float]], share: float
) -> None:
    """Where no bandwidth is known either, nothing but receipts says what is possible."""
    rates = Rates.of(machine(vram=32), "offload", LENGTH)
    for at, exponent in receipts:
        rates = rates.learned(offloaded(at), 10**exponent, 0.05)
    found = rates.estimate(offloaded(share), 0.05, 0.0)
    if found is not None:
        assert found.seconds > 0
        assert 1 <= found.factor <= 1000.1


def test_no_ceiling_without_a_bandwidth_that_is_needed() -> None:
    assert ceiling_seconds(machine(vram=24, vram_bandwidth=936), offloaded(0.5), LENGTH) is None
    assert ceiling_seconds(machine(vram=24), offloaded(0), LENGTH) is None
    assert ceiling_seconds(machine(bandwidth=40), Reads(1, memory=1, drive=1), LENGTH) is None
    assert ceiling_seconds(machine(bandwidth=40), Reads(1, memory=40e9), LENGTH) == 1


def test_one_gpu_after_the_other_computes() -> None:
    two = machine(vram=24, vram_bandwidth=500, gpu_count=2)
    assert ceiling_seconds(two, Reads(1, vram=500e9), LENGTH) == 1


def test_a_drive_counts_at_the_length_and_depth_of_the_reads() -> None:
    box = machine(bandwidth=40)._replace(
        drive=surface({(1 << 20, 4): (1, 1), (16 << 20, 4): (3, 3), (16 << 20, 32): (9, 9)})
    )
    reads = Reads(0, drive=2e9)
    assert ceiling_seconds(box, reads, 4 << 20) == pytest.approx(1)
    assert ceiling_seconds(box, reads, 64 << 20) == pytest.approx(2 / 3)
    assert ceiling_seconds(box, reads, 1 << 10) == pytest.approx(2)
