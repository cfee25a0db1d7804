"""Halves of traces, in time and of every other request; and the uses of chunk experts."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moepack.common.errors import TraceError
from moepack.common.shape import ExpertKey
from moepack.traces.expert_places import MAX_PLACES, PAGE, ExpertPlaces
from moepack.traces.hotness.counter import LEAST_SHARE, MOST_STRETCHES, Halves, SelectionCounter
from moepack.traces.hotness.model import Hotness
from moepack.traces.model import Counts, Origin, Phase, Tokens, Unknown

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
    assert len(counter._timeline._stretches) <= MOST_STRETCHES, "in little memory"
    cut, total = halves.learned.token_count, sum(lengths)
    assert cut + halves.measured.token_count == total
    first = counter.places.row(halves.learned.counts, 0, 2 * total)
    second = counter.places.row(halves.measured.counts, 0, 2 * total)
    assert first.tolist() == [1] * (2 * cut) + [0] * (2 * (total - cut))
    assert second.tolist() == (1 - first).tolist()
    return halves


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


@settings(deadline=None, max_examples=30)
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
    cell = -(-sum(lengths) // (MOST_STRETCHES // 2))
    assert best + 2 * cell > (1 - 2 * LEAST_SHARE) * sum(lengths)


def test_a_single_token_and_counts_have_no_halves() -> None:
    assert counted([1]).halves() is None
    counter = counted([5, 5])
    counter.add(Origin("counts", "x", frozenset({Unknown.TOKENS})))
    numbers = np.arange(2, dtype=np.uint16)
    counter.add(Counts(Phase.DECODE, numbers, numbers, np.array([3, 4])))
    assert counter.halves() is None
    assert counter.selection_count == 27


# Chunk experts: each is used by a token that any of the experts it serves were routed to.


@pytest.mark.parametrize(
    ("token_count", "expected"),
    [(None, 10), (100, 10), (7, 7), (4, 5)],
)
def test_counts_alone_give_the_most_that_a_chunk_can_be_needed(
    token_count: int | None, expected: int
) -> None:
    by_expert = {ExpertKey(0, 4 + n): count for n, count in enumerate((5, 4, 0, 1))}
    by_expert |= {ExpertKey(0, 0): 1000, ExpertKey(1, 4): 1000}
    hotness = Hotness("x", by_expert, token_count, digest=0)
    assert hotness.chunk_count(0, 1, 4) == expected


def test_what_no_model_has_is_refused() -> None:
    places = ExpertPlaces()
    numbers = np.arange(1 << 16, dtype=np.uint16)
    for layer in range(MAX_PLACES // len(numbers)):
        places.index_of(np.full_like(numbers, layer), numbers)
    assert places.count == MAX_PLACES
    with pytest.raises(TraceError, match="more layers or experts than any model has"):
        places.index_of(numbers[-1:], numbers[:1])
    with pytest.raises(TraceError, match="more layers or experts"):
        ExpertPlaces().rows(numbers[: MAX_PLACES // PAGE + 1])
