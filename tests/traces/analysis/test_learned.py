"""Learned counts are judged as traces are, without the order of tokens."""

import numpy as np
import pytest

from moepack.traces.analysis.concentration import RoutingSample
from moepack.traces.analysis.learned import UseCounter, judge_learned
from moepack.traces.hotness.learned import LEAST_TOKENS, Learned
from moepack.traces.model import Ints, Origin, Phase
from tests.support.shapes import shape_of_counts
from tests.support.trace_samples import selections, tokens_from

LAYERS, EXPERTS, USED = 3, 64, 4
COUNTS = dict.fromkeys(range(LAYERS), EXPERTS)


def chosen(weights: Ints, token_count: int, seed: int = 0) -> Ints:
    """Draw the experts of tokens [tokens, layers, used]; `weights` are by expert."""
    draw = np.random.default_rng(seed)
    keys = draw.gumbel(size=(token_count, LAYERS, EXPERTS)) + np.log(weights)
    return np.argsort(-keys, axis=2)[:, :, :USED]


def count_into(learned: Learned, tokens: Ints, rows: int = 1) -> UseCounter:
    """Count tokens as a run does, `rows` at a time; add them to `learned`."""
    counter = UseCounter(COUNTS)
    for start in range(0, len(tokens), rows):
        step = tokens[start : start + rows]
        for layer in range(LAYERS):
            counter.add(layer, len(step), step[:, layer].ravel().tolist())
        if start % 20 == 0:
            learned.add(counter.pop_windows())
    learned.add(counter.pop_windows(is_last=True))
    return counter


def learned_of(tokens: Ints, rows: int = 1) -> Learned:
    learned = Learned(COUNTS)
    count_into(learned, tokens, rows)
    return learned


def sample_of(tokens: Ints) -> RoutingSample:
    sample = RoutingSample(shape_of_counts(COUNTS))
    sample.add(Origin("test", "test"))
    routed = [selections(dict(enumerate(token))) for token in tokens.tolist()]
    sample.add(tokens_from([(0, Phase.DECODE, token) for token in routed]))
    return sample


EVEN = np.ones(EXPERTS, np.int64)
SKEWED = np.where(np.arange(EXPERTS) % 7 == 0, 60, 1)
TEXTS = {"even": chosen(EVEN, 900), "static": chosen(SKEWED, 900)}


@pytest.mark.parametrize("verdict", TEXTS)
@pytest.mark.parametrize("rows", [1, 4])
def test_the_verdict_is_that_of_a_trace(verdict: str, rows: int) -> None:
    tokens = TEXTS[verdict]
    learned = learned_of(tokens, rows)
    facts = sample_of(tokens).concentration()
    judged = judge_learned(learned)
    assert judged.verdict == facts.verdict == verdict
    assert judged.is_warming == (verdict == "static")
    assert learned.token_count == len(tokens)
    assert learned.counts.total() == tokens.size


def test_a_few_tokens_are_too_few_to_pin_and_enough_to_begin_with() -> None:
    judged = judge_learned(learned_of(chosen(SKEWED, 100)))
    assert (judged.verdict, judged.is_warming) == ("small", True)
    judged = judge_learned(learned_of(chosen(EVEN, 100)))
    assert (judged.verdict, judged.is_warming) == ("small", False)


@pytest.mark.parametrize("count", [0, 1, LEAST_TOKENS])
def test_of_one_window_nothing_is_said(count: int) -> None:
    judged = judge_learned(learned_of(chosen(SKEWED, count)))
    assert (judged.verdict, judged.is_warming) == ("unknown", False)


def test_what_the_model_cannot_have_chosen_is_left_out() -> None:
    counter = UseCounter(COUNTS)
    counter.add(0, 1, [1, 2, 3, EXPERTS])
    counter.add(LAYERS, 1, [1, 2, 3, 4])
    counter.add(0, 0, [])
    counter.add(0, 2, [])
    assert not counter.pop_windows(is_last=True)
