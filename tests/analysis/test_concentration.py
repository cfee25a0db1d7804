"""The concentration gate, on routers whose skew is known because they were made so."""

import math
from collections.abc import Callable

import numpy as np
import pytest

from moepack.analysis import concentration, skew
from moepack.analysis.concentration import Concentration, RoutingSample
from moepack.hotness.counter import Half, SelectionCounter
from moepack.shape import ModelShape
from moepack.trace.model import Counts, Item, Origin, Phase, Tokens, Unknown
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


@pytest.mark.parametrize("request_length", [50, 10_000])
@pytest.mark.parametrize(
    ("weights", "verdict"), [(even, "even"), (skewed, "static"), (wandering, "recency")]
)
def test_the_verdict_is_right_where_it_is_known(
    weights: Weights, verdict: str, request_length: int
) -> None:
    found = judged(routed(weights, 1600, request_length))
    assert found.halves == ("requests" if request_length == 50 else "time")
    assert found.verdict == verdict, found.reason


@pytest.mark.parametrize("weights", [even, skewed])
def test_a_small_sample_is_called_small_however_skewed_it_looks(weights: Weights) -> None:
    found = judged(routed(weights, 60, 10))
    assert found.verdict == "small"
    assert "too small" in found.reason


def test_a_small_even_sample_looks_skewed_where_it_is_measured_on_itself() -> None:
    """That is why there is another half, and an even router beside it."""
    found = judged(routed(even, 60, 10))
    own = sorted(np.bincount(routed(even, 60, 10).expert), reverse=True)
    assert sum(own[:16]) / sum(own) > 0.3
    gate = next(one for one in found.total.coverage if one.percent == 25)
    assert gate.share == pytest.approx(0.25, abs=0.05)
    assert gate.even_share == pytest.approx(0.25, abs=0.02)


def test_coverage_is_learned_on_one_half_and_measured_on_the_other() -> None:
    """The halves choose other experts, so what one learns is worth nothing in the other."""

    def other(token: int) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
        weights = np.full(EXPERTS, 1e-9)
        weights[: EXPERTS // 2] = token % 2 == 0
        weights[EXPERTS // 2 :] = token % 2 == 1
        return weights + 1e-9

    found = judged(routed(other, 800, 1))
    assert all(one.share == 0 for one in found.total.coverage if one.percent < 50)


def test_entropy_and_gini_of_counts_that_can_be_worked_out() -> None:
    assert skew.entropy(np.array([5, 5, 5, 5])) == pytest.approx(1)
    assert skew.entropy(np.array([9, 0, 0, 0])) == 0
    assert skew.entropy(np.array([1, 1, 0, 0])) == pytest.approx(0.5)
    assert skew.entropy(np.array([3, 1])) == pytest.approx(
        -(0.75 * math.log2(0.75) + 0.25 * math.log2(0.25))
    )
    assert skew.gini(np.array([5, 5, 5, 5])) == pytest.approx(0)
    assert skew.gini(np.array([0, 0, 0, 9])) == pytest.approx(0.75)
    assert skew.gini(np.array([1, 3])) == pytest.approx(0.25)
    assert (skew.entropy(NOTHING), skew.gini(NOTHING)) == (1, 0)


def test_a_shape_tells_of_experts_and_layers_that_were_never_met() -> None:
    tokens = routed(skewed, 100, 10)
    shape = shape_of_counts(dict.fromkeys(range(5), 128))
    found = sampled(tokens, shape=shape).concentration()
    assert [skew.layer for skew in found.layers] == [0, 1, 2, 3, 4]
    assert found.layers[4].never_count == 128
    assert found.total.expert_count == 5 * 128
    assert found.layers[0].never_count >= 64
    assert judged(tokens).total.expert_count == LAYERS * EXPERTS


def test_prefill_is_left_out_unless_there_is_nothing_else() -> None:
    """What is chosen in prefill says nothing of decode, and both measures look at the same."""
    prefill = routed(skewed, 2000, 1000)._replace(phase=np.full(2000, Phase.PREFILL, np.uint8))
    decode = routed(even, 1600, 1000)
    mixed, alone = judged(prefill, ORIGIN, decode), judged(decode)
    assert mixed.verdict == alone.verdict == "even"
    assert mixed.total == alone.total
    assert judged(prefill).token_count == 2000


def test_the_margins_of_the_verdict() -> None:
    """Shares that differ by less than five points are called equal."""

    def verdict(share: float, even_share: float, latest: float, met: int) -> str:
        coverage = (concentration.TopCoverage(25, 16, share, even_share, latest),)
        total = concentration.Skew(None, 64, 0, 2 * met * 64, 1.0, 0.0, coverage)
        counts = np.full(64, met, np.int64)
        return concentration.judge(total, Half(100, counts))[0]

    assert verdict(0.50, 0.25, 0.54, 100) == "static"
    assert verdict(0.50, 0.25, 0.56, 100) == "recency"
    assert verdict(0.29, 0.25, 0.30, 100) == "even"
    assert verdict(0.31, 0.25, 0.30, 100) == "static"
    assert verdict(0.50, 0.25, 0.30, 10) == "static"
    assert verdict(0.50, 0.25, 0.30, 9) == "small", "of the half that is learned from"


def test_the_top_is_rounded_and_unmet_layers_have_no_cache() -> None:
    tokens = routed(even, 200, 10)
    shape = shape_of_counts(dict.fromkeys(range(LAYERS), EXPERTS) | {9: 30})
    found, without = sampled(tokens, shape=shape).concentration(), judged(tokens)
    assert [one.expert_count for one in found.layers[-1].coverage] == [2, 3, 8, 15]
    for one, other in zip(found.total.coverage, without.total.coverage, strict=True):
        assert one.latest_share == other.latest_share


def test_the_caches_of_all_layers_count_alike() -> None:
    """In one layer one expert is chosen ever again, in the other each only once."""
    token_count = 64
    again = np.stack((np.zeros(token_count), np.arange(token_count)), axis=1)
    tokens = routed(even, token_count, 8)._replace(
        starts=np.arange(token_count + 1) * 2,
        layer=np.tile(np.arange(2, dtype=np.uint16), token_count),
        expert=again.reshape(-1).astype(np.uint16),
    )
    found = judged(tokens)
    first, second = (layer.coverage[0].latest_share for layer in found.layers)
    assert first == pytest.approx(63 / 64)
    assert second == 0
    assert found.total.coverage[0].latest_share == pytest.approx(63 / 128)


def test_counts_alone_have_no_other_half() -> None:
    counts = Counts(Phase.DECODE, *(np.arange(4, dtype=np.uint16),) * 2, np.array([9, 5, 5, 1]))
    origin = Origin("counts", "x", frozenset({Unknown.TOKENS}), None, 77)
    sample = RoutingSample()
    for item in (origin, counts):
        sample.add(item)
    found = sample.concentration()
    assert (found.verdict, found.halves, found.token_count) == ("unknown", None, 77)
    assert all(one.share is None for one in found.total.coverage)
    assert found.request_count is None


def test_halves_are_of_equal_size_and_of_other_requests() -> None:
    counter = SelectionCounter()
    counter.add(ORIGIN)
    counter.add(routed(even, 100, 10))
    by, learned, measured = counter.halves() or pytest.fail("there are two")
    assert (by, learned.token_count, measured.token_count) == ("requests", 50, 50)
    assert (learned.counts + measured.counts == counter.counts).all()


@pytest.mark.parametrize("token_count", [2, 3, 64, 65, 1000, 5000])
def test_one_request_is_halved_in_time(token_count: int) -> None:
    counter = SelectionCounter()
    counter.add(ORIGIN)
    tokens = Tokens(
        np.zeros(token_count, np.int64),
        np.zeros(token_count, np.uint8),
        np.arange(token_count + 1),
        np.zeros(token_count, np.uint16),
        (np.arange(token_count) * 2 // token_count).astype(np.uint16),
    )
    counter.add(tokens)
    by, learned, measured = counter.halves() or pytest.fail("there are two")
    assert by == "time"
    assert learned.token_count + measured.token_count == token_count
    assert abs(learned.token_count - measured.token_count) <= max(1, token_count // 16)
    assert learned.counts[0] >= learned.token_count * 0.9
    assert measured.counts[1] >= measured.token_count * 0.9


def test_phases_can_be_left_out_and_unknown_ones_never_are() -> None:
    tokens = routed(even, 90, 10)._replace(phase=np.repeat(np.arange(3), 30).astype(np.uint8))
    counter = SelectionCounter(frozenset({Phase.DECODE}))
    counter.add(ORIGIN)
    counter.add(tokens)
    assert counter.token_count == 60
    assert counter.selection_count == 60 * LAYERS * USED
