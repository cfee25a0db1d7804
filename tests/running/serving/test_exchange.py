"""The figures of answers, found while they pass."""

import json
from typing import Any

import pytest

from moepack.running.serving.exchange import PassingFigures, TextFigures

TIMINGS = {"cache_n": 10, "prompt_n": 2, "prompt_ms": 4.0, "predicted_n": 5, "predicted_ms": 8.0}
TEXT = 'they say "timings":{"cache_n":7,"prompt_n":7},"usage":{"prompt_tokens":7},"type":"x"'
"""A model's own, whose quotes are escaped in JSON."""
OPENAI = {
    "prompt_tokens": 12,
    "completion_tokens": 5,
    "prompt_tokens_details": {"cached_tokens": 10},
}
RESPONSES = {"input_tokens": 12, "output_tokens": 5, "input_tokens_details": {"cached_tokens": 10}}
ANTHROPIC = {"cache_read_input_tokens": 10, "input_tokens": 2, "output_tokens": 5}


def events(*facts: Any) -> bytes:
    """Return a stream of events."""
    return b"".join(b"data: %s\n\n" % json.dumps(fact).encode() for fact in facts)


@pytest.mark.parametrize("length", [1, 7, 1000])
@pytest.mark.parametrize(
    ("answer", "has_times"),
    [
        (json.dumps({"content": TEXT, "timings": TIMINGS}), True),
        (json.dumps({"content": TEXT, "usage": OPENAI, "timings": TIMINGS}), True),
        (json.dumps({"timings": TIMINGS, "probabilities": [TEXT] * 100}), True),
        (json.dumps({"content": TEXT, "usage": OPENAI}), False),
        (json.dumps({"usage": OPENAI, "data": [0.5] * 10_000}), False),
        (json.dumps({"output": TEXT, "usage": RESPONSES}), False),
        (json.dumps({"input": {"usage": {"prompt_tokens": 7}}, "usage": ANTHROPIC}), False),
    ],
)
def test_figures_are_found_whatever_the_pieces(answer: str, has_times: bool, length: int) -> None:
    passing = PassingFigures()
    data = answer.replace('": ', '":').encode()
    for start in range(0, len(data), length):
        passing.note(data[start : start + length])
    figures = passing.figures(is_stream=False)
    times = (0.004, 0.008) if has_times else (None, None)
    assert figures == TextFigures(12, 10, 5, *times)
    if has_times:
        assert (figures.prompt_rate, figures.answer_rate) == (500, 500)


def test_a_stream_without_timings_has_the_times_in_which_it_passed() -> None:
    """And the tokens of its first event and its last one, as in Anthropic's API."""
    passing = PassingFigures()
    passing.begin()
    first = events({"message": {"usage": {**ANTHROPIC, "output_tokens": 0}}})
    for piece in (first, events({"delta": TEXT}), events({"usage": {"output_tokens": 5}})):
        passing.note(piece.replace(b'": ', b'":'))
    figures = passing.figures(is_stream=True)
    assert (figures.prompt_count, figures.kept_count, figures.token_count) == (12, 10, 5)
    assert figures.prompt_seconds is not None
    assert figures.answer_rate is not None


@pytest.mark.parametrize(
    "answer", [b"", b'{"content":"fine"}', b'{"timings":7}', b'{"usage":{"prompt_tokens":"x"}}']
)
def test_what_is_not_stated_is_unknown(answer: bytes) -> None:
    passing = PassingFigures()
    passing.note(answer)
    assert passing.figures(is_stream=False) == TextFigures()


def test_of_an_error_the_kind_alone_is_known() -> None:
    passing = PassingFigures()
    message = 'last read: "type":"secret"'
    passing.note(
        json.dumps({"error": {"message": message, "type": "bad"}}, separators=(",", ":")).encode()
    )
    assert passing.error_kind == "bad"
