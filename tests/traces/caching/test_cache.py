"""Caches: budgets and evictions by policy."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moepack.common.errors import RequestError
from moepack.common.shape import ExpertKey
from moepack.traces.caching.cache import POLICIES, Tally, make

LAYERS, EXPERTS = 3, 8
LENGTHS = {
    ExpertKey(layer, expert): 10 + layer for layer in range(LAYERS) for expert in range(EXPERTS)
}
CHOICES = st.lists(
    st.tuples(
        st.integers(0, LAYERS - 1),
        st.lists(st.integers(0, EXPERTS - 1), min_size=1, max_size=12),
    ),
    max_size=40,
)
"""Layers, and their routed experts."""


def keys(layer: int, *experts: int) -> list[ExpertKey]:
    return [ExpertKey(layer, expert) for expert in experts]


def test_another_policy_is_refused_by_name() -> None:
    with pytest.raises(RequestError, match="no such policy, expected lrfu, lru, found mru"):
        make("mru", 1, LENGTHS)


@pytest.mark.parametrize("policy", POLICIES)
@given(choices=CHOICES, budget=st.integers(0, 400))
def test_a_cache_holds_what_it_says_and_no_more_than_it_may(
    policy: str, choices: list[tuple[int, list[int]]], budget: int
) -> None:
    cache, tally = make(policy, budget, LENGTHS), Tally()
    resident: set[ExpertKey] = set()
    for layer, experts in choices:
        chosen = keys(layer, *experts)
        assert set(cache.step(chosen, tally)) == set(chosen) - resident
        resident = {key for key in LENGTHS if key in cache}
        assert resident >= set(chosen)
        assert sum(LENGTHS[key] for key in resident) <= budget or resident == set(chosen)
        assert len(cache) == len(resident)
    assert tally.hit_count + tally.miss_count == sum(len(set(one)) for _, one in choices)
