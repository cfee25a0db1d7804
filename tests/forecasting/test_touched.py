"""How many experts a micro-batch uses: published texts, traces, uniform routers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moepack.forecasting.touched import Touched, touched_of
from tests.support.models import FIXTURES, first_shard
from tests.support.shapes import shape_of_counts

TRACE = str(FIXTURES / "qwen3moe-trace.csv")


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
    found = Touched(used, count).shares(tokens)
    assert found.likely == pytest.approx(share, rel=0.2)
    assert found.least < share < found.most
    assert found.most == 1 - (1 - used / count) ** tokens, "a uniform router"


@given(st.integers(1, 8), st.integers(8, 512), st.integers(1, 1 << 16))
def test_shares_are_between_one_token_and_all(used: int, count: int, tokens: int) -> None:
    likely, least, most = Touched(used, count).shares(tokens)
    assert used / count - 1e-9 <= least <= likely <= most <= 1


def test_a_trace_says_it_better_and_beyond_its_end_no_more() -> None:
    shares = {1: 1 / 32, 2: 0.06, 64: 0.3, 128: 0.4}
    traced = Touched(8, 256, shares)
    assert traced.source == "trace"
    for tokens in (64, 128):
        found = traced.shares(tokens)
        assert found.likely == pytest.approx(shares[tokens])
        assert found.most / found.least < 1.5
    assert traced.shares(129).most == pytest.approx(Touched(8, 256).shares(129).most)
    assert Touched(8, 256).source == "published texts"


def test_a_model_that_uses_all_experts_reads_all() -> None:
    assert Touched(4, 4).shares(1) == (1, 1, 1)
    assert Touched(4, 4, {2: 1.0}).shares(2) == (1, 1, 1)


def test_of_a_model_it_is_known_where_a_token_is() -> None:
    assert touched_of(shape_of_counts({0: 4}), ()) is None
    from moepack.footprint.weights import weights_of

    shape = weights_of(first_shard("qwen3moe")).shape
    traced = touched_of(shape, [TRACE])
    assert traced is not None
    assert traced.source == "trace"
