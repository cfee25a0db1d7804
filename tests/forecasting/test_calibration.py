"""Which receipts calibrate which forecasts, and what they teach."""

import math
from typing import Any

import pytest

from moepack.errors import RequestError
from moepack.footprint.weights import Weights, weights_of
from moepack.forecasting.calibration import (
    DOUBTS,
    RECEIPT_DOUBTS,
    Calibration,
    calibrate,
    check_model,
)
from moepack.forecasting.rates import Rates
from moepack.forecasting.reads import Kind, Reads
from moepack.forecasting.receipts import Receipt
from tests.support.machines import GB, machine
from tests.support.models import first_shard

LAYERS = 48
DENSE, EXPERTS = 0.86 * GB, 1.092 * GB
BOX = machine(vram=32, vram_bandwidth=936, bandwidth=40, drive=3)
READS: dict[Kind, Reads] = {
    "gpu": Reads(LAYERS, vram=DENSE + EXPERTS),
    "offload": Reads(LAYERS, vram=DENSE, memory=EXPERTS),
    "cpu": Reads(LAYERS, memory=DENSE + EXPERTS),
    "stream": Reads(LAYERS, memory=DENSE + EXPERTS, drive=0.2 * GB),
}


def receipt(kind: Kind, speed: float = 20.0, **values: Any) -> Receipt:
    return Receipt("receipt.json", "entry 1", kind, 1, speed, 0.0)._replace(**values)


def calibrated(kind: Kind, *receipts: Receipt) -> Calibration:
    rates = Rates.of(BOX, kind, 4 << 20)
    return calibrate(rates, kind, [(one, READS[one.kind]) for one in receipts], LAYERS)


def refusals(kind: Kind, *receipts: Receipt) -> list[str | None]:
    return [one.refusal for one in calibrated(kind, *receipts).judged]


USES: dict[Kind, set[Kind]] = {
    "gpu": {"gpu"},
    "offload": {"offload"},
    "cpu": {"cpu"},
    "stream": {"stream"},
}


@pytest.mark.parametrize("kind", USES)
@pytest.mark.parametrize("of", USES)
def test_one_receipt_calibrates_its_own_kind_alone(kind: Kind, of: Kind) -> None:
    found = calibrated(kind, receipt(of))
    plain = Rates.of(BOX, kind, 4 << 20)
    (refusal,) = [one.refusal for one in found.judged]
    if of in USES[kind]:
        assert refusal is None
        assert found.used_count == 1
        assert found.rates.terms(READS[kind]) != plain.terms(READS[kind])
    else:
        assert refusal is not None
        assert refusal.startswith("it ran another way (")
        assert "says nothing of the other" in refusal
        assert found.used_count == 0
        assert found.rates.terms(READS[kind]) == plain.terms(READS[kind])


def test_the_reason_names_both_ways_of_running() -> None:
    (refusal,) = refusals("cpu", receipt("stream"))
    assert refusal == (
        "it ran another way (experts from the drive, the rest in memory) than this (whole in "
        "memory): what one reaches of a machine says nothing of the other"
    )


def test_with_a_receipt_with_experts_in_memory_one_without_is_its_other_end() -> None:
    both = (receipt("gpu", 150.0), receipt("offload", 20.0))
    assert refusals("offload", *both) == [None, None]
    assert refusals("offload", *both[::-1]) == [None, None]
    whole, some = refusals("gpu", *both)
    assert whole is None
    assert some is not None, "what is in memory would speak for what is in VRAM"


@pytest.mark.parametrize("kind", ["gpu", "offload"])
def test_a_model_that_was_partly_on_the_gpu_calibrates_nothing(kind: Kind) -> None:
    (refusal,) = refusals(kind, receipt(kind, gpu_layer_count=20))
    assert refusal == "only 20 of 48 layers were on the GPU, with all their weights"
    for count in (LAYERS, LAYERS + 1, 99, None):
        assert refusals(kind, receipt(kind, gpu_layer_count=count)) == [None]


def test_without_a_gpu_no_layer_is_missed_there() -> None:
    assert refusals("cpu", receipt("cpu", gpu_layer_count=0)) == [None]


def test_a_flaw_is_the_reason() -> None:
    for kind in USES:
        found = refusals(kind, *(receipt(of, flaw="it says too little") for of in USES))
        assert found == ["it says too little"] * len(USES)


@pytest.mark.parametrize("kind", USES)
@pytest.mark.parametrize("count", [1, 5])
def test_the_next_run_may_differ_from_its_receipts_as_much_as_they_do(
    kind: Kind, count: int
) -> None:
    """However often it was measured: nothing is known of the next one's day."""
    receipts = [receipt(kind, read_length=0.2 * GB, read_seconds=0.02)] * count
    estimate = calibrated(kind, *receipts).rates.estimate(READS[kind], DOUBTS[kind], 0.0)
    assert estimate is not None
    plain = Rates.of(BOX, kind, 4 << 20).estimate(READS[kind], DOUBTS[kind], 0.0)
    assert plain is not None
    assert math.exp(1.645 * RECEIPT_DOUBTS[kind]) < estimate.factor < plain.factor


def test_runs_from_a_drive_differ_more_than_others() -> None:
    assert RECEIPT_DOUBTS["stream"] > 3 * RECEIPT_DOUBTS["cpu"]


def test_streaming_teaches_what_computing_and_what_the_drive_take() -> None:
    """Of 100 ms it waited 60 for a drive that reads 0.2 GB meanwhile."""
    run = receipt("stream", 10.0, read_length=0.2 * GB, read_seconds=0.06)
    found = calibrated("stream", run).rates.terms(READS["stream"])
    layers, vram, memory, drive, _ = (seconds or 0.0 for seconds in found)
    assert vram == 0
    assert layers + memory == pytest.approx(0.04, rel=0.1)
    assert drive == pytest.approx(0.06, rel=0.15)
    half = READS["stream"]._replace(drive=0.1 * GB)
    estimate = calibrated("stream", run).rates.estimate(half, DOUBTS["stream"], 0.0)
    assert estimate is not None
    assert estimate.seconds == pytest.approx(0.07, rel=0.1)


def test_a_run_that_says_it_only_waited_still_computed() -> None:
    run = receipt("stream", 10.0, read_length=0.2 * GB, read_seconds=0.1)
    estimate = calibrated("stream", run).rates.estimate(READS["stream"], DOUBTS["stream"], 0.0)
    assert estimate is not None
    assert estimate.seconds == pytest.approx(0.1, rel=0.1)


@pytest.fixture(scope="module")
def weights() -> Weights:
    return weights_of(first_shard("qwen3moe"))


@pytest.mark.parametrize("times", [1, 0.985, 1.015])
def test_versions_load_a_little_more_or_less(weights: Weights, times: float) -> None:
    assert weights.length is not None
    length = round(weights.length * times)
    check_model([receipt("cpu", model_length=length)], weights, "model.gguf")


@pytest.mark.parametrize("times", [0.97, 1.03, 1e6])
def test_a_receipt_of_another_model_is_an_error(weights: Weights, times: float) -> None:
    assert weights.length is not None
    receipts = [
        receipt("cpu", model_length=weights.length),
        receipt("cpu", model_length=round(weights.length * times), place="line 7"),
    ]
    with pytest.raises(RequestError, match="a receipt of another model") as caught:
        check_model(receipts, weights, "model.gguf")
    assert (caught.value.path, caught.value.place) == ("receipt.json", "line 7")
    assert "1.3 MiB of tensors, as model.gguf has" in str(caught.value)


def test_what_a_pack_of_experts_alone_cannot_tell_is_no_error(weights: Weights) -> None:
    unknown = weights._replace(outer=None)
    assert unknown.length is None
    check_model([receipt("cpu", model_length=5)], unknown, "model.moepack")
