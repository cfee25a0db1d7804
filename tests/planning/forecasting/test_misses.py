"""Misses of caches: of a trace, and by a kept curve."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moepack.common.errors import RequestError, TraceError
from moepack.common.shape import ROUTED_FAMILY, FamilyShape, ModelShape
from moepack.planning.footprint.model import footprint_of
from moepack.planning.forecasting.misses import by_curve, by_trace
from moepack.planning.forecasting.touched import Touched, touched_shares
from moepack.traces.formats.reading import read_trace
from moepack.traces.simulation.simulate import simulate
from tests.support.models import FIXTURES, first_shard
from tests.support.shapes import shape_of_counts
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


# How many experts a micro-batch uses: published texts, traces, uniform routers.


@pytest.mark.parametrize(
    ("used", "count", "tokens", "share"),
    [
        (8, 256, 130, 0.40),  # Qwen3.6-35B
        (8, 256, 1658, 0.77),  # the same
        (6, 256, 149, 0.42),  # DeepSeek V4 Flash
        (6, 128, 130, 0.59),  # Qwen3-30B-A3B, by a trace
    ],
)
def test_published_texts_come_out(used: int, count: int, tokens: int, share: float) -> None:
    likely, least, most = Touched(used, count).shares(tokens)
    assert likely == pytest.approx(share, rel=0.2)
    assert least < share < most
    assert most < 1 - (1 - used / count) ** tokens, "a uniform router's"


def test_a_trace_says_it_better_and_beyond_its_end_no_more() -> None:
    shares = {1: 1 / 32, 2: 0.06, 64: 0.3, 128: 0.4}
    traced = Touched(8, 256, shares)
    assert traced.source == "trace"
    for tokens in (64, 128):
        likely, least, most = traced.shares(tokens)
        assert likely == pytest.approx(shares[tokens])
        assert most / least < 1.5
    within, beyond = traced.shares(128), traced.shares(129)
    assert beyond[2] / beyond[0] > 1.05 * within[2] / within[0]
    assert Touched(8, 256).source == "published texts"


HEADING = "turn,phase,step,layer,slot,expert,weight,residency,expert_bytes\n"
CHOSEN = [{0: 0, 1: 0}, {0: 1, 1: 0}, {0: 1, 1: 2}, {0: 3, 1: 0}, {0: 0, 1: 0}]
"""By token, the expert that each of two layers chooses."""
TWO_LAYERS = shape_of_counts({0: 4, 1: 4}, 9)


def write(path: Path, *requests: list[dict[int, int]]) -> str:
    """Write requests with a prompt of two tokens."""
    lines = [
        f"{turn},{int(token >= 2)},{token - 2 if token >= 2 else token},{layer},0,{expert},1,0,9\n"
        for turn, tokens in enumerate(requests)
        for token, chosen in enumerate(tokens)
        for layer, expert in chosen.items()
    ]
    path.write_text(HEADING + "".join(lines))
    return str(path)


def counted(window: int, *requests: list[dict[int, int]]) -> float:
    """Count the same in sets: the mean over layers of the mean over whole windows."""
    shares = []
    for layer in (0, 1):
        windows = [
            {chosen[layer] for chosen in tokens[start : start + window]}
            for tokens in requests
            for start in range(0, len(tokens) - window + 1, window)
        ]
        shares.append(sum(map(len, windows)) / len(windows) / 4)
    return sum(shares) / 2


def test_shares_are_those_of_whole_windows_of_a_request(tmp_path: Path) -> None:
    requests = CHOSEN, CHOSEN[:3]
    with read_trace(write(tmp_path / "t.csv", *requests), model=TWO_LAYERS) as trace:
        shares = touched_shares(trace)
    assert shares == {window: pytest.approx(counted(window, *requests)) for window in (1, 2, 4, 5)}


def test_counts_without_tokens_say_nothing(tmp_path: Path) -> None:
    (tmp_path / "h.csv").write_text("layer,expert,count\n0,0,5\n1,1,7\n")
    with (
        read_trace(tmp_path / "h.csv", model=TWO_LAYERS) as trace,
        pytest.raises(TraceError, match="no tokens in it"),
    ):
        touched_shares(trace)
