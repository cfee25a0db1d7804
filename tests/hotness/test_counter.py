"""Halves of traces: the earlier and the later, and every other request."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moepack.hotness import timeline
from moepack.hotness.counter import Halves, SelectionCounter
from moepack.hotness.timeline import LEAST_SHARE, MOST_CELLS
from moepack.trace.model import Counts, Origin, Phase, Tokens, Unknown

ORIGIN = Origin("test", "test")


def counted(lengths: Sequence[int], piece_length: int = 1 << 30) -> SelectionCounter:
    """Count requests of so many tokens; token t of all chose experts 2 t and 2 t + 1 of layer 0."""
    request = np.repeat(np.arange(len(lengths)), lengths)
    counter = SelectionCounter()
    counter.add(ORIGIN)
    for first in range(0, len(request), piece_length):
        number = np.arange(first, min(first + piece_length, len(request)))
        expert = np.stack((2 * number, 2 * number + 1), axis=1).reshape(-1)
        columns = np.zeros(len(number), np.uint8), 2 * np.arange(len(number) + 1)
        layer = np.zeros(len(expert), np.uint16)
        counter.add(Tokens(request[number], *columns, layer, expert.astype(np.uint16)))
    return counter


def halved(lengths: Sequence[int], piece_length: int = 1 << 30) -> Halves:
    """Return halves of which the learned one has all tokens that come before the others."""
    counter = counted(lengths, piece_length)
    halves = counter.halves() or pytest.fail("there are two")
    cut, total = halves.learned.token_count, sum(lengths)
    assert cut + halves.measured.token_count == total
    first = counter.places.row(halves.learned.counts, 0, 2 * total)
    second = counter.places.row(halves.measured.counts, 0, 2 * total)
    assert first.tolist() == [1] * (2 * cut) + [0] * (2 * (total - cut))
    assert second.tolist() == (1 - first).tolist()
    return halves


@pytest.mark.parametrize("token_count", [2, 3, 64, 65, 1000, 5000])
def test_one_request_is_halved_in_time(token_count: int) -> None:
    by, learned, measured = halved([token_count])
    assert by == "time"
    assert abs(learned.token_count - measured.token_count) <= max(1, token_count // 16)


@pytest.mark.parametrize("lengths", [[65], [1000], [5000], [1] * 300, [37, 900, 63], [7] * 500])
@pytest.mark.parametrize("piece_length", [1 << 30, 17])
def test_very_many_places_are_counted_in_fewer_cells(
    lengths: list[int], piece_length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of places grows with the tokens, and so the cells are joined within a cell too."""
    monkeypatch.setattr(timeline, "_MOST_NUMBERS", 500)
    halves = halved(lengths, piece_length)
    smaller = min(halves.learned.token_count, halves.measured.token_count)
    assert smaller >= LEAST_SHARE * sum(lengths)
    stretches = counted(lengths, piece_length)._timeline._stretches
    assert len(stretches) <= 2 * timeline.FEWEST_CELLS


@pytest.mark.parametrize(
    ("lengths", "cut"),
    [
        ([10] * 10, 50),
        ([100, 100, 100], 200),  # both places are as good: more is learned
        ([300, 700], 300),
        ([700, 300], 700),
        ([1] * 40 + [60, 60], 100),
        ([7] * 9, 35),
        ([1, 1], 1),
    ],
)
def test_halves_are_cut_between_requests_near_the_middle(lengths: list[int], cut: int) -> None:
    assert halved(lengths).learned.token_count == cut


@pytest.mark.parametrize("lengths", [[20, 2980], [2980, 20], [20, 2960, 20], [290, 710]])
def test_a_request_that_is_nearly_all_is_cut(lengths: list[int]) -> None:
    _, learned, measured = halved(lengths)
    assert abs(learned.token_count - measured.token_count) <= sum(lengths) // 16


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 100), min_size=1, max_size=20).filter(lambda each: sum(each) > 1),
    st.integers(1, 300),
)
def test_halves_are_halves_however_a_trace_comes(lengths: list[int], piece_length: int) -> None:
    by_piece = halved(lengths, piece_length)
    assert by_piece.learned.token_count == halved(lengths).learned.token_count
    smaller = min(by_piece.learned.token_count, by_piece.measured.token_count)
    assert smaller >= LEAST_SHARE * sum(lengths) or sum(lengths) == 3
    borders = np.cumsum(lengths)[:-1]
    if by_piece.learned.token_count in borders:
        return
    # A request is cut only where no border that is near enough was left: each cell keeps one.
    best = min((abs(2 * int(border) - sum(lengths)) for border in borders), default=sum(lengths))
    cell = -(-sum(lengths) // (MOST_CELLS // 2))
    assert best + 2 * cell > (1 - 2 * LEAST_SHARE) * sum(lengths)


def test_a_long_trace_is_kept_in_little_memory() -> None:
    counter = SelectionCounter()
    counter.add(ORIGIN)
    for number in range(3000):
        starts, nothing = np.arange(8), np.zeros(7, np.uint16)
        request = np.full(7, number)
        counter.add(Tokens(request, nothing.astype(np.uint8), starts, nothing, nothing))
    assert counter.token_count == 21_000
    assert len(counter._timeline._stretches) <= 2 * MOST_CELLS


def test_every_other_request_is_one_half_and_the_rest_the_other() -> None:
    counter = counted([3, 5, 4])
    by, learned, measured = counter.interleaved() or pytest.fail("there are two")
    assert (by, learned.token_count, measured.token_count) == ("requests", 7, 5)
    assert counter.places.row(measured.counts, 0, 24).tolist() == [0] * 6 + [1] * 10 + [0] * 8
    assert (learned.counts + measured.counts == counter.counts).all()
    assert counted([9]).interleaved() is None


def test_a_single_token_and_counts_have_no_halves() -> None:
    assert counted([1]).halves() is None
    counter = counted([5, 5])
    counter.add(Origin("counts", "x", frozenset({Unknown.TOKENS})))
    numbers = np.arange(2, dtype=np.uint16)
    counter.add(Counts(Phase.DECODE, numbers, numbers, np.array([3, 4])))
    assert counter.halves() is None
    assert counter.interleaved() is None
    assert counter.selection_count == 27
