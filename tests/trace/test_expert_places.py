"""Places of experts: the same for ever, as many as were met, and none beyond what models have."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moepack.errors import TraceError
from moepack.trace.expert_places import MAX_PLACES, PAGE, ExpertPlaces, padded

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
        for pair, place in zip(pairs, places.of(layer, expert).tolist(), strict=True):
            assert place_of.setdefault(pair, place) == place
    assert len(set(place_of.values())) == len(place_of)
    assert all(place < places.count for place in place_of.values())
    layers, experts = places.keys(np.array(list(place_of.values()), np.int64))
    assert list(zip(layers.tolist(), experts.tolist(), strict=True)) == list(place_of)
    assert set(places.layers) == {layer for layer, _ in place_of}
    assert places.width == max((expert + 1 for _, expert in place_of), default=0)
    assert places.count <= PAGE * len(place_of)


def test_a_layers_values_are_given_by_expert() -> None:
    places = ExpertPlaces()
    at = places.of(shorts([3, 3, 9]), shorts([0, 200, 5]))
    values = np.zeros(places.count, np.int64)
    values[at] = [7, 8, 9]
    row = places.row(values, 3, 256)
    assert (row[0], row[200], row.sum(), len(row)) == (7, 8, 15, 256)
    assert places.row(values, 3, 100).tolist() == [7, *[0] * 99]
    assert places.row(values, 4, 5).tolist() == [0] * 5
    assert places.row(values[:1], 3, 256).sum() == 7, "values of before the last experts were met"


def test_what_no_model_has_is_refused() -> None:
    many = MAX_PLACES // PAGE + 1
    with pytest.raises(TraceError, match="more layers or experts than any model has"):
        ExpertPlaces().rows(np.arange(many, dtype=np.uint16))
    places = ExpertPlaces()
    for layer in range(MAX_PLACES // (1 << 16)):
        everything = np.arange(1 << 16, dtype=np.uint16)
        places.of(np.full(1 << 16, layer, np.uint16), everything)
    assert places.count == MAX_PLACES
    with pytest.raises(TraceError, match="more layers or experts"):
        places.of(shorts([99]), shorts([0]))


def test_values_grow_with_the_places() -> None:
    assert padded(np.array([1, 2]), 4, -1).tolist() == [1, 2, -1, -1]
    assert padded(np.array([1, 2]), 1).tolist() == [1, 2]
