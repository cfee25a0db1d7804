"""A model behind the server: real clients, several texts at once, and figures of texts."""

import json
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from moepack.pack.opening.open_model import open_model
from moepack.running.programs.command import single_text_options
from moepack.running.serving.model_server import ModelServer
from moepack.running.serving.run_facts import MeasuredAnswer, measure
from moepack.running.serving.sampling import Sampling
from moepack.running.streaming.supervisor import StreamingOptions
from tests.support.chat_model import begin_copy, finish
from tests.support.children import PATIENCE
from tests.support.models import first_shard
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
        ModelServer(pack, StreamingOptions("floor"), options=options, api_key=KEY) as server,
    ):
        yield server.url
        assert server.usage.miss_count > 0


def ask_twelve(server: ModelServer, tokens: int) -> float:
    """Ask twelve texts at once; return the texts of an average call."""
    address = f"{server.url}/completion"
    fields: Any = {"n_predict": tokens, "temperature": 0, "ignore_eos": True}

    def ask(number: int) -> int:
        body = {**fields, "prompt": f"{number} and"}
        return len(httpx.post(address, json=body, timeout=PATIENCE).json()["content"])

    with ThreadPoolExecutor(12) as pool:
        assert all(pool.map(ask, range(12)))
    (counts,) = server.supervisor._control.statistics()
    return counts.decoded_count / counts.decoding_count


def test_twelve_texts_at_once_run_together_where_their_experts_fit_and_else_in_turn(
    chat_path: Path,
) -> None:
    """A prompt is computed two tokens at a time."""
    options = (*OPTIONS, "-ub", "2")
    with open_model(chat_path) as pack:
        with ModelServer(pack, StreamingOptions("floor"), options=options) as server:
            assert ask_twelve(server, 60) < 1.1
            memory = StreamingOptions(server.supervisor.whole_length * 15 // 16)
        for _ in range(4):  # together only while that is faster, which other work may hide
            with ModelServer(pack, memory, options=options) as server:
                count = ask_twelve(server, 300)
            if count > 1.2:
                break
        assert 1.2 < count <= 4


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


def test_a_model_without_a_template_has_tools(tmp_path: Path) -> None:
    """Its marks of a call become tokens of the model here."""
    marks = {"====": "<tool_call>", "----": "</tool_call>"}

    def change(key: str, contents: Any) -> Any:
        if key != "tokenizer.ggml.tokens":
            return contents
        return [marks.get(token, token) for token in contents]

    finish(begin_copy(tmp_path / "model.gguf", change=change))
    tool: Any = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
    small = ("--memory", "floor", "-t", "1", "-c", "2048")
    with served(tmp_path / "model.gguf", *small, "--", *CALLS) as (_, url):
        completion = openai_client(url).chat.completions.create(
            model="tiny",
            messages=MESSAGES,
            tools=[tool],
            tool_choice="required",
            temperature=0,  # else it may call more than once
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


def test_a_prompt_moves_on_layer_by_layer_within_a_batch() -> None:
    """Of the server alone it would be nothing, and then all: its batch holds the whole prompt."""
    steps: list[tuple[int, int]] = []
    ended = threading.Event()

    def watch(answer: MeasuredAnswer) -> None:
        while not ended.is_set():
            if (progress := answer.prompt_progress) is not None:
                steps.append(progress)
            time.sleep(0.002)

    text = "hello world " * 230
    greedy = Sampling(temperature=0)
    with open_model(first_shard("qwen3moe")) as pack:
        options = StreamingOptions("floor")
        words = [*single_text_options(2048, 1, 1), "-b", "2048"]
        with ModelServer(pack, options, options=words, api_key="sesame") as server:
            with measure(
                server, lambda: server.client.complete(text, count=2, sampling=greedy)
            ) as answer:
                pieces = iter(answer)
                thread = threading.Thread(target=watch, args=(answer,))
                thread.start()
                next(pieces)
                ended.set()
                thread.join()
            facts = answer.facts
            counts = [count for count, _ in steps]
            assert {total for _, total in steps} == {facts.prompt_count}
            assert counts == sorted(counts)
            assert len({count for count in counts if 0 < count < facts.prompt_count}) > 3
            # The next text goes on where this one ended: what is kept counts for nothing.
            with measure(
                server, lambda: server.client.complete(text + "again", count=1, sampling=greedy)
            ) as answer:
                list(answer)
            kept = answer.facts.kept_count
            assert kept > 0
            assert answer.prompt_progress == (answer.facts.prompt_count - kept,) * 2
