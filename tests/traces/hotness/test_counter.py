"""Halves of traces, in time and of every other request; and the uses of chunk experts."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import moepack
from moepack.common.errors import TraceError
from moepack.common.shape import ExpertKey, FamilyShape, ModelShape
from moepack.traces.expert_places import MAX_PLACES, PAGE, ExpertPlaces
from moepack.traces.formats.registry import ReadOptions
from moepack.traces.hotness import counter as counting
from moepack.traces.hotness import file, measure
from moepack.traces.hotness.counter import LEAST_SHARE, MOST_CELLS, Halves, SelectionCounter
from moepack.traces.hotness.measure import measure_hotness
from moepack.traces.hotness.model import Hotness
from moepack.traces.model import Counts, Origin, Phase, Tokens, Unknown
from tests.support.packs import families_model
from tests.support.trace_samples import selections, tokens_from

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
    assert len(counter._timeline._stretches) <= 2 * MOST_CELLS, "in little memory"
    cut, total = halves.learned.token_count, sum(lengths)
    assert cut + halves.measured.token_count == total
    first = counter.places.row(halves.learned.counts, 0, 2 * total)
    second = counter.places.row(halves.measured.counts, 0, 2 * total)
    assert first.tolist() == [1] * (2 * cut) + [0] * (2 * (total - cut))
    assert second.tolist() == (1 - first).tolist()
    return halves


@pytest.mark.parametrize("lengths", [[65], [1000], [5000], [1] * 300, [37, 900, 63], [7] * 500])
@pytest.mark.parametrize("piece_length", [1 << 30, 17])
def test_very_many_places_are_counted_in_fewer_cells(
    lengths: list[int], piece_length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of places grows with the tokens, and so the cells are joined within a cell too."""
    monkeypatch.setattr(counting, "_MOST_NUMBERS", 500)
    halves = halved(lengths, piece_length)
    smaller = min(halves.learned.token_count, halves.measured.token_count)
    assert smaller >= LEAST_SHARE * sum(lengths)
    stretches = counted(lengths, piece_length)._timeline._stretches
    assert len(stretches) <= 2 * counting.FEWEST_CELLS


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


def test_a_single_token_and_counts_have_no_halves() -> None:
    assert counted([1]).halves() is None
    counter = counted([5, 5])
    counter.add(Origin("counts", "x", frozenset({Unknown.TOKENS})))
    numbers = np.arange(2, dtype=np.uint16)
    counter.add(Counts(Phase.DECODE, numbers, numbers, np.array([3, 4])))
    assert counter.halves() is None
    assert counter.selection_count == 27


# Chunk experts: each is used once by a token that any of the experts it serves were routed to.

SIZES = {0: 4, 3: 2}
MAIN = [FamilyShape(layer, "ffn_exps", 8, 1, 3) for layer in (0, 3, 5)]
CHUNKS = [FamilyShape(layer, "ffn_chexps", 8 // size, 1) for layer, size in SIZES.items()]
SHAPE = ModelShape((*MAIN, *CHUNKS))


def tokens_of(routing: list[dict[int, list[int]]]) -> Tokens:
    """Make tokens that use some experts by layer."""
    return tokens_from([(0, 0, selections(token)) for token in routing])


def drawn(seed: int, count: int) -> list[dict[int, list[int]]]:
    draw = np.random.default_rng(seed)
    return [
        {layer: draw.choice(8, 3, replace=False).tolist() for layer in (0, 3, 5)}
        for _ in range(count)
    ]


def needed(chosen: list[dict[int, list[int]]]) -> dict[ExpertKey, int]:
    """Count plainly."""
    counts: dict[ExpertKey, int] = {}
    for token in chosen:
        for layer, size in SIZES.items():
            for chunk in {expert // size for expert in token[layer]}:
                counts[ExpertKey(layer, chunk)] = counts.get(ExpertKey(layer, chunk), 0) + 1
    return counts


def test_a_chunk_is_counted_once_by_a_token() -> None:
    first, second = drawn(1, 50), drawn(2, 30)
    counter = SelectionCounter(shape=SHAPE)
    counter.add(ORIGIN)
    counter.add(tokens_of(first))
    counter.add(tokens_of(second))
    one, other = needed(first), needed(second)
    expected = {key: one.get(key, 0) + other.get(key, 0) for key in {*one, *other}}
    assert counter.chunk_counts() == expected


def test_chunks_of_counts_or_of_no_model_are_not_known() -> None:
    numbers = np.arange(2, dtype=np.uint16)
    counts = Counts(Phase.DECODE, numbers, numbers, np.array([3, 4]))
    for shape in (SHAPE, None, ModelShape(tuple(MAIN))):
        counter = SelectionCounter(shape=shape)
        counter.add(ORIGIN)
        counter.add(tokens_of(drawn(1, 5)))
        assert (counter.chunk_counts() is None) == (shape != SHAPE)
        counter.add(counts)
        assert counter.chunk_counts() is None


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


def test_a_pack_states_what_a_trace_says_of_chunks(tmp_path: Path) -> None:
    model, trace = families_model(tmp_path), tmp_path / "trace.csv"
    rows = ["0 1 2", "1 2 3", "0 4 7", "5 6 7"]
    lines = [f"{number},0,0,0,{row}" for number, row in enumerate(rows)]
    heading = "decode_call,token_in_call,layer,occurrence,experts"
    trace.write_text("\n".join([heading, *lines, ""]))
    shape = moepack.shape_of(model)
    measured = measure_hotness([str(trace)], options=ReadOptions(shape=shape)).hotness
    file.save(measured, tmp_path / "hot.csv")
    expected_counts = {ExpertKey(0, 0): 3, ExpertKey(0, 1): 2}
    assert measured.chunk_counts == measure.load(str(trace), shape).chunk_counts == expected_counts
    for hotness, expected in ((measured, [3, 2]), (trace, [3, 2]), (tmp_path / "hot.csv", [4, 4])):
        target = tmp_path / f"pack-{len(list(tmp_path.iterdir()))}"
        moepack.pack_model(model, target, hotness=hotness)
        with moepack.open(target) as pack:
            counts = [pack.locate(0, chunk, family="ffn_chexps").hotness for chunk in (0, 1)]
        assert counts == expected
        assert moepack.verify(target, model).passed
    plain = measure.load(str(tmp_path / "hot.csv"), shape)
    assert plain.counts == measured.counts
    assert plain.digest != measured.digest, "an interrupted pack must not mix the two orders"


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
