"""Places of experts: they never change, grow with the experts, and are bounded."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moepack.common.errors import TraceError
from moepack.traces.expert_places import MAX_PLACES, PAGE, ExpertPlaces

NUMBERS = st.sampled_from([0, 1, 127, 128, 129, 300, 65535])
PIECES = st.lists(st.lists(st.tuples(NUMBERS, NUMBERS), max_size=6), max_size=5)


def shorts(numbers: list[int]) -> "np.ndarray[tuple[int], np.dtype[np.uint16]]":
    return np.array(numbers, np.uint16)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(PIECES)
def test_each_expert_has_one_place_and_keeps_it(pieces: list[list[tuple[int, int]]]) -> None:
    places = ExpertPlaces()
    place_of: dict[tuple[int, int], int] = {}
    for pairs in pieces:
        layer, expert = shorts([pair[0] for pair in pairs]), shorts([pair[1] for pair in pairs])
        for pair, place in zip(pairs, places.index_of(layer, expert).tolist(), strict=True):
            assert place_of.setdefault(pair, place) == place
    assert len(set(place_of.values())) == len(place_of)
    assert all(place < places.count for place in place_of.values())
    layers, experts = places.keys(np.array(list(place_of.values()), np.int64))
    assert list(zip(layers.tolist(), experts.tolist(), strict=True)) == list(place_of)
    assert set(places.layers) == {layer for layer, _ in place_of}
    assert places.width == max((expert + 1 for _, expert in place_of), default=0)
    assert places.count <= PAGE * len(place_of)
    values = np.zeros(places.count, np.int64)
    values[list(place_of.values())] = range(1, len(place_of) + 1)
    rows = ((layer, places.row(values, layer, 1 << 16)) for layer in places.layers)
    by_pair = {(layer, n): row[n] for layer, row in rows for n in np.flatnonzero(row).tolist()}
    assert by_pair == {pair: values[place] for pair, place in place_of.items()}


def test_what_no_model_has_is_refused() -> None:
    many = MAX_PLACES // PAGE + 1
    with pytest.raises(TraceError, match="more layers or experts than any model has"):
        ExpertPlaces().rows(np.arange(many, dtype=np.uint16))
    places = ExpertPlaces()
    for layer in range(MAX_PLACES // (1 << 16)):
        everything = np.arange(1 << 16, dtype=np.uint16)
        places.index_of(np.full(1 << 16, layer, np.uint16), everything)
    assert places.count == MAX_PLACES
    with pytest.raises(TraceError, match="more layers or experts"):
        places.index_of(shorts([99]), shorts([0]))
