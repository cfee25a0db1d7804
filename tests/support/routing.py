"""Routing that tests make up, as a plain list of calls, and as the pieces of a trace."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from hypothesis import strategies as st

from moepack.common.shape import ExpertKey
from moepack.traces.model import Item, Origin, Phase
from tests.support.trace_samples import tokens_from

LAYERS, EXPERTS = 3, 6


class RoutedCall(NamedTuple):
    """Tokens that a model computes at once: for each, the experts of each layer."""

    request: int
    phase: Phase
    tokens: list[list[list[int]]]


def _token() -> st.SearchStrategy[list[list[int]]]:
    experts = st.lists(st.integers(0, EXPERTS - 1), min_size=1, max_size=3, unique=True)
    return st.lists(experts, min_size=LAYERS, max_size=LAYERS)


def _request() -> st.SearchStrategy[tuple[list[list[list[int]]], list[list[list[int]]]]]:
    return st.tuples(st.lists(_token(), max_size=5), st.lists(_token(), max_size=8))


@st.composite
def routing(draw: st.DrawFn) -> list[RoutedCall]:
    """Draw requests of a prompt and decoded tokens, one token at least."""
    calls = []
    for number, (prompt, decoded) in enumerate(draw(st.lists(_request(), min_size=1, max_size=4))):
        calls += [RoutedCall(number, Phase.PREFILL, prompt)] * bool(prompt)
        calls += [RoutedCall(number, Phase.DECODE, [token]) for token in decoded]
    if not any(call.phase is Phase.DECODE for call in calls):
        calls.append(RoutedCall(len(calls), Phase.DECODE, [draw(_token())]))
    return calls


def items_of(calls: Sequence[RoutedCall], piece_length: int) -> Iterator[Item]:
    """Yield a trace of calls in pieces of so many tokens."""
    yield Origin("test", "test")
    rows = [
        (
            call.request,
            int(call.phase),
            [(layer, expert) for layer, experts in enumerate(token) for expert in experts],
        )
        for call in calls
        for token in call.tokens
    ]
    for start in range(0, len(rows), piece_length):
        yield tokens_from(rows[start : start + piece_length])


def steps_of(calls: Sequence[RoutedCall]) -> Iterator[tuple[RoutedCall, list[ExpertKey]]]:
    """Yield the steps of calls: the call, and all choices."""
    for call in calls:
        for layer in range(LAYERS):
            yield call, [ExpertKey(layer, expert) for one in call.tokens for expert in one[layer]]
