"""Real clients talk to llama.cpp's server, with experts brought to it."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from moepack.pack.opening.open_model import open_model
from moepack.running.pager.pager import PagerOptions
from moepack.running.programs.model_server import ModelServer
from tests.support.chat_model import begin_copy, finish
from tests.support.needs import needs_llama
from tests.support.servers import OPTIONS, served

if TYPE_CHECKING:
    import anthropic
    import openai

pytestmark = needs_llama

KEY = "sesame"
MESSAGES: Any = [{"role": "user", "content": "hello"}]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"day": {"type": "integer", "enum": [1, 2]}},
    "required": ["day"],
    "additionalProperties": False,
}
CALLS = ("-l", "394+100", "-l", "202+100", "-l", "2+200")
"""Has a model without sense begin a call soon, by `====` and a new line, and end after it."""


@pytest.fixture(scope="module")
def url(chat_path: Path) -> Iterator[str]:
    """Serve a model with the least memory."""
    options = (*OPTIONS, "-ub", "64", "--alias", "tiny")
    with (
        open_model(chat_path) as pack,
        ModelServer(pack, PagerOptions("floor"), options=options, api_key=KEY) as server,
    ):
        yield server.url
        assert server.usage.miss_count > 0


OPTIONS_OF_CLIENTS: Any = {"api_key": KEY, "max_retries": 0, "timeout": 60}


def openai_client(url: str) -> "openai.OpenAI":
    library: Any = pytest.importorskip("openai")
    client: openai.OpenAI = library.OpenAI(base_url=f"{url}/v1", **OPTIONS_OF_CLIENTS)
    return client


@pytest.fixture
def openais(url: str) -> "openai.OpenAI":
    return openai_client(url)


def test_openais_client_gets_an_answer_whole_and_piece_by_piece(openais: "openai.OpenAI") -> None:
    options: Any = {"model": "tiny", "messages": MESSAGES, "max_tokens": 6, "temperature": 0}
    answer = openais.chat.completions.create(**options)
    (choice,) = answer.choices
    assert choice.finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 6
    chunks = openais.chat.completions.create(
        **options, stream=True, stream_options={"include_usage": True}
    )
    choices = [choice for chunk in chunks for choice in chunk.choices]
    assert "".join(choice.delta.content or "" for choice in choices) == choice.message.content
    assert choices[-1].finish_reason == "length"
    assert [model.id for model in openais.models.list()] == ["tiny"]


def test_a_name_of_a_template_brings_tools_to_a_model_without_one(tmp_path: Path) -> None:
    """Its marks of a call become tokens of the model here."""
    marks = {"====": "<tool_call>", "----": "</tool_call>"}

    def change(key: str, contents: Any) -> Any:
        if key != "tokenizer.ggml.tokens":
            return contents
        return [marks.get(token, token) for token in contents]

    finish(begin_copy(tmp_path / "model.gguf", change=change))
    tool: Any = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
    small = ("--memory", "floor", "-t", "1", "-c", "2048")
    for names in (("--chat-template", "chatml", "--jinja"), ()):
        with served(tmp_path / "model.gguf", *small, *names, "--", *CALLS) as (_, url):
            completion = openai_client(url).chat.completions.create(
                model="tiny", messages=MESSAGES, tools=[tool], tool_choice="required"
            )
            (call,) = completion.choices[0].message.tool_calls or []
            assert call.type == "function"
            assert call.function.name == "weather"
            assert json.loads(call.function.arguments)["day"] in (1, 2)
            message = completion.choices[0].message.model_dump(exclude_none=True)
            result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
            request = {"messages": [*MESSAGES, message, result], "tools": [tool]}
            answer = httpx.post(f"{url}/apply-template", json=request, timeout=60).json()
            assert re.search(r"<tools>\n\{.*\}\n</tools>\n", answer["prompt"])
            assert "sunny" in answer["prompt"].partition("weather")[2]


def test_openais_client_gets_a_response(openais: "openai.OpenAI") -> None:
    answer = openais.responses.create(
        model="tiny", input="hello", max_output_tokens=4, temperature=0
    )
    assert answer.output_text


def test_openais_client_gets_errors_of_its_own_kinds(openais: "openai.OpenAI") -> None:
    import openai

    with pytest.raises(openai.BadRequestError, match="exceeds the available context size"):
        openais.completions.create(model="tiny", prompt="x y " * 3000)
    with pytest.raises(openai.AuthenticationError):
        openais.with_options(api_key="other").completions.create(model="tiny", prompt="x")


def test_anthropics_client_gets_an_answer_whole_and_piece_by_piece(url: str) -> None:
    library: Any = pytest.importorskip("anthropic")
    anthropics: anthropic.Anthropic = library.Anthropic(base_url=url, **OPTIONS_OF_CLIENTS)
    options: Any = {"model": "tiny", "messages": MESSAGES, "max_tokens": 6}
    options["extra_body"] = {"temperature": 0}
    answer = anthropics.messages.create(**options)
    assert (answer.stop_reason, answer.usage.output_tokens) == ("max_tokens", 6)
    assert [block.type for block in answer.content] == ["text"]
    with anthropics.messages.stream(**options) as stream:
        pieces = list(stream.text_stream)
        last = stream.get_final_message()
    assert "".join(pieces) == last.content[0].text  # type: ignore[union-attr]
    assert last.usage.output_tokens == 6
    assert anthropics.messages.count_tokens(model="tiny", messages=MESSAGES).input_tokens > 3
