"""What caches miss: of a trace, by the formula of U and D, of an even router."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moepack.errors import RequestError, TraceError
from moepack.footprint.weights import weights_of
from moepack.forecasting.misses import WorkingSet, by_even_router, by_trace, by_working_set
from moepack.forecasting.published import published_formula
from moepack.shape import ROUTED_FAMILY, FamilyShape, ModelShape
from moepack.simulation.simulate import simulate
from moepack.trace.formats.registry import ReadOptions
from tests.support.models import FIXTURES, first_shard

TRACE = str(FIXTURES / "qwen3moe-trace.csv")
LAYERS, EXPERTS, USED, LENGTH = 74, 256, 8, 20_054_016
SHAPE = ModelShape(
    tuple(FamilyShape(layer, ROUTED_FAMILY, EXPERTS, LENGTH, USED) for layer in range(LAYERS))
)
"""GLM-5 in IQ4_XS, as estimate_speed.py has it."""
STEP = LAYERS * USED * LENGTH
TOTAL = LAYERS * EXPERTS * LENGTH
KNOWN = WorkingSet(13_190, 2_412)

budgets = st.integers(0, 2 * TOTAL)


@pytest.fixture(scope="module")
def shape() -> ModelShape:
    """Return the shape of the model of which there is a trace."""
    return weights_of(first_shard("qwen3moe")).shape


@pytest.mark.parametrize("batch_count", [None, 4])
def test_of_a_trace_it_is_what_a_simulation_says(
    shape: ModelShape, batch_count: int | None
) -> None:
    asked = [1 << 20, 300_000, 524_288, 300_000, 2 << 20]
    options = ReadOptions(shape=shape)
    found = by_trace([TRACE], asked, options, batch_count)
    assert [one.budget for one in found] == asked
    for one in found:
        (alone,) = simulate(
            [TRACE],
            budgets=[one.budget],
            policies=["lru"],
            batch_count=batch_count,
            options=options,
        ).results
        assert (one.length, one.hit_rate) == (alone.bytes_per_token, alone.decode_hit_rate)
        assert one.source == "trace"
    assert found[0].length < found[2].length < found[1].length


def test_a_trace_of_a_prompt_alone_says_nothing(shape: ModelShape, tmp_path: Path) -> None:
    prompt = tmp_path / "prompt.csv"
    heading = "turn,phase,step,layer,slot,expert,weight,residency,expert_bytes"
    stated = "# model=tiny.gguf arch=qwen3moe n_layer=2 n_expert=16 n_expert_used=4"
    rows = [
        f"0,0,{step},{layer},{slot},{expert},0.25,1,4096"
        for step in range(3)
        for layer in range(2)
        for slot, expert in enumerate((1, 2, 3, 4))
    ]
    prompt.write_text("\n".join(["# route_trace v1", stated, heading, *rows, ""]))
    with pytest.raises(RequestError, match="the trace has no decoded token") as caught:
        by_trace([str(prompt)], [1 << 20], ReadOptions(shape=shape), None)
    assert caught.value.path == str(prompt)


@pytest.mark.parametrize("gibs", [48, 128, 192, 256, 300])
def test_the_formula_reads_what_estimate_speed_reads(gibs: int) -> None:
    found = by_working_set(SHAPE, STEP, gibs << 30, KNOWN)
    published = published_formula(ram_bytes=gibs << 30)
    bandwidth = published.parameters.ssd_bw_bytes_per_sec_raw
    assert found.length / bandwidth == pytest.approx(published.drive_seconds, rel=1e-12)
    assert found.hit_rate == pytest.approx(1 - found.length / STEP)
    assert found.source == "working set"


def test_the_formula_with_experts_of_two_lengths() -> None:
    """It counts experts, so that it takes their mean."""
    families = [FamilyShape(0, ROUTED_FAMILY, 10, 100, 2), FamilyShape(1, ROUTED_FAMILY, 30, 20, 2)]
    known = WorkingSet(20, 4, window=10)
    found = by_working_set(ModelShape(tuple(families)), 240, 400, known)
    assert found.length == (4 + 20 - 400 / 40) / 10 * 40


@given(budget=budgets)
def test_the_formula_keeps_within_bounds(budget: int) -> None:
    found = by_working_set(SHAPE, STEP, budget, KNOWN)
    assert 0 <= found.length <= STEP
    assert found.hit_rate is not None
    assert 0 <= found.hit_rate <= 1


def test_the_formula_misses_no_more_than_a_token_uses() -> None:
    crowded = WorkingSet(LAYERS * EXPERTS, LAYERS * EXPERTS, window=1)
    assert by_working_set(SHAPE, STEP, 0, crowded).length == STEP
    assert by_working_set(SHAPE, STEP, 0, crowded).hit_rate == 0


def test_nothing_is_missed_where_all_has_room() -> None:
    assert by_working_set(SHAPE, STEP, TOTAL, KNOWN)[1:5] == (0, 0, 0, 1)
    assert by_working_set(SHAPE, STEP, TOTAL - 1, KNOWN).length > 0, "new ones still come"
    assert by_even_router(SHAPE, STEP, TOTAL)[1:5] == (0, 0, 0, 1)
    assert by_even_router(SHAPE, STEP, TOTAL - 1).length > 0


@given(one=budgets, other=budgets)
def test_an_even_router_misses_less_with_more(one: int, other: int) -> None:
    less, more = (by_even_router(SHAPE, STEP, budget) for budget in sorted((one, other)))
    assert 0 <= more.length <= less.length <= STEP
    for found in (less, more):
        assert found.hit_rate is not None
        assert 0 <= found.hit_rate <= 1
        assert found.length == pytest.approx(STEP * (1 - found.hit_rate))
        assert found.source == "even router"


def test_an_even_router_hits_as_much_as_has_room() -> None:
    assert by_even_router(SHAPE, STEP, TOTAL // 4).hit_rate == 0.25


def test_below_what_a_token_uses_an_even_router_hits_nothing() -> None:
    assert by_even_router(SHAPE, STEP, STEP - 1)[1:5] == (STEP, STEP, STEP, 0)
    assert by_even_router(SHAPE, STEP, STEP).hit_rate == STEP / TOTAL


@given(budget=budgets)
def test_what_is_likely_lies_within_what_may_be(budget: int) -> None:
    for found in (by_working_set(SHAPE, STEP, budget, KNOWN), by_even_router(SHAPE, STEP, budget)):
        assert 0 <= found.least <= found.length <= found.most <= STEP


@pytest.mark.parametrize(("share", "times"), [(0.3, 3.1), (0.5, 2.1), (0.8, 1.6), (1.2, 1.1)])
def test_the_formula_is_off_where_memory_is_short(share: float, times: float) -> None:
    found = by_working_set(SHAPE, STEP, round(share * KNOWN.expert_count * LENGTH), KNOWN)
    assert found.most == pytest.approx(found.length * times)
    assert by_working_set(SHAPE, STEP, STEP - 1, KNOWN).most == STEP, "the cliff"


def test_a_trace_of_a_model_with_fewer_layers_is_refused(shape: ModelShape) -> None:
    larger = shape.families + tuple(
        family._replace(layer=family.layer + 10 * number)
        for number in (1, 2)
        for family in shape.families
    )
    with pytest.raises(TraceError, match="far less of the experts than one of this model"):
        by_trace([TRACE], [1 << 21], ReadOptions(shape=ModelShape(larger)), None)
