"""Steps: phases chosen, requests numbered, and borders found, the same for all who read them."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from moepack.trace.model import Counts, Origin, Phase
from moepack.trace.steps import ALL_PHASES, DECODE_PHASES, Steps, StepStream
from tests.support.trace_samples import Row, tokens_from

ORIGIN = Origin("test", "test")


def flat(pieces: list[Steps]) -> list[tuple[int, bool, bool, int, list[tuple[int, int]]]]:
    return [
        (
            int(steps.request[token]),
            bool(steps.is_first[token]),
            bool(steps.begins_step[token]),
            int(steps.phase[token]),
            [
                (int(steps.layer[at]), int(steps.expert[at]))
                for at in range(steps.starts[token], steps.starts[token + 1])
            ],
        )
        for steps in pieces
        for token in range(steps.token_count)
    ]


def test_what_is_not_known_to_be_prefill_is_decode() -> None:
    rows: list[Row] = [(0, phase, [(0, 0)]) for phase in Phase]
    steps = StepStream().take(tokens_from(rows))
    assert steps is not None
    assert set(steps.phase.tolist()) == {Phase.DECODE, Phase.UNKNOWN}


SELECTIONS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=3)
ROWS = st.lists(st.tuples(st.integers(0, 1), st.sampled_from(Phase), SELECTIONS), max_size=12)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    st.lists(ROWS, min_size=1, max_size=3),
    st.integers(1, 5),
    st.sampled_from([ALL_PHASES, DECODE_PHASES]),
    st.none() | st.integers(0, 9),
)
def test_steps_are_what_looking_at_one_token_after_another_gives(
    files: list[list[Row]], cut: int, phases: frozenset[Phase], most: int | None
) -> None:
    """However the tokens are cut into pieces, and whatever files call their requests."""
    stream, pieces = StepStream(phases, most), []
    expected: list[tuple[int, bool, bool, int, list[tuple[int, int]]]] = []
    number, last, last_phase = -1, None, None
    for origin, unsorted in enumerate(files):
        stream.take(ORIGIN)
        rises = np.cumsum([request for request, _, _ in unsorted]).tolist()
        rows = [(rise, *row[1:]) for rise, row in zip(rises, unsorted, strict=True)]
        for start in range(0, len(rows), cut):
            steps = stream.take(tokens_from(rows[start : start + cut]))
            pieces += [] if steps is None else [steps]
        for request, phase, selections in rows:
            if phase not in phases or (most is not None and len(expected) >= most):
                continue
            is_first = (origin, request) != last
            number += is_first
            goes_on = phase == last_phase == Phase.PREFILL and not is_first
            expected.append((number, is_first, not goes_on, int(phase), selections))
            last, last_phase = (origin, request), phase
    assert flat(pieces) == expected
    assert (stream.token_count, stream.request_count) == (len(expected), number + 1)
    assert stream.is_full == (most is not None and len(expected) >= most)


def test_counts_are_no_steps() -> None:
    stream = StepStream()
    none = np.zeros(1, np.uint16)
    assert stream.take(Counts(Phase.DECODE, none, none, np.ones(1, np.int64))) is None


def test_values_of_tokens_are_those_of_their_selections() -> None:
    rows: list[Row] = [(0, Phase.DECODE, [(0, 1), (1, 2)]), (0, Phase.DECODE, [(0, 3)])]
    steps = StepStream().take(tokens_from(rows))
    assert steps is not None
    assert steps.of_selections(np.array([7, 8])).tolist() == [7, 7, 8]
