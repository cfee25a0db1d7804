"""Calibration: which measured runs are used for which forecasts, and their effect."""

from typing import Any

import pytest

from moepack.planning.forecasting.calibration import RUN_REL_STD, calibrate
from moepack.planning.forecasting.measured_runs import MeasuredRun
from moepack.planning.forecasting.rates import Estimate, Rates
from moepack.planning.forecasting.reads import KIND_WORDS, Kind, Reads
from tests.support.machines import GB, machine
from tests.support.values import some

LAYERS = 48
DENSE, EXPERTS = 0.86 * GB, 1.092 * GB
BOX = machine(vram=32, vram_bandwidth=936, bandwidth=40, drive=3)
READS: dict[Kind, Reads] = {
    "gpu": Reads(LAYERS, vram=DENSE + EXPERTS),
    "offload": Reads(LAYERS, vram=DENSE, memory=EXPERTS),
    "cpu": Reads(LAYERS, memory=DENSE + EXPERTS),
    "stream": Reads(LAYERS, memory=DENSE + EXPERTS, drive=0.2 * GB),
}


def measured(kind: Kind, speed: float = 20.0, **values: Any) -> MeasuredRun:
    return MeasuredRun("receipt.json", "entry 1", kind, 1, speed, 0.0)._replace(**values)


def calibrated(kind: Kind, *runs: MeasuredRun) -> tuple[Rates, list[str | None]]:
    rates = Rates.from_machine(BOX, kind, some(BOX.drive).bandwidth)
    return calibrate(rates, kind, [(run, READS[run.kind]) for run in runs], LAYERS)


def refusals(kind: Kind, *runs: MeasuredRun) -> list[str | None]:
    return calibrated(kind, *runs)[1]


def estimated(kind: Kind, reads: Reads, *runs: MeasuredRun) -> Estimate:
    return some(calibrated(kind, *runs)[0].estimate(reads, RUN_REL_STD[kind], 0.0))


@pytest.mark.parametrize("kind", READS)
@pytest.mark.parametrize("of", READS)
def test_one_run_calibrates_its_own_kind_alone(kind: Kind, of: Kind) -> None:
    rates, (refusal,) = calibrated(kind, measured(of))
    is_plain = rates.terms(READS[kind]) == calibrated(kind)[0].terms(READS[kind])
    if of == kind:
        assert (refusal, is_plain) == (None, False)
    else:
        modes = f"({KIND_WORDS[of]}) than this one ({KIND_WORDS[kind]})"
        assert (
            refusal
            == f"it ran in another mode {modes}: the speed of one says nothing about the other"
        )
        assert is_plain


def test_beside_a_run_with_experts_in_memory_one_without_is_its_other_end() -> None:
    both = (measured("gpu", 150.0), measured("offload", 20.0))
    assert refusals("offload", *both) == refusals("offload", *both[::-1]) == [None, None]
    whole, part = refusals("gpu", *both)
    assert whole is None
    assert part is not None, "experts in memory would speak for experts in VRAM"


def test_streaming_teaches_the_times_of_computing_and_of_the_drive() -> None:
    """Of 100 ms it waited 60 for a drive that reads 0.2 GB meanwhile."""
    run = measured("stream", 10.0, read_length=0.2 * GB, read_seconds=0.06)
    terms = calibrated("stream", run)[0].terms(READS["stream"])
    layers, vram, memory, drive, _ = (seconds or 0.0 for seconds in terms)
    assert vram == 0
    assert layers + memory == pytest.approx(0.04, rel=0.1)
    assert drive == pytest.approx(0.06, rel=0.15)
    half = READS["stream"]._replace(drive=0.1 * GB)
    assert estimated("stream", half, run).seconds == pytest.approx(0.07, rel=0.1)
