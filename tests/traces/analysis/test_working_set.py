"""The working set and reuse, against plain programs that count one selection after another."""

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moepack.common.shape import FamilyShape, ModelShape
from moepack.traces.analysis import statistics
from moepack.traces.formats import registry
from moepack.traces.model import Counts, Item, Origin, Phase, Tokens
from moepack.traces.validation import Checks
from tests.support.models import FIXTURES
from tests.support.trace_samples import tokens_from

Selection = tuple[int, int]
Request = list[list[Selection]]
ORIGIN = Origin("test", "test")


def tokens_of(request: Request, number: int = 0, phase: Phase = Phase.DECODE) -> Tokens:
    """Make the tokens of one request."""
    return tokens_from([(number, phase, token) for token in request])


def table_of(
    items: Iterable[Item], window: int = statistics.WINDOW, shape: ModelShape | None = None
) -> statistics.WorkingSetCounter:
    """Take a whole trace."""
    table = statistics.WorkingSetCounter(window, shape)
    for item in items:
        table.add(item)
    return table


Averages = list[tuple[float | None, float | None]]


def plain_table(requests: Sequence[Request], window: int) -> Averages:
    """Follow the method plainly: count, rank, and compare with the window before."""
    sizes: dict[float, list[int]] = {share: [] for share in statistics.SHARES}
    news: dict[float, list[int]] = {share: [] for share in statistics.SHARES}
    for request in requests:
        before: dict[float, set[Selection]] | None = None
        for start in range(0, len(request) - window + 1, window):
            flat = [one for token in request[start : start + window] for one in token]
            ranked = Counter(flat).most_common()
            tops: dict[float, set[Selection]] = {}
            for share in statistics.SHARES:
                reached = count = 0
                while reached < len(flat) * share:
                    reached += ranked[count][1]
                    count += 1
                tops[share] = {one for one, _ in ranked[:count]}
                sizes[share].append(count)
                if before is not None:
                    news[share].append(len(tops[share] - before[share]))
            before = tops
    return [
        (sum(s) / len(s) if s else None, sum(n) / len(n) if n else None)
        for s, n in ((sizes[share], news[share]) for share in statistics.SHARES)
    ]


SELECTIONS = st.tuples(st.integers(0, 5), st.integers(0, 300))
REQUESTS = st.lists(st.lists(st.lists(SELECTIONS, min_size=1, max_size=9), max_size=40), max_size=4)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(REQUESTS, st.integers(1, 12), st.integers(1, 7))
def test_the_table_is_what_counting_gives(requests: list[Request], window: int, cut: int) -> None:
    """However the tokens are divided into pieces."""
    facts = statistics.WorkingSetCounter(window)
    facts.add(ORIGIN)
    for number, request in enumerate(requests):
        for start in range(0, len(request), cut):
            facts.add(tokens_of(request[start : start + cut], number))
    rows = [(row.expert_count, row.new_count) for row in facts.rows()]
    assert rows == [
        tuple(None if number is None else pytest.approx(number) for number in row)
        for row in plain_table(requests, window)
    ]


def test_what_a_short_trace_cannot_say_is_not_known() -> None:
    shape = ModelShape((FamilyShape(0, "ffn_exps", 4, 100),))
    items: list[Item] = [ORIGIN, tokens_of([[(0, 0)], [(0, 1)], [(0, 2)]])]
    for window, lengths in ((1, (1, 1, 100, 100)), (2, (2, None, 200, None)), (4, (None,) * 4)):
        assert table_of(items, window, shape).rows()[-1][1:] == lengths


def test_prefill_and_counts_are_left_out() -> None:
    request: Request = [[(0, n % 3)] for n in range(8)]
    counts = Counts(Phase.DECODE, *(np.ones(1, np.uint16),) * 2, np.array([1 << 40]))
    items: list[Item] = [ORIGIN, tokens_of([[(5, 5)]] * 9, 0, Phase.PREFILL), counts]
    facts = table_of([*items, tokens_of(request)], 4)
    assert facts.window_count == 2
    assert facts.rows() == table_of([ORIGIN, tokens_of(request)], 4).rows()
    measured = statistics.Reuse()
    for item in (*items, tokens_of([[(0, 1)]]), ORIGIN, tokens_of([[(0, 1)]])):
        measured.add(item)
    assert measured.steps.token_count == 2
    assert measured.facts().repeat_share is None, "the first token of a file repeats nothing"


def test_a_window_never_goes_over_a_request_or_a_file() -> None:
    first, second = ([[(0, number)]] * 3 for number in (1, 2))
    one = table_of([ORIGIN, tokens_of(first, 0), tokens_of(second, 1)], 2)
    two = table_of([ORIGIN, tokens_of(first), ORIGIN, tokens_of(second)], 2)
    assert one.window_count == two.window_count == 2
    assert one.rows() == two.rows()
    assert one.rows()[-1].new_count is None, "no window is compared with another request's"


def test_bytes_are_those_of_the_experts() -> None:
    """Of the layer's experts, without padding."""
    request: Request = [[(0, 0), (1, 1)], [(0, 0), (1, 2), (1, 3)]]
    shape = ModelShape((FamilyShape(0, "ffn_exps", 4, 100), FamilyShape(1, "ffn_exps", 4, 7)))
    facts = table_of([ORIGIN, tokens_of(request)], 1, shape)
    last = facts.rows()[-1]
    assert last.length == pytest.approx((107 + 114) / 2)
    assert (last.new_count, last.new_length) == (2, 14)


def test_a_log_gives_the_published_scripts_digits() -> None:
    """The digits that analyze_experts.py printed for the same selections, as lines of its log."""
    path = str(FIXTURES / "qwen3moe-trace.csv")
    facts = table_of(registry.read(path, Checks(path)))
    assert facts.window_count == 1
    digits = [f"{row.expert_count:.2f}" for row in facts.rows()]
    assert digits == ["1.00", "2.00", "5.00", "13.00", "21.00", "25.00", "28.00", "28.00"]
    assert {row.new_count for row in facts.rows()} == {None}, "where the script has 0.00"


def test_what_the_token_before_chose_too() -> None:
    request: Request = [[(0, 1), (1, 1)], [(0, 1), (1, 2)], [(0, 2), (1, 2)]]
    measured = statistics.Reuse()
    for item in (ORIGIN, tokens_of(request, 0), tokens_of(request[-1:], 1)):
        measured.add(item)
    facts = measured.facts()
    assert facts.repeat_share == 0.5
    assert facts.layers == (statistics.LayerReuse(0, 0.5, 1), statistics.LayerReuse(1, 0.5, 1))
    assert facts.median_distance == 1
    counts = (statistics.DistanceCount(1, 1, 4), statistics.DistanceCount(None, None, 4))
    assert facts.distances == counts


@settings(max_examples=25, deadline=None, derandomize=True)
@given(REQUESTS, st.integers(1, 7))
def test_distances_are_what_looking_back_gives(requests: list[Request], cut: int) -> None:
    measured = statistics.Reuse()
    measured.add(ORIGIN)
    last: dict[Selection, int] = {}
    powers: Counter[int] = Counter()
    repeated = repeatable = first = now = 0
    for number, request in enumerate(requests):
        for start in range(0, len(request), cut):
            measured.add(tokens_of(request[start : start + cut], number))
        for place, token in enumerate(request):
            for one in token:
                before = last.get(one)
                repeatable += place > 0
                repeated += place > 0 and before == now - 1
                first += before is None
                if before is not None and before < now:
                    powers[(now - before - 1).bit_length()] += 1
                last[one] = now
            now += 1
    facts = measured.facts()
    counts = [entry.count for entry in facts.distances]
    assert counts == [*(powers[n] for n in range(max(powers, default=-1) + 1)), first]
    assert facts.repeat_share == (repeated / repeatable if repeatable else None)
