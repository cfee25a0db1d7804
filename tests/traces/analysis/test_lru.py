"""The hit rates of LRU caches by layer are those of simulation for the same steps."""

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from moepack.common.shape import ExpertKey
from moepack.traces.analysis.concentration import RoutingSample
from moepack.traces.caching import cache as caching
from moepack.traces.caching.cache import Tally
from moepack.traces.model import Phase
from moepack.traces.simulation.curves import LayerLru
from tests.support.routing import EXPERTS, LAYERS, RoutedCall, items_of, routing, steps_of
from tests.support.shapes import shape_of_counts

LENGTHS = {ExpertKey(layer, expert): 1 for layer in range(LAYERS) for expert in range(EXPERTS)}


def of_all(capacity: int) -> dict[int, int]:
    return dict.fromkeys(range(LAYERS), capacity)


def stepped(calls: list[RoutedCall], capacity: int) -> Tally:
    """Step through caches of `capacity` experts a layer, as running does; return decode's tally."""
    caches = [caching.make("lru", capacity, LENGTHS) for _ in range(LAYERS)]
    tallies = Tally(), Tally()
    for call, keys in steps_of(calls):
        caches[keys[0].layer].step(keys, tallies[call.phase is Phase.DECODE])
    return tallies[True]


def followed(calls: list[RoutedCall], piece_length: int = 7, **options: Any) -> LayerLru:
    lru = LayerLru(**options)
    for item in items_of(calls, piece_length):
        lru.add(item)
    return lru


@settings(max_examples=40)
@given(calls=routing(), piece_length=st.integers(1, 30))
def test_it_is_the_rate_of_caches_that_are_stepped_through(
    calls: list[RoutedCall], piece_length: int
) -> None:
    """Prefill warms them, one lookup a distinct expert and step, and a step keeps its own."""
    lru = followed(calls, piece_length)
    decoded = [call for call in calls if call.phase is Phase.DECODE]
    used = max(len(experts) for call in decoded for experts in call.tokens[0])
    for capacity in range(1, EXPERTS + 1):
        expected = stepped(calls, capacity).hit_rate if capacity >= used else None
        assert lru.hit_rate(of_all(capacity)) == expected
    assert lru.token_count == len(decoded)


@settings(max_examples=20)
@given(calls=routing())
def test_the_gate_shows_the_rate_of_as_many_experts(calls: list[RoutedCall]) -> None:
    sample = RoutingSample(shape_of_counts(dict.fromkeys(range(LAYERS), EXPERTS)))
    for item in items_of(calls, 7):
        sample.add(item)
    half = sample.concentration().total.coverage[-1]
    assert (half.percent, half.expert_count) == (50, EXPERTS // 2 * LAYERS)
    assert half.latest_share == stepped(calls, EXPERTS // 2).hit_rate
