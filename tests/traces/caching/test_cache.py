"""Caches: budgets, evictions by policy, pinned and favoured experts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moepack.common.errors import RequestError
from moepack.common.shape import ExpertKey
from moepack.traces.caching.cache import POLICIES, SimulatedCache, Tally, make
from moepack.traces.caching.policies import LeastRecentlyUsed, Ranking

LAYERS, EXPERTS = 3, 8
LENGTHS = {
    ExpertKey(layer, expert): 10 + layer for layer in range(LAYERS) for expert in range(EXPERTS)
}
CHOICES = st.lists(
    st.tuples(
        st.integers(0, LAYERS - 1),
        st.lists(st.integers(0, EXPERTS - 1), min_size=1, max_size=12),
        st.booleans(),
    ),
    max_size=40,
)
"""Layers, their routed experts, and whether reads of missing ones fail."""


def keys(layer: int, *experts: int) -> list[ExpertKey]:
    return [ExpertKey(layer, expert) for expert in experts]


@pytest.mark.parametrize("policy", POLICIES)
def test_what_is_pinned_is_there_from_the_start_and_stays(policy: str) -> None:
    pinned = keys(0, 7)
    cache, tally = make(policy, 60 if policy.startswith("layer") else 20, LENGTHS, pinned), Tally()
    for expert in (0, 1, 7, 2, 3, 4):
        cache.step(keys(0, expert), tally)
    assert tally.hit_count == 1
    assert cache.step(keys(0, 7, 4), tally).misses == []
    with pytest.raises(RequestError, match=r"pinned.*up to 20 B, found 30 B"):
        SimulatedCache(20, LENGTHS, LeastRecentlyUsed, keys(0, 1, 2, 3))


def test_another_policy_is_refused_by_name() -> None:
    with pytest.raises(RequestError, match="no such policy, expected lru, lfu.*found mru"):
        make("mru", 1, LENGTHS)


def test_what_is_kept_for_a_ranking_does_not_grow_with_a_run() -> None:
    idle = ExpertKey(0, 9)
    ranks = {idle: 1}
    ranking = Ranking(ranks.__getitem__)
    ranking.put([idle])
    for turn in range(100_000):
        key = ExpertKey(0, turn % 4)
        ranks[key] = -turn
        ranking.put([key])
    assert len(ranking._queue) < 200
    kept = frozenset([key])
    assert [ranking.pop(kept) for _ in range(5)] == [*keys(0, 2, 1, 0, 9), None]


ALIKE = dict.fromkeys(LENGTHS, 10)


@pytest.mark.parametrize("policy", POLICIES)
@given(
    choices=CHOICES,
    budget=st.integers(0, 400),
    most_used=st.lists(st.sampled_from(sorted(LENGTHS)), max_size=12, unique=True),
)
def test_a_cache_holds_what_it_says_and_no_more_than_it_may(
    policy: str, choices: list[tuple[int, list[int], bool]], budget: int, most_used: list[ExpertKey]
) -> None:
    cache, tally = make(policy, budget, LENGTHS), Tally()
    resident = {key for key in most_used if cache.admit(key)}
    assert not any(map(cache.admit, resident))
    assert cache.resident_length <= budget
    for key in most_used:
        cache.favour(key)
    cache.refresh(reversed(most_used))
    for number, (layer, experts, fails) in enumerate(choices):
        chosen = keys(layer, *experts)
        fits_all = cache.fits_all
        step = cache.step(chosen, tally)
        assert not (fits_all and step.evicted)
        assert set(step.misses) == set(chosen) - resident
        resident = (resident | set(chosen)) - set(step.evicted)
        if fails:
            cache.drop(step.misses)
            resident -= set(step.misses)
        if number % 3 == 2:
            resident -= set(cache.resize(max(0, budget - 40 * (number % 2))))
            # LFU cannot rank the last step's experts yet.
            assert "lfu" in policy or cache.resident_length <= cache.budget
        assert {key for key in LENGTHS if key in cache} == resident
        assert cache.resident_length == sum(LENGTHS[key] for key in resident)
        if not policy.startswith("layer"):
            assert cache.fits_all == (sum(LENGTHS.values()) <= cache.budget)
        if cache.fits_all and resident == LENGTHS.keys():
            assert cache.step(chosen, Tally()) == ([], []), "nothing changes then"
    assert tally.hit_count + tally.miss_count == sum(len(set(one)) for _, one, _ in choices)
    last = [keys(layer, 0)[0] for layer in range(LAYERS)]
    for key in last:
        cache.step([key], tally)
    cache.resize(0)
    assert {key for key in LENGTHS if key in cache} <= set(last), "what is favoured goes as well"


@pytest.mark.parametrize("policy", POLICIES)
def test_what_is_favoured_goes_last_and_the_first_of_it_last_of_all(policy: str) -> None:
    budget = 120 if policy.startswith("layer") else 40
    cache, tally = make(policy, budget, ALIKE), Tally()
    assert all(map(cache.admit, keys(0, 0, 1, 2)))
    for key in keys(0, 0, 1, 2):
        cache.favour(key)  # the third would be more than half
    for expert in (3, 4, 5, 6, 7):
        cache.step(keys(0, expert), tally)
    assert {key for key in LENGTHS if key in cache} >= set(keys(0, 0, 1))
    assert keys(0, 2)[0] not in cache
    assert cache.step(keys(0, 2, 3, 4), tally).evicted[-1] == keys(0, 1)[0]
    assert keys(0, 0)[0] in cache


def test_what_nothing_chose_is_evicted_in_the_order_in_which_it_was_refreshed() -> None:
    cache = SimulatedCache(40, ALIKE, LeastRecentlyUsed)
    assert all(map(cache.admit, keys(0, 0, 1, 2, 3)))
    assert not cache.admit(keys(0, 4)[0]), "there is no room"
    cache.refresh(keys(0, 3, 2, 1, 0))
    assert cache.step(keys(1, 0, 1), Tally()).evicted == keys(0, 3, 2)


def test_layers_share_another_budget_alike() -> None:
    cache = make("layer", 600, ALIKE)
    for layer in range(LAYERS):
        cache.step(keys(layer, *range(EXPERTS)), Tally())
    assert len(cache.resize(90)) == LAYERS * (EXPERTS - 3)
    assert all(sum(key in cache for key in keys(layer, *range(EXPERTS))) == 3 for layer in range(3))
