"""A cache keeps and gives up what its rules say, whatever is asked of it."""

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moepack.caching.cache import POLICIES, ExpertCache, Tally, make
from moepack.caching.policies import LeastFrequentlyUsed, LeastRecentlyUsed, Ranking, S3Fifo
from moepack.errors import RequestError
from moepack.keys import ExpertKey

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
"""Layers, what they choose, and whether reading what is missing fails."""


def keys(layer: int, *experts: int) -> list[ExpertKey]:
    return [ExpertKey(layer, expert) for expert in experts]


class Plain:
    """The rules once more, as plainly as they can be written: looks at everything each time."""

    def __init__(self, budget: int, policy: str) -> None:
        self.budget = budget
        self.by_uses = policy.endswith("lfu")
        self.held: set[ExpertKey] = set()
        self.uses: Counter[ExpertKey] = Counter()
        self.last: dict[ExpertKey, int] = {}

    def step(self, chosen: Sequence[ExpertKey]) -> tuple[set[ExpertKey], list[ExpertKey]]:
        """Return what was missing, and what was given up, in its order."""
        used = sorted(set(chosen), key=lambda key: len(chosen) - 1 - chosen[::-1].index(key))
        for key in used:
            self.uses[key] += 1
            self.last[key] = len(self.last) + sum(self.uses.values())
        missing = set(used) - self.held
        self.held |= missing
        given_up = []
        while sum(LENGTHS[key] for key in self.held) > self.budget and self.held - set(used):
            victim = min(self.held - set(used), key=self.order)
            self.held.remove(victim)
            given_up.append(victim)
        return missing, given_up

    def order(self, key: ExpertKey) -> tuple[int, int]:
        return (self.uses[key] if self.by_uses else 0, self.last[key])


@pytest.mark.parametrize("policy", POLICIES)
@given(choices=CHOICES, budget=st.integers(0, 400))
def test_a_cache_keeps_to_its_budget_and_to_what_a_step_uses(
    policy: str, choices: list[tuple[int, list[int], bool]], budget: int
) -> None:
    cache, again, tally = make(policy, budget, LENGTHS), make(policy, budget, LENGTHS), Tally()
    held: set[ExpertKey] = set()
    for layer, experts, fails in choices:
        chosen = keys(layer, *experts)
        step = cache.step(chosen, tally)
        assert again.step(chosen, Tally()) == step, "the same again"
        assert set(step.misses) == set(chosen) - held
        assert len(set(step.given_up)) == len(step.given_up)
        held |= set(chosen)
        assert set(step.given_up) <= held - set(chosen)
        held -= set(step.given_up)
        assert {key for key in LENGTHS if key in cache} == held
        assert cache.held_length == sum(LENGTHS[key] for key in held)
        if not policy.startswith("layer"):
            assert cache.held_length <= budget or held == set(chosen)
        if fails:
            held -= set(step.misses)
            cache.drop(step.misses)
            again.drop(step.misses)


@pytest.mark.parametrize("policy", ["lru", "lfu", "layer", "layer+lfu"])
@given(choices=CHOICES, budget=st.integers(0, 400))
def test_a_cache_does_what_the_rules_say(
    policy: str, choices: list[tuple[int, list[int], bool]], budget: int
) -> None:
    cache, tally = make(policy, budget, LENGTHS), Tally()
    shares = LAYERS if policy.startswith("layer") else 1
    plain = [Plain(budget // shares, policy) for _ in range(shares)]
    missed, held_all = 0, False
    for layer, experts, fails in choices:
        chosen = keys(layer, *experts)
        missing, given_up = plain[layer % shares].step(chosen)
        step = cache.step(chosen, tally)
        assert set(step.misses) == missing
        assert step.given_up == given_up
        held = set().union(*(one.held for one in plain))
        assert {key for key in LENGTHS if key in cache} == held
        assert cache.held_length == sum(LENGTHS[key] for key in held)
        missed += sum(LENGTHS[key] for key in missing)
        assert not held_all or (step, cache.holds_all) == (([], []), True), "nothing changes then"
        held_all = cache.holds_all
        fits = cache.budget // shares * shares >= cache.held_length  # shares are of one length
        assert held_all == (len(held) == len(LENGTHS) and fits)
        if fails:
            cache.drop(step.misses)
            plain[layer % shares].held -= missing
            held_all = cache.holds_all
    assert tally.missed_length == missed
    assert tally.hit_count + tally.miss_count == sum(len(set(found)) for _, found, _ in choices)


def test_an_expert_that_many_tokens_chose_is_looked_up_once_and_used_last() -> None:
    cache, tally = ExpertCache(30, LENGTHS, LeastRecentlyUsed), Tally()
    cache.step(keys(0, 1, 2, 3, 1), tally)
    assert (tally.hit_count, tally.miss_count, tally.missed_length) == (0, 3, 30)
    assert cache.step(keys(0, 4), tally).given_up == keys(0, 2), "1 was chosen after it"


def test_a_step_that_is_larger_than_the_budget_stays_until_the_next() -> None:
    cache, tally = ExpertCache(20, LENGTHS, LeastRecentlyUsed), Tally()
    assert cache.step(keys(0, 0, 1, 2, 3), tally).given_up == []
    assert cache.held_length == 40
    assert cache.step(keys(0, 3), tally).given_up == keys(0, 0, 1)


def test_what_is_over_the_budget_is_not_held_for_good() -> None:
    cache = ExpertCache(20, dict.fromkeys(keys(0, 0, 1, 2), 10), LeastRecentlyUsed)
    cache.step(keys(0, 0, 1, 2), Tally())
    assert len(cache) == 3
    assert not cache.holds_all


@pytest.mark.parametrize("policy", POLICIES)
def test_what_is_pinned_is_there_from_the_start_and_stays(policy: str) -> None:
    pinned = keys(0, 7)
    cache, tally = make(policy, 60 if policy.startswith("layer") else 20, LENGTHS, pinned), Tally()
    for expert in (0, 1, 7, 2, 3, 4):
        cache.step(keys(0, expert), tally)
    assert tally.hit_count == 1
    assert cache.step(keys(0, 7, 4), tally).misses == []
    with pytest.raises(RequestError, match=r"pinned.*up to 20 B, found 30 B"):
        ExpertCache(20, LENGTHS, LeastRecentlyUsed, keys(0, 1, 2, 3))


def test_uses_are_counted_while_an_expert_is_away() -> None:
    cache, tally = ExpertCache(20, LENGTHS, LeastFrequentlyUsed), Tally()
    for expert in (0, 0, 0, 1, 2, 1, 2, 3, 2):
        cache.step(keys(0, expert), tally)
    assert cache.step(keys(0, 4), tally).given_up == keys(0, 0), "2 was used as often, and later"


def test_what_is_least_stale_is_what_its_layer_uses_and_comes_up_first() -> None:
    cache, tally = make("least-stale", 60, LENGTHS), Tally()
    for layer, experts in ((0, (1, 2)), (1, (1, 2)), (2, (1,))):
        cache.step(keys(layer, *experts), tally)
    assert cache.step(keys(0, 1, 3), tally).given_up == keys(0, 2), "layer 0 did not use it"
    assert cache.step(keys(1, 1, 2, 3), tally).given_up == keys(0, 1), "layer 0 was computed last"


def test_what_its_layer_uses_again_is_no_longer_stale() -> None:
    cache, tally = make("least-stale", 30, LENGTHS), Tally()
    for expert in (1, 2, 1):
        cache.step(keys(0, expert), tally)
    assert cache.step(keys(1, 1), tally).given_up == keys(0, 2)


def test_s3fifo_keeps_what_was_used_twice_and_what_comes_back_soon() -> None:
    cache, tally = make("s3fifo", 40, LENGTHS), Tally()
    for expert in (0, 1, 2, 0, 0, 3):
        cache.step(keys(0, expert), tally)
    assert cache.step(keys(0, 4), tally).given_up == keys(0, 1), "0 was used again, and moved on"
    assert cache.step(keys(0, 5), tally).given_up == keys(0, 2)
    cache.step(keys(0, 1), tally)  # comes back at once to where 0 is
    for expert in (6, 7):
        cache.step(keys(0, expert), tally)
    assert {key.expert for key in LENGTHS if key in cache} >= {0, 1}


class PlainS3Fifo:
    """S3-FIFO once more, with lists; an expert in a queue stands beside its uses."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.small: list[tuple[ExpertKey, int]] = []
        self.main: list[tuple[ExpertKey, int]] = []
        self.ghosts: list[ExpertKey] = []

    def step(self, used: Sequence[ExpertKey]) -> list[ExpertKey]:
        """Return what was given up, in its order."""
        held = {key for key, _ in self.small + self.main}
        for queue in (self.small, self.main):
            queue[:] = [(key, min(3, uses + (key in used))) for key, uses in queue]
        for key in used:
            if key not in held:
                (self.main if key in self.ghosts else self.small).append((key, 0))
                self.ghosts = [ghost for ghost in self.ghosts if ghost != key]
        given_up = []
        while len(self.small) + len(self.main) > self.most:
            is_small_full = len(self.small) * 10 >= len(self.small) + len(self.main)
            queues = (self.small, self.main) if is_small_full else (self.main, self.small)
            others = [one for queue in queues for one in queue if one[0] not in used]
            if not others:
                break
            key, uses = others[0]
            if (key, uses) in self.main:
                self.main.remove((key, uses))
                if uses:
                    self.main.append((key, uses - 1))
                    continue
            else:
                self.small.remove((key, uses))
                if uses > 1:
                    self.main.append((key, 0))
                    continue
                self.ghosts.append(key)
                self.ghosts = self.ghosts[-(len(self.small) + len(self.main)) :]
            given_up.append(key)
        return given_up


@given(
    choices=st.lists(st.lists(st.integers(0, EXPERTS - 1), min_size=1, unique=True), max_size=60),
    most=st.integers(1, EXPERTS),
)
def test_s3fifo_does_what_its_queues_say(choices: list[list[int]], most: int) -> None:
    cache, plain = ExpertCache(most * 10, LENGTHS, S3Fifo), PlainS3Fifo(most)
    for experts in choices:
        chosen = keys(0, *experts)
        assert cache.step(chosen, Tally()).given_up == plain.step(chosen)


@pytest.mark.parametrize("policy", POLICIES)
def test_what_could_not_be_read_is_missing_again(policy: str) -> None:
    cache, tally = make(policy, 600, LENGTHS), Tally()
    cache.step(keys(1, 1, 2), tally)
    cache.drop(keys(1, 2))
    assert cache.held_length == 11
    assert cache.step(keys(1, 1, 2), tally).misses == keys(1, 2)


def test_nothing_was_looked_up_yet() -> None:
    assert Tally().hit_rate is None
    assert Tally(hit_count=3, miss_count=1).hit_rate == 0.75


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
    assert [ranking.take(kept) for _ in range(5)] == [*keys(0, 2, 1, 0, 9), None]


ALIKE = dict.fromkeys(LENGTHS, 10)


@pytest.mark.parametrize("policy", POLICIES)
@given(
    choices=CHOICES,
    budget=st.integers(0, 400),
    most_used=st.lists(st.sampled_from(sorted(LENGTHS)), max_size=12, unique=True),
)
def test_with_experts_that_nothing_chose_a_cache_is_as_large_as_it_may_be(
    policy: str,
    choices: list[tuple[int, list[int], bool]],
    budget: int,
    most_used: list[ExpertKey],
) -> None:
    cache, tally = make(policy, budget, LENGTHS), Tally()
    held = {key for key in most_used if cache.admit(key)}
    assert not any(map(cache.admit, held))
    assert cache.held_length <= budget
    for key in most_used:
        cache.favour(key)
    cache.refresh(reversed(most_used))
    for number, (layer, experts, fails) in enumerate(choices):
        chosen = keys(layer, *experts)
        step = cache.step(chosen, tally)
        assert set(step.misses) == set(chosen) - held
        held = (held | set(chosen)) - set(step.given_up)
        if fails:
            cache.drop(step.misses)
            held -= set(step.misses)
        if number % 3 == 2:
            held -= set(cache.resize(max(0, budget - 40 * (number % 2))))
        assert {key for key in LENGTHS if key in cache} == held
        assert cache.held_length == sum(LENGTHS[key] for key in held)
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
    assert cache.step(keys(0, 2, 3, 4), tally).given_up[-1] == keys(0, 1)[0]
    assert keys(0, 0)[0] in cache


def test_what_nothing_chose_is_evicted_in_the_order_in_which_it_was_refreshed() -> None:
    cache = ExpertCache(40, ALIKE, LeastRecentlyUsed)
    assert all(map(cache.admit, keys(0, 0, 1, 2, 3)))
    assert not cache.admit(keys(0, 4)[0]), "there is no room"
    cache.refresh(keys(0, 3, 2, 1, 0))
    assert cache.step(keys(1, 0, 1), Tally()).given_up == keys(0, 3, 2)
