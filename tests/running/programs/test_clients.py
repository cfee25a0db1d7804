"""Real clients talk to llama.cpp's server, with experts brought to it."""

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

import moepack
from moepack.running.pager.pager import PagerOptions
from moepack.running.programs.model_server import ModelServer
from tests.support.chat_model import begin_copy, finish, write_chat_model
from tests.support.models import pack_model
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
TEMPLATE = """{%- if tools -%}
<|system|>
{%- if messages[0].role == 'system' -%}{{ messages[0].content }}
{% endif %}
# Tools
<tools>
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}
</tools>
Answer with ====
{"name": NAME, "arguments": ARGUMENTS}
----
{% endif -%}
{%- for message in messages -%}
{%- if message.role == 'tool' -%}
<|tool|>{{ message.content }}
{% elif message.role == 'assistant' and message.tool_calls -%}
<|assistant|>
{%- if message.content %}{{ message.content }}{% endif -%}
{%- for call in message.tool_calls %}
====
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
----
{%- endfor %}
{% else -%}
<|{{ message.role }}|>{{ message.content }}
{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"""
"""Its marks of a call are tokens of the model's vocabulary."""
CALLS = ("-l", "394+100", "-l", "202+100", "-l", "2+200")
"""Has a model without sense begin a call soon, by `====` and a new line, and end after it."""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model with a template for tools, and pack it."""
    folder = tmp_path_factory.mktemp("chat")
    pack_model([write_chat_model(folder / "chat.gguf", TEMPLATE)], folder / "chat.moepack")
    return folder / "chat.moepack"


@contextlib.contextmanager
def serving(path: Path, *options: str) -> Iterator[str]:
    """Serve a pack with the least memory; yield the address."""
    options = (*OPTIONS, "-ub", "64", *options)
    with (
        moepack.open(path) as pack,
        ModelServer(pack, PagerOptions("floor"), options=options, api_key=KEY) as server,
    ):
        yield server.url
        assert server.usage.miss_count > 0


@pytest.fixture(scope="module")
def url(path: Path) -> Iterator[str]:
    """Serve the model."""
    with serving(path, "--alias", "tiny") as address:
        yield address


@pytest.fixture(scope="module")
def calling_url(path: Path) -> Iterator[str]:
    """Serve the model so that it calls tools if it has to."""
    with serving(path, *CALLS) as address:
        yield address


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


def test_openais_client_has_tools_called(calling_url: str) -> None:
    openais = openai_client(calling_url)
    tool: Any = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
    options: Any = {"model": "tiny", "tools": [tool], "tool_choice": "required"}
    answer = openais.chat.completions.create(messages=MESSAGES, **options)
    assert answer.choices[0].finish_reason == "tool_calls"
    calls: Any = answer.choices[0].message.tool_calls
    assert calls[0].function.name == "weather"
    assert json.loads(calls[0].function.arguments)["day"] in (1, 2)
    stream = openais.chat.completions.create(messages=MESSAGES, stream=True, **options)
    pieces: list[Any] = [
        call
        for chunk in stream
        for choice in chunk.choices
        for call in choice.delta.tool_calls or []
    ]
    assert pieces[0].function.name == "weather"
    first = [piece.function.arguments for piece in pieces if piece.index == 0]
    assert json.loads("".join(first))["day"] in (1, 2)
    result = {"role": "tool", "tool_call_id": calls[0].id, "content": "sunny"}
    messages = [*MESSAGES, answer.choices[0].message, result]
    assert openais.chat.completions.create(messages=messages, max_tokens=3, model="tiny").choices


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
            request = {"messages": MESSAGES, "tools": [tool]}
            answer = httpx.post(f"{url}/apply-template", json=request, timeout=60).json()
            assert re.search(r"<tools>\n\{.*\}\n</tools>\n", answer["prompt"])


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
