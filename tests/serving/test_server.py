"""A server that is asked by the clients that people have, by broken ones and by hostile ones."""

import contextlib
import json
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import httpx
import pytest
import uvicorn

from moepack.llama_cpp.sampling import Sampling
from moepack.running.model import Model
from moepack.serving.server import Limits, Server
from tests.support.chat_model import write_chat_model
from tests.support.children import PATIENCE
from tests.support.faulty_backend import Fault, FaultyBackend, make
from tests.support.needs import needs_llama

if TYPE_CHECKING:
    import openai  # takes long

pytestmark = [
    pytest.mark.long,
    needs_llama,
]
KEY = "sesame"
LONG = 2048
"""The context: a text that fills it takes seconds."""
SMALL: dict[str, Any] = {"memory": "floor", "context": LONG, "threads": 1}
MESSAGES: Any = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12}
ENDLESS = {"prompt": "x", "temperature": 0, "stream": True}
LIMITS = Limits(body_length=100_000, body_seconds=1.0, poll_seconds=0.05)


def request(method: str, url: str, **options: Any) -> httpx.Response:
    """Send a request, for which no certificates are loaded: that takes longer than the answer."""
    return httpx.request(method, url, verify=False, **options)


class Served(NamedTuple):
    """A server, and how it is asked."""

    url: str
    fault: Fault

    @property
    def client(self) -> "openai.OpenAI":
        """Return the real client of OpenAI's API."""
        import openai

        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=KEY, max_retries=0, timeout=60)

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        """Send a request that may be wrong."""
        headers = {"Authorization": f"Bearer {KEY}"} | options.pop("headers", {})
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        url = f"{self.url}/v1/{path}"
        return request("POST", url, content=data, headers=headers, timeout=60, **options)

    def stream(self, streams: bool, timeout: float) -> Any:
        """Ask for a text that takes seconds; a context manager."""
        headers = {"Authorization": f"Bearer {KEY}"}
        body = ENDLESS | {"stream": streams}
        url = f"{self.url}/v1/completions"
        return httpx.stream("POST", url, verify=False, json=body, headers=headers, timeout=timeout)

    @contextlib.contextmanager
    def slow(self) -> Iterator[None]:
        """Let each read take long, so that a text does."""
        self.fault.code, self.fault.delay, self.fault.times = 0, 0.02, None
        try:
            yield
        finally:
            self.fault.code, self.fault.delay, self.fault.times = 5, 0.0, 0

    def metric(self, name: str) -> float:
        """Return one of the server's counts."""
        headers = {"Authorization": f"Bearer {KEY}"}
        lines = request("GET", f"{self.url}/metrics", headers=headers).text.splitlines()
        return float(next(line.split()[1] for line in lines if line.startswith(f"moepack_{name} ")))


@pytest.fixture(scope="module")
def chat_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model with a template for chats."""
    return write_chat_model(tmp_path_factory.mktemp("chat") / "chat.gguf")


@contextlib.contextmanager
def serving(chat_path: Path, limits: Limits = LIMITS) -> Iterator[Served]:
    """Serve a model from a thread, with a drive whose faults a test chooses."""
    fault = Fault(code=5, times=0)
    drive = FaultyBackend(make("buffered"), fault)
    with Model(chat_path, backend=drive, **SMALL) as model:
        server = Server(model, "tiny", api_key=KEY, limits=limits)
        config = uvicorn.Config(server.application, log_level="error", lifespan="off")
        web = uvicorn.Server(config)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            thread = threading.Thread(target=web.run, kwargs={"sockets": [listener]})
            thread.start()
            try:
                yield Served(f"http://127.0.0.1:{listener.getsockname()[1]}", fault)
            finally:
                web.should_exit = True
                thread.join(PATIENCE)
                server.close()


@pytest.fixture(scope="module")
def served(chat_path: Path) -> Iterator[Served]:
    """Serve a model for all tests that leave it as it was."""
    with serving(chat_path) as one:
        yield one


@pytest.fixture(scope="module")
def expected(chat_path: Path) -> str:
    """Return the answer to MESSAGES as the model itself gives it."""
    with Model(chat_path, **SMALL) as model:
        prompt = "<system>be brief<user>hello<answer>"
        return "".join(model.generate(prompt, count=12, sampling=Sampling(temperature=0)))


def test_openais_client_gets_an_answer(served: Served, expected: str) -> None:
    answer = served.client.chat.completions.create(model="tiny", messages=MESSAGES, **GREEDY)
    (choice,) = answer.choices
    assert choice.message.content == expected
    assert (choice.message.role, choice.finish_reason) == ("assistant", "length")
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 12
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 12
    assert (answer.model, answer.object) == ("tiny", "chat.completion")


def test_openais_client_gets_it_piece_by_piece(served: Served, expected: str) -> None:
    stream = served.client.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        stream=True,
        stream_options={"include_usage": True},
        **GREEDY,
    )
    chunks = list(stream)
    texts = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
    assert "".join(texts) == expected
    assert len([text for text in texts if text]) > 1
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 12
    assert len({chunk.id for chunk in chunks}) == 1


def test_openais_client_goes_on_with_a_prompt(served: Served, expected: str) -> None:
    prompt = "<system>be brief<user>hello<answer>"
    answer = served.client.completions.create(model="tiny", prompt=prompt, **GREEDY)
    assert answer.choices[0].text == expected
    stream = served.client.completions.create(model="tiny", prompt=prompt, stream=True, **GREEDY)
    assert "".join(chunk.choices[0].text for chunk in stream) == expected


def test_options_mean_what_they_mean_elsewhere(served: Served, expected: str) -> None:
    ask = served.client.chat.completions.create
    stop = expected[4:6]
    parts: Any = [*MESSAGES[:1], {"role": "user", "content": [{"type": "text", "text": "hello"}]}]
    answer = ask(model="tiny", messages=parts, stop=[stop], **GREEDY)
    assert answer.choices[0].message.content == expected[: expected.index(stop)]
    assert answer.choices[0].finish_reason == "stop"
    texts = [
        ask(model="any", messages=MESSAGES, max_completion_tokens=15, temperature=1.9, seed=seed)
        .choices[0]
        .message.content
        for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2]


def test_curl_gets_models_health_and_metrics(served: Served) -> None:
    def curl(path: str, *arguments: str) -> str:
        command = ["curl", "-sS", "--fail-with-body", *arguments, f"{served.url}{path}"]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    bearer = ("-H", f"Authorization: Bearer {KEY}")
    assert json.loads(curl("/health")) == {"status": "ok"}
    (model,) = json.loads(curl("/v1/models", *bearer))["data"]
    assert model["id"] == "tiny"
    assert json.loads(curl("/v1/models/tiny", *bearer)) == model
    assert "# TYPE moepack_tokens_total counter\n" in curl("/metrics", *bearer)
    body = json.dumps({"messages": MESSAGES, "stream": True} | GREEDY)
    lines = curl("/v1/chat/completions", *bearer, "-d", body).split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    assert all(line.startswith("data: ") for line in lines[:-1])


def test_who_has_no_key_gets_nothing(served: Served) -> None:
    import openai

    for key in ("x", "Sesame", KEY + "x"):
        for path in ("models", "models/tiny", "chat/completions", "completions"):
            method = "GET" if path.startswith("models") else "POST"
            answer = request(
                method, f"{served.url}/v1/{path}", headers={"Authorization": f"Bearer {key}"}
            )
            assert answer.status_code == 401, (path, key)
            assert answer.json()["error"]["type"] == "authentication_error"
    assert request("GET", f"{served.url}/metrics").status_code == 401
    wrong = openai.OpenAI(base_url=f"{served.url}/v1", api_key="wrong", max_retries=0)
    with pytest.raises(openai.AuthenticationError):
        wrong.models.list()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "role"),
        ({"messages": [{"role": "user"}]}, "text"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "text"),
        ({"messages": [{"role": "user", "content": "refuse"}]}, "refuses the messages"),
        ({"messages": [{"role": "user", "content": "word " * 3000}]}, "does not fit"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_completion_tokens": 1.5}, "max_completion_tokens"),
        ({"n": 2}, "n: "),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 3}, "top-p"),
        ({"top_k": 1.5}, "top_k"),
        ({"seed": 1 << 70}, "seed"),
        ({"stop": [1]}, "stop"),
        ({"stop": ["x"] * 99}, "stop"),
        ({"stream": "yes"}, "stream"),
        ({"stream": True, "stream_options": 7}, "stream_options"),
    ],
)
def test_a_wrong_request_is_told_what_is_wrong(
    change: dict[str, Any], words: str, served: Served
) -> None:
    answer = served.post("chat/completions", {"messages": MESSAGES} | GREEDY | change)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert words in answer.json()["error"]["message"]


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff", b"[" * 50_000, b'"x"', b"null"])
def test_a_body_that_is_no_request_is_refused(body: bytes, served: Served) -> None:
    for path in ("chat/completions", "completions"):
        assert served.post(path, body).status_code == 400


def test_prompts_that_are_none_are_refused(served: Served) -> None:
    for prompt in (None, "", [], ["a", "b"], [1, 2], 7):
        assert served.post("completions", {"prompt": prompt}).status_code == 400


def test_other_addresses_and_methods_are_none(served: Served) -> None:
    headers = {"Authorization": f"Bearer {KEY}"}
    for path, code in (("/v1/embeddings", 404), ("/v1/models/other", 404), ("/", 404)):
        assert request("GET", served.url + path, headers=headers).status_code == code
    assert request("GET", f"{served.url}/v1/completions", headers=headers).status_code == 405


def test_a_body_that_is_too_large_is_refused(served: Served) -> None:
    assert served.post("completions", b"x" * 200_000).status_code == 413


def test_slow_broken_and_hostile_clients_harm_nobody(served: Served, expected: str) -> None:
    host, port = served.url.removeprefix("http://").split(":")
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
    idle = [socket.create_connection((host, int(port))) for _ in range(20)]
    for number, data in enumerate(
        (
            b"\x16\x03\x01\x02\x00\x01\x00",
            b"GET / HTTP/9.9\r\n\r\n",
            head.encode() + b"Content-Length: -5\r\n\r\n",
            head.encode() + b"Content-Length: 10\r\n\r\n{",
            head.encode() + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
            b"A" * 300_000,
        )
    ):
        with contextlib.suppress(OSError):
            idle[number].sendall(data)
    slow = socket.create_connection((host, int(port)))
    slow.sendall(head.encode() + b"Content-Length: 100\r\n\r\n{")
    answer = served.client.chat.completions.create(model="tiny", messages=MESSAGES, **GREEDY)
    assert answer.choices[0].message.content == expected
    slow.settimeout(PATIENCE)
    assert slow.recv(100).startswith(b"HTTP/1.1 408")
    for connection in (*idle, slow):
        connection.close()


def test_clients_wait_for_each_other_and_all_get_theirs(served: Served, expected: str) -> None:
    def ask(number: int) -> Any:
        other: Any = [{"role": "user", "content": f"say {number}"}]
        messages = MESSAGES if number % 2 else other
        answer = served.client.chat.completions.create(model="tiny", messages=messages, **GREEDY)
        return answer.choices[0].message.content

    with ThreadPoolExecutor(8) as executor:
        texts = list(executor.map(ask, range(12)))
    assert set(texts[1::2]) == {expected}
    assert all(ask(number) == texts[number] for number in (0, 2))


@pytest.mark.parametrize("streams", [True, False])
def test_a_client_that_goes_away_ends_its_text(streams: bool, served: Served) -> None:
    before, seconds = served.metric("requests_total"), served.metric("tokens_total")
    with served.slow():
        patience = contextlib.suppress(httpx.ReadTimeout)
        with patience, served.stream(streams, timeout=0.3) as response:
            next(response.iter_raw())
        until(lambda: served.metric("requests_total") == before + 1)
    assert served.metric("tokens_total") - seconds < 100


def test_too_many_that_wait_are_sent_away(chat_path: Path) -> None:
    with serving(chat_path, LIMITS._replace(waiting=1)) as served:
        ask = {"prompt": "x"} | GREEDY
        with ThreadPoolExecutor(1) as executor:
            with served.slow(), served.stream(True, timeout=60) as first:
                pieces = first.iter_raw()  # which closes the connection when it is dropped
                next(pieces)
                second = executor.submit(served.post, "completions", ask)
                until(lambda: served.metric("waiting") == 1)
                third = served.post("completions", ask)
                assert third.status_code == 503
                assert third.headers["retry-after"]
            assert second.result().status_code == 200


def test_a_failing_drive_is_an_error_and_the_next_text_works(
    chat_path: Path, expected: str
) -> None:
    import openai

    with serving(chat_path) as served:
        ask = {"messages": MESSAGES} | GREEDY
        served.fault.times = 1
        failed = served.post("chat/completions", ask)
        assert failed.status_code == 500
        assert "cannot read" in failed.json()["error"]["message"]
        stream = served.client.completions.create(model="x", **ENDLESS)  # type: ignore[call-overload]
        next(stream)
        served.fault.times = 1
        with pytest.raises(openai.APIError, match="cannot read"):
            list(stream)
        assert served.metric("failures_total") == 2
        answer = served.post("chat/completions", ask).json()
        assert answer["choices"][0]["message"]["content"] == expected


def until(is_so: Any) -> None:
    """Wait for something to become true."""
    end = time.monotonic() + PATIENCE
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.02)
