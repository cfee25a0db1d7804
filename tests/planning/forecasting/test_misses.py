"""Misses of caches: of a trace, and by a kept curve."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moepack.common.errors import RequestError, TraceError
from moepack.common.shape import ROUTED_FAMILY, FamilyShape, ModelShape
from moepack.planning.footprint.model import footprint_of
from moepack.planning.forecasting.misses import by_curve, by_trace
from moepack.traces.formats.reading import read_trace
from moepack.traces.simulation.simulate import simulate
from tests.support.models import FIXTURES, first_shard
from tests.support.values import some

TRACE = str(FIXTURES / "qwen3moe-trace.csv")
LAYERS, EXPERTS, USED, LENGTH = 74, 256, 8, 20_054_016
SHAPE = ModelShape(
    tuple(FamilyShape(layer, ROUTED_FAMILY, EXPERTS, LENGTH, USED) for layer in range(LAYERS))
)
"""GLM-5 in IQ4_XS."""
STEP = LAYERS * USED * LENGTH
TOTAL = LAYERS * EXPERTS * LENGTH
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


@given(one=BUDGETS, other=BUDGETS)
def test_with_more_memory_less_is_missed(one: int, other: int) -> None:
    less, more = (by_curve(SHAPE, SHAPE.layers, STEP, budget) for budget in sorted((one, other)))
    assert more.length <= less.length
    for misses in (less, more):
        assert misses.length == pytest.approx(STEP * (1 - some(misses.hit_rate)))
        assert 0 <= misses.least <= misses.length <= misses.most <= STEP


PUBLISHED = [
    ("gemma-4-26b-a4b", 30, 128, 8, 0.137, 0.58),  # BigMoeOnEdge, 2,000 MiB
    ("qwen3-30b-a3b", 48, 128, 8, 0.12, 0.53),  # the same
    ("qwen3-30b-a3b", 48, 128, 8, 0.24, 0.765),
    ("qwen3-30b-a3b", 48, 128, 8, 0.3, 0.835),
    ("glm-5", 75, 256, 8, 0.169, 0.565),  # windlass, 62 GiB
    ("kimi-k2", 60, 384, 8, 0.0247, 0.42),  # MoE-Direct, 10 GiB
    ("qwen3-235b-a22b", 94, 128, 8, 0.25, 0.749),  # slots for a share of each layer
    ("qwen3-235b-a22b", 94, 128, 8, 0.5, 0.946),
    ("qwen3-235b-a22b", 94, 128, 8, 0.75, 0.971),
    ("gpt-oss-120b", 36, 128, 4, 0.026, 0.0),  # BigMoeOnEdge, below one token's
]
"""Published hits of caches: layers, experts, those of a token, the share in memory, the hits."""


@pytest.mark.parametrize(("model", "layers", "experts", "used", "share", "hits"), PUBLISHED)
def test_published_hits_are_within_the_range(
    model: str, layers: int, experts: int, used: int, share: float, hits: float
) -> None:
    families = (FamilyShape(n, ROUTED_FAMILY, experts, 1 << 20, used) for n in range(layers))
    shape, step = ModelShape(tuple(families)), (layers * used) << 20
    misses = by_curve(shape, shape.layers, step, int(share * shape.routed_length))
    assert some(misses.curve).is_own == model.startswith("qwen3-30b")
    assert misses.least <= (1 - hits) * step <= misses.most, model
    assert 1 - some(misses.hit_rate) == pytest.approx(1 - hits, rel=0.36)


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
