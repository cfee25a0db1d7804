"""llama.cpp's server as we start it, tried by other sites, slow clients, signals and errors."""

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from moepack.common.errors import MachineError, MoepackError, RequestError, SourceError
from moepack.running.serving.model_server import ServerProcess
from tests.support.children import PATIENCE, Piped, run_command
from tests.support.needs import needs_llama
from tests.support.servers import OPTIONS, serving

pytestmark = needs_llama

PROGRAM = (sys.executable, "-m", "moepack.running.serving.server")
BODY = json.dumps({"prompt": "x", "n_predict": 2, "temperature": 0}).encode()


@pytest.fixture(scope="module")
def server(chat_path: Path) -> Iterator[ServerProcess]:
    """Serve a model for all tests that leave the server as it was."""
    with serving(chat_path) as one:
        yield one


def exchange(url: str, request: bytes) -> bytes:
    """Send bytes to a server, and return all that comes back until it closes the connection."""
    parts = urlsplit(url)
    assert parts.hostname is not None
    with socket.create_connection((parts.hostname, parts.port or 80), 20) as connection:
        connection.sendall(request)
        answer = b""
        while data := connection.recv(1 << 16):
            answer += data
        return answer


def ask(url: str, *fields: str, body: bytes = BODY, path: str = "/completion") -> tuple[int, Any]:
    """Send a request with its header fields; return the answer's status and JSON."""
    method = "POST" if body else "GET"
    lines = [f"{method} {path} HTTP/1.1", *fields, f"Content-Length: {len(body)}"]
    head = "\r\n".join([*lines, "Connection: close"])
    answer = exchange(url, head.encode() + b"\r\n\r\n" + body)
    head_end = answer.index(b"\r\n\r\n")
    return int(answer.split()[1]), json.loads(answer[head_end:])


def test_only_this_machine_reaches_it(server: ServerProcess) -> None:
    assert server.url.startswith("http://127.0.0.1:")
    lines = Path(f"/proc/{server.process_id}/net/tcp").read_text().splitlines()[1:]
    port = f"{int(server.url.rpartition(':')[2]):04X}"
    listening = [line.split()[1] for line in lines if line.split()[3] == "0A"]
    assert [place for place in listening if place.endswith(f":{port}")] == [f"0100007F:{port}"]


def test_a_page_of_another_site_has_nothing_computed(server: ServerProcess) -> None:
    status, answer = ask(server.url, "Host: localhost")
    assert (status, answer["tokens_predicted"]) == (200, 2)
    assert ask(server.url, "Host: localhost", "Origin: http://localhost:3000")[0] == 200
    for fields in (
        ("Host: localhost", "Origin: https://evil.example", "Content-Type: text/plain"),
        ("Host: evil.example", "Origin: http://evil.example"),
        ("Host: evil.example",),
    ):
        status, answer = ask(server.url, *fields)
        assert (status, answer["error"]["type"]) == (403, "permission_error")
        assert "evil.example" in answer["error"]["message"]
        assert "--cors-origins" in answer["error"]["message"]


def test_what_large_requests_took_is_given_back(server: ServerProcess) -> None:
    def memory() -> int:
        status = Path(f"/proc/{server.process_id}/status").read_text()
        return int(status.partition("RssAnon:")[2].split()[0]) << 10

    body = json.dumps({"prompt": "x y " * 60_000}).encode()
    ask(server.url, "Host: localhost")
    before = memory()
    for _ in range(3):
        with ThreadPoolExecutor(8) as pool:  # each is in a thread of the server's own
            answers = pool.map(lambda _: ask(server.url, "Host: localhost", body=body), range(8))
        assert {status for status, _ in answers} == {400}
    assert memory() - before < 96 << 20


def test_slow_clients_leave_others_their_answers(server: ServerProcess) -> None:
    host, port = "127.0.0.1", int(server.url.rpartition(":")[2])
    with contextlib.ExitStack() as stack:
        for number in range(500):
            client = stack.enter_context(socket.create_connection((host, port)))
            client.sendall((b"", b"G", b"POST / HTTP/1.1\r\nHost: localhost\r\na: ")[number % 3])
        began = time.monotonic()
        assert ask(server.url, "Host: localhost")[0] == 200
        assert time.monotonic() - began < PATIENCE / 2


def test_few_descriptors_are_neither_used_up_nor_asked_for_again_and_again(chat_path: Path) -> None:
    """The gate waits until a client is gone, without a word, and with the processor at rest."""
    limited = ("sh", "-c", 'ulimit -n 40; exec "$@"', "sh")
    with ServerProcess(str(chat_path), options=OPTIONS, prefix=limited) as server:
        port = int(server.url.rpartition(":")[2])
        before = server.processor_seconds()
        with contextlib.ExitStack() as stack:
            for _ in range(200):
                client = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
                client.sendall(b"POST / HTTP/1.1\r\nHost: ")
            time.sleep(1)
        assert ask(server.url, "Host: localhost")[0] == 200
        assert server.processor_seconds() - before < 1
        assert len(server.log()) < 2000, server.log()


def test_the_longest_request_follows_from_the_context(server: ServerProcess) -> None:
    most = (1 << 20) + 32 * 2048
    prompt = json.dumps({"prompt": "x" * most}).encode()
    for body in (prompt, prompt[: most - 10]):
        status, answer = ask(server.url, "Host: localhost", body=body)
        message = answer["error"]["message"]
        assert status == (413 if body is prompt else 400)
        assert (f"more than {most:,} bytes" in message) == (body is prompt)


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_messages_that_are_no_list_are_refused(server: ServerProcess, path: str) -> None:
    """llama.cpp itself answers them in Anthropic's API, as if there were none."""
    for messages, expected in (
        (7, 400),
        ("x", 400),
        (None, 400),
        ({"role": "user"}, 400),
        ([], 200),
    ):
        body = json.dumps({"messages": messages, "max_tokens": 1}).encode()
        status, answer = ask(server.url, "Host: localhost", body=body, path=path)
        assert status == expected
        assert status == 200 or "'messages'" in answer["error"]["message"]


def test_a_refusal_is_noted_once_with_what_to_give(chat_path: Path) -> None:
    with serving(chat_path) as server:
        for _ in range(2):
            assert ask(server.url, "Host: b\x1box.example")[0] == 403
        (line,) = (line for line in server.log().splitlines() if line.startswith("note: "))
        assert r"b\x1box.example" in line
        assert "--cors-origins localhost,http://b" in line


def test_what_clients_are_told_is_the_servers_own(chat_path: Path) -> None:
    options = ("--cors-origins", "https://chat.example", "--alias", "tiny", "-np", "2")
    with serving(chat_path, *options, api_key="sesame") as server:
        key = "Authorization: Bearer sesame"
        fields = ("Host: chat.example", "Origin: https://chat.example")
        assert ask(server.url, *fields)[0] == 401
        assert ask(server.url, *fields, key)[0] == 200
        assert ask(server.url, "Host: chat.example", "Origin: http://localhost", key)[0] == 403
        assert server.client.request("/props")["total_slots"] == 2
        assert server.client.request("/props")["model_alias"] == "tiny"


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Start the program, where it ends by itself."""
    return run_command(*PROGRAM, *arguments, env=os.environ | variables)


def test_help_is_llama_servers_own_with_our_defaults() -> None:
    text = run("--help").stdout
    assert "--slot-save-path" in text
    lines = " ".join(text.split())
    assert "SSE ping interval in seconds (-1 = disabled, default: 10)" in lines
    for option, default in (
        ("--port PORT", "8080"),
        ("--host HOST", "127.0.0.1"),
        ("--repack, -nr, --no-repack", "disabled"),
        ("--warmup, --no-warmup", "disabled"),
        ("--cors-origins ORIGINS", "localhost"),
        ("-c, --ctx-size N", "0"),
    ):
        after = lines[lines.index(option) :]
        assert after[after.index("(default: ") :].startswith(f"(default: {default}"), option


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ((), 2, "no model is given"),
        (("-m", "/nowhere.gguf"), 3, "/nowhere.gguf: cannot read the model: No such file"),
        (("-m", sys.executable, "--api-key", ""), 2, "an empty API key"),
        (("-m", "x", "--jinja", "--chat-template", "llama2"), 2, "llama2 is not Jinja, and has no"),
        (("-m", "x", "--no-such-option"), 2, "invalid argument: --no-such-option"),
        (("-m", sys.executable, "--host", "192.0.2.1"), 6, "cannot listen at 192.0.2.1 port 8080"),
        (("-m", sys.executable, "--port", "0"), 3, "llama.cpp does not load the model"),
        (("-m", sys.executable, "--ssl-cert-file", "/x", "--ssl-key-file", "/y"), 2, "/x"),
    ],
)
def test_what_is_wrong_is_said(arguments: tuple[str, ...], code: int, words: str) -> None:
    ended = run(*arguments)
    assert ended.returncode == code, ended.stderr
    assert words in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    ("error", "options", "words"),
    [
        (RequestError, ["-c", "many"], 'error while handling argument "-c"'),
        (RequestError, ["--chat-template", "{% if %}"], "the chat template, found {% if %}"),
        (MachineError, ["--port", "PORT"], "cannot listen at 127.0.0.1 port PORT: Address already"),
        (SourceError, ["-m", "CUT"], "data is not within the file bounds"),
    ],
)
def test_python_gets_the_servers_words(
    chat_path: Path, tmp_path: Path, error: type[MoepackError], options: list[str], words: str
) -> None:
    cut = tmp_path / "short.gguf"
    cut.write_bytes(chat_path.read_bytes()[: chat_path.stat().st_size // 2])
    with socket.create_server(("127.0.0.1", 0)) as other:
        names = {"PORT": str(other.getsockname()[1]), "CUT": str(cut)}
        words = words.replace("PORT", names["PORT"])
        options = [names.get(option, option) for option in options]
        with ServerProcess(str(chat_path), options=options) as server:
            with pytest.raises(error, match=words):
                assert server.url
            assert words in str(server.problem())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_in_the_middle_of_an_answer(chat_path: Path, number: int) -> None:
    with Piped(*PROGRAM, "-m", chat_path, *OPTIONS, "--port", "0") as process:
        url = process.stdout.readline().split()[-1]
        with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as client:
            body = json.dumps({"prompt": "x", "ignore_eos": True, "stream": True})
            head = f"POST /completion HTTP/1.1\r\nHost: x.localhost\r\nContent-Length: {len(body)}"
            client.sendall(f"{head}\r\n\r\n{body}".encode())
            while b"tokens_predicted" not in client.recv(1 << 12):
                pass
            began = time.monotonic()
            process.send_signal(number)
            _, complaints = process.communicate(timeout=PATIENCE)
        assert (process.returncode, "Traceback" in complaints) == (0, False)
        assert time.monotonic() - began < 2


def test_it_ends_with_the_process_that_started_it(chat_path: Path) -> None:
    code = (
        "import sys, time; from moepack.running.serving.model_server import ServerProcess\n"
        "server = ServerProcess(sys.argv[1]); print(server.url, server.process_id, flush=True)\n"
        "time.sleep(600)"
    )
    with Piped(sys.executable, "-c", code, chat_path) as parent:
        url, number = parent.stdout.readline().split()
        assert exchange(url, b"GET /health HTTP/1.0\r\n\r\n")
        with open(os.pidfd_open(int(number))) as server:
            parent.kill()
            assert select.select([server], [], [], PATIENCE)[0], "the server outlives its parent"
