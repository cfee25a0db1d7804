"""The concentration gate, on routers whose skew is known because they were made so."""

import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import moepack
from moepack.analysis import skew, verdict
from moepack.analysis.concentration import Concentration, RoutingSample, concentration
from moepack.analysis.verdict import Evidence
from moepack.errors import TraceError
from moepack.hotness.counter import SelectionCounter
from moepack.report import trace_text
from moepack.shape import ModelShape
from moepack.trace.model import Counts, Item, Origin, Phase, Tokens, Unknown
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
    found = judged(routed(weights, 1600, request_length))
    assert found.halves == "time"
    assert found.verdict == word, found.reason
    assert found.interleaved_verdict == (word if request_length == 50 else "unknown")


@pytest.mark.parametrize("seeds", amounts(4, 40))
def test_a_change_of_topic_is_no_static_hotness(seeds: int) -> None:
    """Five requests on one topic and five on another: every other request knows both, a day not."""
    for seed in range(seeds):
        found = judged(topics([0] * 5 + [1] * 5, seed))
        assert found.verdict != "static", found.reason
        assert found.interleaved_verdict == "static", found.reason
        assert "what is hot changes over time" in found.reason
        gate = next(one for one in found.total.coverage if one.percent == 25)
        assert gate.share is not None
        assert gate.interleaved_share is not None
        assert gate.interleaved_share > gate.share + 0.2


def test_topics_that_take_turns_are_static_over_time() -> None:
    found = judged(topics([0, 1] * 5))
    assert found.verdict == "static", found.reason
    assert found.interleaved_verdict != "static"
    assert "even and odd requests are not alike" in found.reason


def test_nothing_is_said_of_halves_that_agree() -> None:
    found = judged(topics([0] * 10))
    assert (found.verdict, found.interleaved_verdict) == ("static", "static")
    assert "every other request" not in found.reason


@pytest.mark.parametrize("lengths", [(20, 2980), (2980, 20), (20, 2960, 20)])
def test_a_long_request_beside_short_ones_is_no_small_sample(lengths: tuple[int, ...]) -> None:
    request = np.repeat(np.arange(len(lengths)), lengths)
    found = judged(routed(skewed, 3000, 1)._replace(request=request))
    assert found.verdict == "static", found.reason
    assert "every other request" not in found.reason, "20 tokens tell nothing"
    if len(lengths) == 2:
        assert found.interleaved_verdict == "small"


@pytest.mark.parametrize("weights", [even, skewed])
def test_a_small_sample_is_called_small_however_skewed_it_looks(weights: Weights) -> None:
    found = judged(routed(weights, 60, 10))
    assert found.verdict == "small"
    assert "too small" in found.reason


def test_a_small_even_sample_looks_skewed_where_it_is_measured_on_itself() -> None:
    """That is why there is another half, and an even router beside it."""
    own = sorted(np.bincount(routed(even, 60, 10).expert), reverse=True)
    assert sum(own[:16]) / sum(own) > 0.3
    tops = [judged(routed(even, 60, 10, seed)).total.coverage[2] for seed in range(20)]
    assert tops[0].percent == 25
    assert np.mean([one.share for one in tops]) == pytest.approx(0.25, abs=0.03)
    assert np.mean([one.even_share for one in tops]) == pytest.approx(0.25, abs=0.02)


def test_coverage_is_learned_on_one_half_and_measured_on_the_other() -> None:
    """The halves choose other experts, so what one learns is worth nothing in the other."""

    def other(token: int) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
        weights = np.full(EXPERTS, 1e-9)
        weights[: EXPERTS // 2] = token < 400
        weights[EXPERTS // 2 :] = token >= 400
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
    assert (found.layers[0].never_count or 0) >= 64
    assert found.has_expert_counts


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
    sample = RoutingSample()
    for item in (origin, FOUR):
        sample.add(item)
    stated = sample.concentration()
    model = sampled(FOUR, shape=shape_of_counts(dict.fromkeys(range(LAYERS), EXPERTS)))
    assert stated == model.concentration()
    assert stated.verdict == "static", stated.reason
    assert [layer.never_count for layer in stated.layers] == [EXPERTS - USED] * LAYERS
    assert sample.heat_table()[1].shape == (LAYERS, EXPERTS)
    assert sample.curves()["LRU cache"] == pytest.approx(model.curves()["LRU cache"], nan_ok=True)


def test_a_route_of_four_experts_that_take_everything_is_static(tmp_path: Path) -> None:
    path = tmp_path / "route.csv"
    rows = "".join(f"0,1,{step},0,{slot},{slot},0\n" for step in range(400) for slot in range(4))
    rows = "turn,phase,step,layer,slot,expert,x\n" + rows
    path.write_text("# model=m n_layer=1 n_expert=64 n_expert_used=4\n" + rows)
    found = concentration([str(path)])
    assert (found.verdict, found.total.never_count) == ("static", 60)
    moepack.import_trace([str(path)], tmp_path / "own")
    assert concentration([str(tmp_path / "own")]) == found


def test_where_no_file_says_how_many_there_are_that_is_said() -> None:
    found = judged(FOUR)
    assert not found.has_expert_counts
    assert (found.total.expert_count, found.total.never_count) == (LAYERS * USED, None)
    assert f"{USED} are assumed, one more than the highest number that was chosen" in found.reason
    text = str(trace_text.concentration(found))
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


def test_one_file_tells_of_the_others() -> None:
    found = judged(FOUR, replace(ORIGIN, expert_count=EXPERTS), routed(skewed, 400, 100))
    assert found.total.expert_count == LAYERS * EXPERTS
    assert found.has_expert_counts


def test_prefill_is_left_out_unless_there_is_nothing_else() -> None:
    """What is chosen in prefill says nothing of decode; it only warms the caches."""
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

    def word(share: float, even_share: float, latest: float, met: int) -> str:
        return verdict.judge(Evidence(share, even_share, met), latest)

    assert word(0.50, 0.25, 0.54, 100) == "static"
    assert word(0.50, 0.25, 0.56, 100) == "recency"
    assert word(0.29, 0.25, 0.30, 100) == "even"
    assert word(0.31, 0.25, 0.30, 100) == "static"
    assert word(0.50, 0.25, 0.30, 10) == "static"
    assert word(0.50, 0.25, 0.30, 9) == "small"


@pytest.mark.parametrize(
    ("share", "said"),
    [(0.57, "what is hot changes"), (0.54, None), (0.46, None), (0.43, "are not alike")],
)
def test_the_margins_of_what_is_said_of_other_halves(share: float, said: str | None) -> None:
    text = verdict.explain(Evidence(0.5, 0.25, 100), Evidence(share, 0.25, 100), 0.3)
    assert ("every other request" in text) == (said is not None)
    assert said is None or said in text


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


def test_phases_can_be_left_out_and_unknown_ones_never_are() -> None:
    tokens = routed(even, 90, 10)._replace(phase=np.repeat(np.arange(3), 30).astype(np.uint8))
    counter = SelectionCounter(frozenset({Phase.DECODE}))
    counter.add(ORIGIN)
    counter.add(tokens)
    assert counter.token_count == 60
    assert counter.selection_count == 60 * LAYERS * USED
