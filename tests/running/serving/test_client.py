"""The client of llama.cpp's server, and chats over it, with a real server and a small model."""

import os
import re
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from moepack.common.errors import MachineError, RequestError
from moepack.running.serving.chat import Conversation
from moepack.running.serving.client import Answer, Cancellation, ServerClient
from moepack.running.serving.model_server import ServerProcess
from moepack.running.serving.sampling import Sampling
from tests.support.children import wait_until
from tests.support.needs import needs_llama
from tests.support.servers import serving

pytestmark = needs_llama

KEY = "sesame"
GREEDY = Sampling(temperature=0)
PROMPT = "<system>be brief<user>hello<answer>"
MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def server(chat_path: Path) -> Iterator[ServerProcess]:
    """Serve a model for all tests that leave the server as it was."""
    with serving(chat_path, api_key=KEY) as one:
        yield one


def wait_until_idle(client: ServerClient) -> None:
    """Wait until nothing is computed of texts that were left."""
    wait_until(lambda: not any(slot["is_processing"] for slot in client.request("/slots")))


@pytest.fixture
def client(server: ServerProcess) -> ServerClient:
    wait_until_idle(server.client)
    return server.client


def test_a_chat_is_the_templates_text_gone_on_with(client: ServerClient) -> None:
    assert client.request("/apply-template", {"messages": MESSAGES})["prompt"] == PROMPT
    with client.complete(PROMPT, count=12, sampling=GREEDY) as completion:
        pieces = list(completion)
    with client.chat(MESSAGES, count=12, sampling=GREEDY) as answer:
        assert "".join(answer) == "".join(pieces) == completion.text == answer.text
    assert len(pieces) > 3, "piece by piece"
    assert len(answer.text) > 3


def test_what_a_text_took_is_known(client: ServerClient) -> None:
    with client.complete("all other than this", count=9, sampling=GREEDY) as answer:
        assert answer.facts.prompt.step_count == 0
        for _ in answer:
            assert answer.facts.step_count <= 8
    facts = answer.facts
    assert (facts.end, facts.token_count, facts.step_count) == ("length", 9, 8)
    assert facts.tokens_per_second == pytest.approx(8 / facts.seconds)
    assert facts.prompt_count == facts.kept_count + facts.prompt.step_count > 5
    assert facts.prompt.tokens_per_second is not None
    with client.complete("all other than this", count=1, sampling=GREEDY) as again:
        list(again)
    assert again.facts.kept_count == facts.prompt_count - 1
    assert again.facts.tokens_per_second is None, "the only token needs no step after the prompt"


def test_why_a_text_ends_is_known(client: ServerClient) -> None:
    with client.complete(PROMPT, count=40, sampling=GREEDY) as whole:
        list(whole)
    match = re.search(r"(?<=.)[a-zA-Z]{2}", whole.text)
    assert match is not None
    with client.chat(MESSAGES, count=40, sampling=GREEDY, stops=[match[0]]) as stopped:
        assert "".join(stopped) == whole.text[: match.start()]
    assert stopped.facts.end == "stop"
    long = {"role": "user", "content": "x" * 1500}
    asks: list[Callable[[], Answer]] = [
        lambda: client.complete("x" * 1500, sampling=GREEDY),
        lambda: client.chat([long], sampling=GREEDY),
    ]
    for ask in asks:
        with ask() as answer:
            list(answer)
        ends_itself = answer.facts.token_count + answer.facts.prompt_count < 2040
        assert answer.facts.end == ("stop" if ends_itself else "context")


def test_an_error_in_the_middle_of_a_text_is_in_the_servers_words(client: ServerClient) -> None:
    """Of two texts that have no room in the context together."""
    with (
        client.complete("x" * 1500) as one,
        client.complete("x" * 1500) as other,
        pytest.raises(MachineError, match="^the server failed: Context size has been exceeded.$"),
    ):
        list(map(list, (one, other)))


def test_sampling_reaches_the_server(client: ServerClient) -> None:
    def text(sampling: Sampling) -> str:
        with client.complete("x", count=15, sampling=sampling) as answer:
            return "".join(answer)

    seeds = [text(Sampling(temperature=1.9, seed=seed)) for seed in (1, 1, 2)]
    assert seeds[0] == seeds[1] != seeds[2]
    likeliest = text(GREEDY)
    for narrow in ({"top_k": 1}, {"top_p": 0.0}, {"min_p": 1.0}):
        assert text(Sampling(temperature=1.9, **narrow)) == likeliest, narrow
    assert text(Sampling(temperature=0, repeat_penalty=50)) != likeliest


@pytest.mark.timeout(60)
def test_a_text_that_is_left_is_computed_no_further(chat_path: Path) -> None:
    """The server would go on with this text for ever: the context shifts when it is full."""
    with serving(chat_path, "-c", "256", "--context-shift") as endless:
        with endless.client.complete("x y", sampling=GREEDY) as answer:
            for _ in zip(range(500), answer, strict=False):
                pass
        assert answer.facts.end == "left"
        wait_until_idle(endless.client)


@pytest.mark.parametrize(
    ("problem", "prompt", "options"),
    [
        ("the prompt is empty", "", {}),
        ("does not fit into the context, expected up to 2,0", "x y " * 3000, {}),
        ("no tokens requested", "x", {"count": 0}),
        ("temperature out of bounds", "x", {"sampling": Sampling(temperature=-1)}),
    ],
)
def test_what_cannot_be_asked_for_is_refused(
    client: ServerClient, problem: str, prompt: str, options: dict[str, Sampling]
) -> None:
    with pytest.raises(RequestError, match=problem):
        client.complete(prompt, **options)  # type: ignore[arg-type]


def test_refusals_are_in_the_servers_words(server: ServerProcess) -> None:
    with pytest.raises(RequestError, match="not this"):
        server.client.chat([{"role": "user", "content": "refuse"}])
    with pytest.raises(RequestError, match="Invalid API Key"):
        ServerClient(server.url, "other").complete("x")
    with pytest.raises(RequestError, match="not the address of a server"):
        ServerClient("127.0.0.1:8080")


def test_a_conversation_tells_the_model_what_was_said(client: ServerClient) -> None:
    talk = Conversation(client, "be brief", count=5, sampling=GREEDY)
    assert not talk.has_past
    with talk.ask("hello") as first:
        list(first)
    with talk.ask("and?") as second:
        list(second)
    prompt = f"{PROMPT}{first.text}<user>and?<answer>"
    prompt = prompt.replace("<answer>" + first.text, "<assistant>" + first.text)
    with client.complete(prompt, count=5, sampling=GREEDY) as whole:
        assert "".join(whole) == second.text
    assert talk.has_past
    talk.clear()
    assert not talk.has_past
    with talk.ask("hello") as again:
        assert "".join(again) == first.text


def test_the_beginning_of_an_answer_that_was_left_is_kept(client: ServerClient) -> None:
    talk = Conversation(client, count=5, sampling=GREEDY)
    with talk.ask("hello"):
        pass
    assert not talk.has_past, "a question without an answer is forgotten"
    with talk.ask("hello") as answer:
        next(iter(answer))
    assert talk.has_past


def test_the_cause_of_a_servers_end_is_no_error_of_a_request_before(chat_path: Path) -> None:
    with serving(chat_path) as server:
        client = server.client
        with pytest.raises(RequestError, match="does not fit into the context"):
            client.complete("x" * 9000)
        wait_until(lambda: " E " in server.log())  # another thread of llama.cpp's writes it
        with client.complete("x", sampling=GREEDY, more={"ignore_eos": True}) as answer:
            next(iter(answer))
            assert server.is_running
            os.kill(server.process_id, signal.SIGKILL)
            with pytest.raises(MachineError, match="server: ended by SIGKILL$"):
                list(answer)
        assert not server.is_running
        with pytest.raises(MachineError, match="ended by SIGKILL"):
            client.request("/props")


def test_a_request_is_cancelled_before_it_begins_and_while_it_is_answered(
    client: ServerClient,
) -> None:
    early = Cancellation()
    early.cancel()
    with client.chat(MESSAGES, sampling=GREEDY, cancellation=early) as answer:
        assert not list(answer)
    assert answer.facts.end == "left"
    late = Cancellation()
    with client.complete("x", sampling=GREEDY, cancellation=late) as answer:
        pieces = iter(answer)
        first = next(pieces)
        late.cancel()
        assert answer.text.startswith(first)
        list(pieces)
    assert answer.facts.end == "left"
    late.cancel()  # when it has ended


def test_an_answer_that_does_not_come_again_is_kept(client: ServerClient) -> None:
    options: Any = {"count": 8, "sampling": Sampling(temperature=2, seed=3)}
    talk = Conversation(client, **options)
    with talk.ask("hello"):
        pass
    with pytest.raises(RequestError, match="nothing has been answered yet"), talk.ask_again():
        pass
    for ask in (partial(talk.ask, "hello"), talk.ask_again):
        with ask() as last:
            list(last)
    assert last.facts.seed == 4
    cancelled = Cancellation()
    cancelled.cancel()
    with talk.ask_again(cancelled) as answer:
        assert not list(answer)
    texts = {"user": "hello", "assistant": last.text}
    messages = [{"role": role, "content": text} for role, text in texts.items()]
    with client.chat([*messages, {"role": "user", "content": "and?"}], **options) as expected:
        following = "".join(expected)
    with talk.ask("and?") as answer:
        assert "".join(answer) == following
