"""Whatever JSON a client sends, it is a request, or it is told what is wrong with it."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moepack.errors import RequestError
from moepack.llama_cpp.sampling import Sampling
from moepack.running.chat import Message
from moepack.serving.request import chat_request, completion_request

SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)
NAMES = (
    *("messages", "prompt", "max_tokens", "max_completion_tokens", "n", "stop", "stream"),
    *("stream_options", "temperature", "top_p", "top_k", "min_p", "repeat_penalty", "seed"),
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "system", "tool"]) | VALUES, "content": VALUES}
    ),
    max_size=2,
)


@given(body=st.fixed_dictionaries({}, optional=dict.fromkeys(NAMES, VALUES | MESSAGES)))
def test_any_json_is_a_request_or_refused(body: dict[str, Any]) -> None:
    for read in (chat_request, completion_request):
        try:
            asked = read(body)
        except RequestError:
            continue
        asked.sampling.check()
        assert asked.messages or asked.prompt
        assert asked.token_count is None or asked.token_count >= 1
        assert all(isinstance(stop, str) and stop for stop in asked.stops)


def test_what_is_not_said_is_as_in_llama_cpp() -> None:
    asked = completion_request({"prompt": "x", "temperature": None, "model": "any", "user": "me"})
    assert asked.sampling == Sampling()
    assert (asked.token_count, asked.stops, asked.streams) == (None, (), False)
    asked = chat_request(
        {
            "messages": [
                {"role": "developer", "content": "a"},
                {"role": "user", "content": [{"type": "text", "text": "b"}] * 2},
            ],
            **{"temperature": 1, "top_k": 3, "min_p": 0.5, "repeat_penalty": 1.5, "seed": 9},
            **{"max_tokens": 5, "max_completion_tokens": 4, "stop": "x", "stream": True},
            "stream_options": {"include_usage": True},
        }
    )
    assert asked.messages == (Message("system", "a"), Message("user", "bb"))
    assert asked.sampling == Sampling(1, 3, 0.95, 0.5, 1.5, 9)
    assert (asked.token_count, asked.stops) == (4, ("x",))
    assert asked.streams
    assert asked.counts_usage


def test_a_long_wrong_value_is_cut_in_the_message() -> None:
    with pytest.raises(RequestError) as refused:
        completion_request({"prompt": "x", "temperature": "y" * 10_000})
    assert len(str(refused.value)) < 200
    with pytest.raises(RequestError, match="temperature"):
        completion_request({"prompt": "x", "temperature": math.inf})
