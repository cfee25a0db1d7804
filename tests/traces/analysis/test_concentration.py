"""The concentration gate, on routers of known skew."""

import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from moepack.common.errors import TraceError
from moepack.common.shape import ModelShape
from moepack.report import trace_text
from moepack.traces.analysis import gate
from moepack.traces.analysis.concentration import Concentration, RoutingSample
from moepack.traces.analysis.gate import Evidence
from moepack.traces.model import Counts, Item, Origin, Phase, Tokens, Unknown
from tests.support.amounts import amounts
from tests.support.shapes import shape_of_counts

ORIGIN = Origin("test", "test")
EXPERTS, USED, LAYERS = 64, 4, 3
NOTHING = np.zeros(4, np.int64)
Weights = Callable[[int], "np.ndarray[tuple[int], np.dtype[np.float64]]"]


def routed(weights: Weights, token_count: int, request_length: int, seed: int = 0) -> Tokens:
    """Draw the experts of tokens; `weights` gives those of a token's number."""
    draw = np.random.default_rng(seed)
    keys = draw.gumbel(size=(token_count, LAYERS, EXPERTS))
    keys += np.log([[weights(token)] * LAYERS for token in range(token_count)])
    expert = np.argsort(-keys, axis=2)[:, :, :USED].reshape(-1)
    layer = np.tile(np.repeat(np.arange(LAYERS), USED), token_count)
    return Tokens(
        np.arange(token_count) // request_length,
        np.full(token_count, Phase.DECODE, np.uint8),
        np.arange(token_count + 1) * (LAYERS * USED),
        layer.astype(np.uint16),
        expert.astype(np.uint16),
    )


def judged(*pieces: Item) -> Concentration:
    return sampled(*pieces).concentration()


def sampled(*pieces: Item, shape: ModelShape | None = None) -> RoutingSample:
    sample = RoutingSample(shape)
    for item in (ORIGIN, *pieces):
        sample.add(item)
    return sample


def even(token: int) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
    return np.ones(EXPERTS)


def skewed(token: int) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
    return 1 / np.arange(1, EXPERTS + 1) ** 1.5


def wandering(token: int) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
    """Prefer eight experts, and every 40 tokens eight others."""
    favoured = np.random.default_rng(token // 40).permutation(EXPERTS)[:8]
    weights = np.full(EXPERTS, 0.01)
    weights[favoured] = 1
    return weights


def topics(order: list[int], seed: int = 0) -> Tokens:
    """Make requests of 300 tokens; each topic has favourites of its own."""

    def weights(token: int) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
        ranks = np.random.default_rng(2 * seed + order[token // 300]).permutation(EXPERTS)
        return skewed(token)[ranks]

    return routed(weights, 300 * len(order), 300, seed)


@pytest.mark.parametrize("request_length", [50, 10_000])
@pytest.mark.parametrize(
    ("weights", "word"), [(even, "even"), (skewed, "static"), (wandering, "recency")]
)
def test_the_verdict_is_right_where_it_is_known(
    weights: Weights, word: str, request_length: int
) -> None:
    facts = judged(routed(weights, 1600, request_length))
    assert facts.halves == "time"
    assert facts.verdict == word, facts.reason


@pytest.mark.parametrize("seeds", amounts(1, 40))
def test_a_change_of_topic_is_no_static_hotness(seeds: int) -> None:
    """Five requests on one topic and five on another."""
    for seed in range(seeds):
        facts = judged(topics([0] * 5 + [1] * 5, seed))
        assert facts.verdict != "static", facts.reason
        for same in ([0, 1] * 5, [0] * 10):
            facts = judged(topics(same, seed))
            assert facts.verdict == "static", facts.reason


@pytest.mark.parametrize("weights", [even, skewed])
def test_a_small_sample_is_called_small_however_skewed_it_looks(weights: Weights) -> None:
    facts = judged(routed(weights, 60, 10))
    assert facts.verdict == "small"
    assert "too small" in facts.reason
    needed = re.search(r"as some ([\d,]+) tokens have", facts.reason)
    assert needed is not None
    requests = -(-int(needed[1].replace(",", "")) // 10)
    assert judged(routed(weights, 10 * requests, 10)).verdict != "small"
    assert judged(routed(weights, 9 * requests, 10)).verdict == "small"


def test_entropy_and_gini_of_counts_that_can_be_worked_out() -> None:
    assert gate.entropy(np.array([5, 5, 5, 5])) == pytest.approx(1)
    assert gate.entropy(np.array([9, 0, 0, 0])) == 0
    assert gate.entropy(np.array([1, 1, 0, 0])) == pytest.approx(0.5)
    assert gate.entropy(np.array([3, 1])) == pytest.approx(
        -(0.75 * math.log2(0.75) + 0.25 * math.log2(0.25))
    )
    assert gate.gini(np.array([5, 5, 5, 5])) == pytest.approx(0)
    assert gate.gini(np.array([0, 0, 0, 9])) == pytest.approx(0.75)
    assert gate.gini(np.array([1, 3])) == pytest.approx(0.25)
    assert (gate.entropy(NOTHING), gate.gini(NOTHING)) == (1, 0)


def test_a_shape_tells_of_experts_and_layers_that_were_never_met() -> None:
    tokens = routed(skewed, 100, 10)
    shape = shape_of_counts(dict.fromkeys(range(5), 128))
    facts = sampled(tokens, shape=shape).concentration()
    assert [skew.layer for skew in facts.layers] == [0, 1, 2, 3, 4]
    assert facts.layers[4].never_count == 128
    assert facts.total.expert_count == 5 * 128
    assert (facts.layers[0].never_count or 0) >= 64
    assert facts.has_expert_counts


FOUR = routed(lambda token: np.where(np.arange(EXPERTS) < USED, 1, 1e-9), 400, 100)
"""Four of 64 experts take everything."""


@pytest.mark.parametrize(
    "origin",
    [
        replace(ORIGIN, expert_count=EXPERTS),
        replace(ORIGIN, expert_counts=dict.fromkeys(range(LAYERS), EXPERTS)),
    ],
)
def test_experts_that_a_file_says_there_are_count_as_those_of_a_model(origin: Origin) -> None:
    sample = sampled(origin, FOUR)
    facts = sample.concentration()
    model = sampled(FOUR, shape=shape_of_counts(dict.fromkeys(range(LAYERS), EXPERTS)))
    assert facts == model.concentration()
    assert facts.verdict == "static", facts.reason
    assert [layer.never_count for layer in facts.layers] == [EXPERTS - USED] * LAYERS
    assert sample.heat_table()[1].shape == (LAYERS, EXPERTS)
    assert sample.curves()["LRU cache"] == pytest.approx(model.curves()["LRU cache"], nan_ok=True)


def test_where_no_file_says_how_many_there_are_that_is_said() -> None:
    facts = judged(FOUR)
    assert not facts.has_expert_counts
    assert (facts.total.expert_count, facts.total.never_count) == (LAYERS * USED, None)
    assert f"{USED} are assumed, one more than the highest number that was selected" in facts.reason
    text = str(trace_text.concentration(facts))
    assert re.search(r"^all +1\.000 +0\.0\d\d +– ", text, re.M), text
    assert "`model` says it" in text
    assert "assumed" not in judged(replace(ORIGIN, expert_count=EXPERTS), FOUR).reason


@pytest.mark.parametrize(
    ("origins", "message"),
    [
        ([{"expert_count": 64}, {"expert_count": 32}], "expected 64 experts, found 32"),
        ([{"expert_counts": {0: 64, 1: 64}}, {"expert_counts": {1: 8}}], "layer 1: .*found 8"),
        ([{"expert_counts": {0: 64, 1: 32}}, {"expert_count": 32}], "64 experts, found 32"),
        ([{"expert_count": 3}, {}], "layer 0: traces of .* experts below 3, found expert 3"),
    ],
)
def test_traces_that_say_other_numbers_are_not_judged_together(
    origins: list[dict[str, Any]], message: str
) -> None:
    with pytest.raises(TraceError, match=message):
        judged(*(replace(ORIGIN, **origin) for origin in origins), FOUR)


def test_prefill_is_left_out_unless_there_is_nothing_else() -> None:
    """Routing in prefill tells nothing about decode; it only warms the caches."""
    prefill = routed(skewed, 2000, 1000)._replace(phase=np.full(2000, Phase.PREFILL, np.uint8))
    decode = routed(even, 1600, 1000)
    mixed, alone = judged(prefill, ORIGIN, decode), judged(decode)
    assert mixed.verdict == alone.verdict == "even"
    for one, other in zip(mixed.total.coverage, alone.total.coverage, strict=True):
        assert replace(one, latest_share=None) == replace(other, latest_share=None)
        assert one.latest_share is None or one.latest_share > (other.latest_share or 0)
    assert judged(prefill).token_count == 2000


def test_the_margins_of_the_verdict() -> None:
    """Shares that differ by less than five points are called equal."""

    def word(share: float, even_share: float, latest: float, count: int) -> str:
        return gate.judge(Evidence(share, even_share, count), latest)

    assert word(0.50, 0.25, 0.54, 100) == "static"
    assert word(0.50, 0.25, 0.56, 100) == "recency"
    assert word(0.29, 0.25, 0.30, 100) == "even"
    assert word(0.31, 0.25, 0.30, 100) == "static"
    assert word(0.50, 0.25, 0.30, 10) == "static"
    assert word(0.50, 0.25, 0.30, 9) == "small"


def test_counts_alone_have_no_other_half() -> None:
    counts = Counts(Phase.DECODE, *(np.arange(4, dtype=np.uint16),) * 2, np.array([9, 5, 5, 1]))
    origin = Origin("counts", "x", frozenset({Unknown.TOKENS}), None, 77)
    facts = judged(origin, counts)
    assert (facts.verdict, facts.halves, facts.token_count) == ("unknown", None, 77)
    assert all(one.share is None for one in facts.total.coverage)
    assert facts.request_count is None
