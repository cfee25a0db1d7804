"""Misses of caches: of a trace, by the formula of U and D, of a uniform router."""

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moepack.common.errors import RequestError, TraceError
from moepack.common.shape import ROUTED_FAMILY, FamilyShape, ModelShape
from moepack.planning.footprint.model import footprint_of
from moepack.planning.forecasting.misses import (
    WorkingSet,
    by_trace,
    by_uniform_router,
    by_working_set,
    published_formula,
)
from moepack.traces.formats.reading import read_trace
from moepack.traces.simulation.simulate import simulate
from tests.support.models import FIXTURES, first_shard
from tests.support.values import some

TRACE = str(FIXTURES / "qwen3moe-trace.csv")
LAYERS, EXPERTS, USED, LENGTH = 74, 256, 8, 20_054_016
SHAPE = ModelShape(
    tuple(FamilyShape(layer, ROUTED_FAMILY, EXPERTS, LENGTH, USED) for layer in range(LAYERS))
)
"""GLM-5 in IQ4_XS, as estimate_speed.py has it."""
STEP = LAYERS * USED * LENGTH
TOTAL = LAYERS * EXPERTS * LENGTH
WORKING_SET = WorkingSet(13_190, 2_412)

BUDGETS = st.integers(0, 2 * TOTAL)


@pytest.fixture(scope="module")
def shape() -> ModelShape:
    """Return the shape of the model of which there is a trace."""
    return footprint_of(first_shard("qwen3moe")).weights.shape


@pytest.mark.parametrize("batch_count", [None, 4])
def test_of_a_trace_it_is_what_a_simulation_says(
    shape: ModelShape, batch_count: int | None
) -> None:
    budgets = [1 << 20, 300_000, 524_288, 300_000, 2 << 20]
    with read_trace(TRACE, model=shape) as trace:
        misses = by_trace(trace, budgets, batch_count, (0, 1))
    assert set(misses) == set(budgets)
    for budget, one in misses.items():
        (alone,) = simulate(
            [TRACE], model=shape, budgets=[budget], policies=["lrfu"], batch_count=batch_count
        ).results
        expected = (alone.bytes_per_token, alone.decode_hit_rate, "trace")
        assert (one.length, one.hit_rate, one.source) == expected
    assert [one.length for _, one in sorted(misses.items())] == sorted(
        (one.length for one in misses.values()), reverse=True
    )


def test_a_trace_of_a_prompt_alone_says_nothing(shape: ModelShape, tmp_path: Path) -> None:
    prompt = tmp_path / "prompt.csv"
    rows = "".join(f"0,0,0,{layer},0,{expert},1\n" for layer in (0, 1) for expert in range(4))
    prompt.write_text(f"turn,phase,step,layer,slot,expert,weight\n{rows}")
    with (
        read_trace(prompt, model=shape) as trace,
        pytest.raises(RequestError, match="the trace has no decoded token") as caught,
    ):
        by_trace(trace, [1 << 20], None, (0, 1))
    assert caught.value.path == str(prompt)


@pytest.mark.parametrize("gibs", [48, 128, 192, 256, 300])
def test_the_formula_reads_what_estimate_speed_reads(gibs: int) -> None:
    misses = by_working_set(SHAPE, STEP, gibs << 30, WORKING_SET)
    published = published_formula(ram_bytes=gibs << 30)
    bandwidth = published.parameters.ssd_bw_bytes_per_sec_raw
    assert misses.length / bandwidth == pytest.approx(published.drive_seconds, rel=1e-12)
    assert misses.hit_rate == pytest.approx(1 - misses.length / STEP)
    assert misses.source == "working set"


def test_nothing_is_missed_where_all_has_room() -> None:
    assert by_working_set(SHAPE, STEP, TOTAL, WORKING_SET)[:4] == (0, 0, 0, 1)
    assert by_working_set(SHAPE, STEP, TOTAL - 1, WORKING_SET).length > 0, "new ones still come"
    assert by_uniform_router(SHAPE, STEP, TOTAL)[:4] == (0, 0, 0, 1)
    assert by_uniform_router(SHAPE, STEP, TOTAL - 1).length > 0


@given(one=BUDGETS, other=BUDGETS)
def test_a_uniform_router_misses_less_with_more(one: int, other: int) -> None:
    less, more = (by_uniform_router(SHAPE, STEP, budget) for budget in sorted((one, other)))
    assert more.length <= less.length
    for misses in (less, more):
        assert misses.length == pytest.approx(STEP * (1 - some(misses.hit_rate)))
        assert misses.source == "even router"


def test_below_what_a_token_uses_a_uniform_router_hits_nothing() -> None:
    assert by_uniform_router(SHAPE, STEP, STEP - 1)[:4] == (STEP, STEP, STEP, 0)
    assert by_uniform_router(SHAPE, STEP, STEP).hit_rate == STEP / TOTAL


@given(budget=BUDGETS)
def test_likely_misses_lie_within_their_range(budget: int) -> None:
    for misses in (
        by_working_set(SHAPE, STEP, budget, WORKING_SET),
        by_uniform_router(SHAPE, STEP, budget),
    ):
        assert 0 <= misses.least <= misses.length <= misses.most <= STEP
        assert 0 <= some(misses.hit_rate) <= 1


def test_a_trace_of_a_model_with_fewer_layers_is_refused(shape: ModelShape) -> None:
    larger = shape.families + tuple(
        family._replace(layer=family.layer + 10 * number)
        for number in (1, 2)
        for family in shape.families
    )
    with (
        read_trace(TRACE, model=ModelShape(larger)) as trace,
        pytest.raises(TraceError, match="far less of the experts than those of this model"),
    ):
        by_trace(trace, [1 << 21], None, range(22))


@pytest.mark.parametrize(
    ("options", "speed"),
    [({}, 2.9715), ({"ram_bytes": 256 << 30}, 5.1360), ({"ssds_in_raid": 4}, 5.2723)],
)
def test_the_formula_gives_what_its_script_prints(options: dict[str, float], speed: float) -> None:
    assert round(published_formula(**options).tokens_per_second, 4) == speed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(({"ram_bytes": value}, "--ram_bytes.*0 or more") for value in (-1, math.nan, math.inf)),
        ({"batch_size": 0}, "--batch_size.*expected more than 0"),
        (
            {
                **{"active_per_layer": 0, "dense_gpu_latency_per_token": 0},
                **{"average_active_per_batch": 0, "average_expert_turnover_per_batch": 0},
            },
            "takes no time",
        ),
    ],
)
def test_the_formula_refuses_impossible_numbers(options: dict[str, float], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        published_formula(**options)
