"""`python -m benchmarks.soak [--seconds N]`: serve for long, and watch what it takes and answers.

Clients of three APIs ask at once, with and without streams; some leave, some send nonsense. The
memory that is free changes all the time. After each round all must have ended, and memory,
descriptors and threads are compared with those of earlier rounds. Answers must be those that the
server gave while nobody else asked. It exits with 1, and the reasons, where something is not so.
"""

import argparse
import contextlib
import http.client
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import moepack
from benchmarks import program
from benchmarks.table import Row

ROOT = Path(__file__).parent.parent
MODEL = ROOT / "fixtures" / "chat-00001-of-00002.gguf"
_SERVE = "--serve-by"
_MUCH, _NOTHING = 1 << 30, -(1 << 30)
"""Bytes that are free: for all experts, and for the fewest."""
_ROUND, _PHASE = 10.0, 2.0
"""Seconds of a round, and of the same free memory in it."""
_LEAST_ROUNDS = 6
_CLIENTS = 6
_TEXTS = ("--", "--cache-ram", "8")
"""MiB of earlier texts: as few as are full soon, so that what grows later is something else."""
_PATIENCE = 60.0
_TOKENS = 24
_TEXT = (ROOT / "fixtures" / "prompt.txt").read_text()
_TURNS = ((0, 0), (3, 3), (8, 8))
"""The first of the answers that a conversation begins with, and their number."""
MOST_GROWTH = 12 << 20
"""Bytes by which the memory of a process may grow, as noise; and a twentieth of it."""

Key = tuple[str, int]
"""The kind of a text, and the number of its prompt: what decides about the answer."""
Message = dict[str, str]


def _conversation(first: int, count: int) -> list[Message]:
    """Return turns that the model has learned by heart, and the question of the next."""
    questions: list[str] = []
    messages: list[Message] = []
    for line in (ROOT / "fixtures" / "chat.txt").read_text().splitlines():
        mark, _, text = line.partition(" ")
        if mark == "?":
            questions.append(text)
        elif mark == "=" and questions:
            messages.append({"role": "user", "content": questions[0]})
            messages.append({"role": "assistant", "content": text})
            questions = []
    return messages[2 * first : 2 * (first + count) + 1]


CONVERSATIONS = [_conversation(*turns) for turns in _TURNS]
"""Their answers are known by heart: each next token is e^5 times as likely as the second. llama.cpp
rounds by what is computed together, with and without moepack, and that may decide between tokens
that are about as likely."""


class Level(NamedTuple):
    """What a process takes while nobody asks; the memory is its own, in bytes."""

    memory: int
    descriptors: int
    threads: int


@dataclass
class Findings:
    """What was asked, what came, and what should not be."""

    expected: dict[Key, str] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    levels: list[dict[str, Level]] = field(default_factory=list)
    budgets: dict[bool, list[float]] = field(default_factory=lambda: {True: [], False: []})
    ends: list[float] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, kind: str, key: Key | None = None, text: str = "") -> None:
        """Count an answer, and compare it with the first to the same."""
        with self.lock:
            self.counts[kind] += 1
            if key is not None and self.expected.setdefault(key, text) != text:
                self.counts["other answers"] += 1
                wanted = self.expected[key]
                self.complain(f"{kind} to prompt {key[1]}: {text!r} instead of {wanted!r}")

    def complain(self, problem: str) -> None:
        """Add a problem, of many the first."""
        if len(self.problems) < 20:
            self.problems.append(problem)


class Client:
    """A client at an address, with a connection of its own for each request."""

    def __init__(self, port: int, findings: Findings, seed: int) -> None:
        self._port = port
        self._findings = findings
        self._random = random.Random(seed)
        self._prompts = [self._text_of(messages) for messages in CONVERSATIONS]

    def _text_of(self, messages: list[Message]) -> str:
        with self._answer("/apply-template", {"messages": messages}) as answer:
            return str(json.load(answer)["prompt"])

    @contextlib.contextmanager
    def _answer(self, path: str, body: object) -> Iterator[http.client.HTTPResponse]:
        client = http.client.HTTPConnection("127.0.0.1", self._port, timeout=_PATIENCE)
        with contextlib.closing(client):
            data = body if isinstance(body, bytes) else json.dumps(body)
            client.request("POST", path, data, {"content-type": "application/json"})
            yield client.getresponse()

    def get(self, path: str) -> str:
        """Get a page."""
        client = http.client.HTTPConnection("127.0.0.1", self._port, timeout=_PATIENCE)
        with contextlib.closing(client):
            client.request("GET", path)
            return client.getresponse().read().decode()

    def ask(self, api: str, number: int, *, stream: bool) -> None:
        """Ask for a text, and compare it."""
        path, body, text_of = self._request(api, number)
        kind = f"{api}{', stream' if stream else ''}"
        with self._answer(path, {**body, "stream": stream}) as answer:
            if answer.status != 200:
                self._findings.complain(f"{kind}: {answer.status} {answer.read(300)!r}")
                return
            if stream:
                text = "".join(text_of(event) for event in _events(answer))
            else:
                text = text_of(json.load(answer))
        self._findings.add(kind, ("completion" if api == "completion" else "chat", number), text)

    def leave(self, api: str, number: int) -> None:
        """Ask for a long text, and go: at once, or after a few lines."""
        path, body, _ = self._request(api, number)
        with self._answer(
            path, {**body, "stream": True, "ignore_eos": True, _limit(api): 500}
        ) as answer:
            for _ in range(self._random.randrange(8)):
                answer.readline()
        self._findings.add("left in a stream")

    def leave_before_the_answer(self, number: int) -> None:
        """Send a request, and close before anything comes."""
        body = json.dumps(
            {"prompt": self._prompts[number], "n_predict": 500, "ignore_eos": True}
        ).encode()
        with socket.create_connection(("127.0.0.1", self._port), _PATIENCE) as connection:
            head = f"POST /completion HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}"
            length = self._random.choice((len(body), len(body) // 2))
            connection.sendall(f"{head}\r\n\r\n".encode() + body[:length])
            time.sleep(self._random.random() / 5)
        self._findings.add("left before the answer")

    def send_nonsense(self) -> None:
        """Send what must be refused."""
        path, body = self._random.choice(
            [
                ("/v1/chat/completions", b"{"),
                ("/v1/messages", b'{"messages": ['),
                ("/completion", json.dumps({"prompt": _TEXT * 400}).encode()),
                ("/no/such/path", b"{}"),
            ]
        )
        with self._answer(path, body) as answer:
            answer.read()
            if not 400 <= answer.status < 500:
                self._findings.complain(f"{path}: nonsense was answered by {answer.status}")
        self._findings.add("nonsense")

    def _request(self, api: str, number: int) -> tuple[str, dict[str, Any], Callable[[Any], str]]:
        """Return path, body, and what takes the text from an answer or an event."""
        body: dict[str, Any] = {"temperature": 0, _limit(api): _TOKENS}
        if api == "completion":
            body["prompt"] = self._prompts[number]
            return "/completion", body, lambda one: str(one["content"])
        body |= {"model": "m", "messages": CONVERSATIONS[number]}
        if api == "chat":
            return "/v1/chat/completions", body, _text_of_chat
        return "/v1/messages", body, _text_of_message

    def do_something(self) -> None:
        """Ask, leave, or send nonsense."""
        api, number = self._random.choice(APIS), self._random.randrange(len(CONVERSATIONS))
        draw = self._random.random()
        try:
            if draw < 0.7:
                self.ask(api, number, stream=draw < 0.4)
            elif draw < 0.8:
                self.leave(api, number)
            elif draw < 0.9:
                self.leave_before_the_answer(number)
            elif draw < 0.97:
                self.send_nonsense()
            else:
                self.get("/v1/models")
                self._findings.add("models")
        except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
            self._findings.complain(f"{api}, {draw:.2f}: {error!r}")


APIS = ("completion", "chat", "messages")


def _limit(api: str) -> str:
    return "n_predict" if api == "completion" else "max_tokens"


def _text_of_chat(one: Any) -> str:
    return "".join(
        choice.get("message", choice.get("delta", {})).get("content") or ""
        for choice in one["choices"]
    )


def _text_of_message(one: Any) -> str:
    if "content" in one:
        return "".join(block.get("text", "") for block in one["content"])
    return str(one.get("delta", {}).get("text", ""))


def _events(answer: http.client.HTTPResponse) -> Iterator[Any]:
    for line in answer:
        if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
            yield json.loads(line[6:])


class Watched:
    """A server that is told by a file how much memory is free."""

    def __init__(self, folder: Path) -> None:
        moepack.pack_model(MODEL, folder / "pack")
        self._free = folder / "free"
        self.set_free(_MUCH)
        names = {"XDG_CACHE_HOME": str(folder / "cache"), "XDG_STATE_HOME": str(folder / "state")}
        command = [sys.executable, "-m", "benchmarks.soak", _SERVE, str(self._free), "serve"]
        words = [str(folder / "pack"), "--port", "0", "-t", "1", "-c", "8192", "-q", *_TEXTS]
        self._log = (folder / "log").open("wb")
        self.process = subprocess.Popen(
            [*command, *words], env=os.environ | names, stdout=subprocess.PIPE, stderr=self._log
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline().decode()
        if not line.startswith("listening on"):
            sys.exit((folder / "log").read_text())
        self.port = int(line.rpartition(":")[2])

    def set_free(self, length: int) -> None:
        """Say how many bytes are free from now on."""
        new = self._free.with_suffix(".new")
        new.write_text(str(length))
        new.replace(self._free)

    def levels(self) -> dict[str, Level]:
        """Return what it takes: moepack, and llama.cpp."""
        (child,) = _children(self.process.pid)
        return {"moepack": _level(self.process.pid), "llama.cpp": _level(child)}

    def end(self) -> tuple[int, float]:
        """End it as a service manager does; return its exit code, and the seconds that took."""
        began, children = time.monotonic(), _children(self.process.pid)
        self.process.terminate()
        code = self.process.wait(_PATIENCE)
        self._log.close()
        return (-1 if any(map(_exists, children)) else code), time.monotonic() - began


def _exists(process: int) -> bool:
    return Path(f"/proc/{process}").exists()


def _children(process: int) -> list[int]:
    tasks = Path(f"/proc/{process}/task").glob("*/children")
    return [int(word) for task in tasks for word in task.read_text().split()]


def _level(process: int) -> Level:
    folder = Path(f"/proc/{process}")
    lines = [line.split() for line in (folder / "status").read_text().splitlines()]
    fields = {words[0]: words[1] for words in lines if len(words) > 1}
    count = len(list((folder / "fd").iterdir()))
    return Level(int(fields["RssAnon:"]) << 10, count, int(fields["Threads:"]))


def _metrics(client: Client) -> dict[str, float]:
    rows = [line.rpartition(" ") for line in client.get("/metrics").splitlines()]
    return {name: float(value) for name, _, value in rows if not name.startswith("#")}


def _round(server: Watched, clients: list[Client], findings: Findings, seconds: float) -> None:
    """Let all ask while the free memory changes; then wait until all has ended."""
    end = time.monotonic() + seconds

    def work(client: Client) -> None:
        while time.monotonic() < end:
            client.do_something()

    threads = [threading.Thread(target=work, args=(client,), daemon=True) for client in clients]
    for thread in threads:
        thread.start()
    is_much = False
    while time.monotonic() < end:
        server.set_free(_MUCH if is_much else _NOTHING)
        time.sleep(min(_PHASE, seconds / 3))
        findings.budgets[is_much].append(_metrics(clients[0])["moepack_experts_budget_bytes"])
        is_much = not is_much
    server.set_free(_MUCH)
    for thread in threads:
        thread.join(_PATIENCE)
        if thread.is_alive():
            findings.complain("a client still waits for its answer")
    began = time.monotonic()
    while (rest := _unfinished(clients[0])) and time.monotonic() < began + _PATIENCE:
        time.sleep(0.05)
    if rest:
        findings.complain(f"after {_PATIENCE:.0f} s {rest} is not over")
    findings.ends.append(time.monotonic() - began)


def _unfinished(client: Client) -> str:
    """Name what the server still has to do."""
    metrics = _metrics(client)
    if metrics["moepack_requests_open"] > 1 or metrics["moepack_requests_waiting"]:
        return "a request"
    slots = json.loads(client.get("/slots"))
    return "a text" if any(slot["is_processing"] for slot in slots) else ""


def judge_levels(findings: Findings) -> Iterator[Row]:
    """Compare the last third of the rounds with the second: in the first, caches of texts fill."""
    rounds = findings.levels
    for process in rounds[0]:
        for number, name in enumerate(Level._fields):
            unit, scale = ("MiB", 1 << 20) if name == "memory" else (name, 1)
            levels = [one[process][number] / scale for one in rounds]
            yield Row(process, name, unit, levels)
            if len(rounds) < _LEAST_ROUNDS:
                continue
            third = len(rounds) // 3
            first, last = median(levels[third : 2 * third]), median(levels[-third:])
            most = max(MOST_GROWTH / scale, first / 20) if name == "memory" else 2
            if last - first > most:
                findings.complain(f"{process}: {name} grew, {first:.0f} to {last:.0f} {unit}")


def soak(seconds: float, round_seconds: float = _ROUND) -> Iterator[Row]:
    """Serve for so long; yield what was seen, and what should not be, at most 0 times."""
    findings = Findings()
    with tempfile.TemporaryDirectory() as folder:
        server = Watched(Path(folder))
        clients = [Client(server.port, findings, seed) for seed in range(_CLIENTS)]
        try:
            for api in APIS:  # alone: what all later ones are compared with
                for number in range(len(CONVERSATIONS)):
                    clients[0].ask(api, number, stream=False)
            began = time.monotonic()
            while time.monotonic() < began + seconds or len(findings.levels) < 3:
                _round(server, clients, findings, round_seconds)
                findings.levels.append(server.levels())
        finally:
            code, end_seconds = server.end()
    if code:
        findings.complain(f"it ended with {code}")
    for kind, count in sorted(findings.counts.items()):
        yield Row("requests", kind, "requests", [count])
    least, most = ([one / (1 << 20) for one in findings.budgets[much]] for much in (False, True))
    yield Row("memory for experts", "little free", "MiB", least)
    yield Row("memory for experts", "much free", "MiB", most)
    if not median(least) < median(most) / 2:
        findings.complain("the memory for experts did not follow what is free")
    yield Row("the end", "of a round", "s", findings.ends)
    yield Row("the end", "of the server", "s", [end_seconds])
    yield from judge_levels(findings)
    for problem in findings.problems:
        yield Row("NOT right", problem, "times", [1], limit=0)


def _serve(free: Path, words: list[str]) -> None:
    """Be `moepack`, for which as many bytes are free as a file says."""
    from moepack.cli.main import main as command
    from moepack.running.streaming.budget import FreeMemory

    def spare() -> int:
        return int(free.read_text())

    FreeMemory.__init__.__defaults__ = (spare, Path("/no/pressure"))
    sys.argv = ["moepack", *words]
    command()


def parser() -> argparse.ArgumentParser:
    """Return the options."""
    parser = program.new_parser("benchmarks.soak", __doc__)
    parser.add_argument("--seconds", type=float, default=3600)
    return parser


if __name__ == "__main__":
    if sys.argv[1:2] == [_SERVE]:
        _serve(Path(sys.argv[2]), sys.argv[3:])
    else:
        sys.exit(program.measure(parser(), lambda options: soak(options.seconds)))
