"""A client of llama.cpp's server: prompts, and texts piece by piece, with their cost."""

import contextlib
import json
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from http.client import HTTPConnection, HTTPException, HTTPResponse
from typing import Any, Literal
from urllib.parse import urlsplit

from moepack.common.closing import Closing
from moepack.common.errors import MachineError, MoepackError, RequestError
from moepack.running.serving.sampling import Sampling

End = Literal["stop", "length", "context", "left"]
"""Why a text ends: by the model or a stop text; it has the requested tokens; the context is full;
it was cancelled."""
_Fields = Mapping[str, Any]

_SECONDS_BETWEEN_TRIES = 0.03
_PROGRESS = {"stream": True, "timings_per_token": True, "return_progress": True}
_THOUGHTS_BEGIN, _THOUGHTS_END = "<think>\n", "\n</think>\n\n"
_TEMPLATE_ERROR = "Jinja Exception: "
_MAX_LINE_LENGTH = 1 << 24
_NOT_IMPLEMENTED = 501
"""The status if an option of the server has to allow a request."""


@dataclass(frozen=True, slots=True)
class PhaseFacts:
    """The computed tokens of a phase: of a prompt, or those after it one by one."""

    step_count: int = 0
    seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float | None:
        """The speed, if anything was computed."""
        return self.step_count / self.seconds if self.step_count and self.seconds else None


@dataclass(frozen=True, slots=True)
class AnswerFacts(PhaseFacts):
    """A text and its figures. Besides `prompt`, phases are about the tokens after its first.

    `processed_count` tokens of the prompt are processed so far, of which `kept_count` were kept
    from an earlier text. The last of the text's `token_count` tokens needs no step. `thoughts`
    precede the answer. `first_token_seconds` is from the request to the first token, `seed` the
    sampler's. `draft_count` tokens were drafted, of which the text has `accepted_count`.
    """

    text: str = ""
    thoughts: str = ""
    end: End = "left"
    token_count: int = 0
    prompt_count: int = 0
    kept_count: int = 0
    processed_count: int = 0
    first_token_seconds: float | None = None
    prompt: PhaseFacts = PhaseFacts()
    seed: int = 0
    draft_count: int = 0
    accepted_count: int = 0


class Cancellation:
    """Cancels a request without an exception; a signal's handler may, at any moment."""

    def __init__(self) -> None:
        self.is_cancelled = False
        self._socket: socket.socket | None = None

    def cancel(self) -> None:
        """Cancel the request: its connection with the server ends."""
        self.is_cancelled = True
        if self._socket is not None:
            with contextlib.suppress(OSError):  # the connection has ended by itself
                self._socket.shutdown(socket.SHUT_RDWR)

    def attach(self, connection: socket.socket) -> None:
        """Set the connection of the request."""
        self._socket = connection
        if self.is_cancelled:
            self.cancel()


class Answer(Closing):
    """A text piece by piece, for one iteration. A context manager, which cancels the text.

    `response` is None if the request was cancelled before it was answered. It asked for `count`
    tokens at `began` (`time.monotonic`) with `seed`. Thoughts come between `<think>` and
    `</think>`.

    While iterating, raises RequestError or MachineError with the server's own words, and if the
    connection ends, the error that `lost` returns, None after a cancellation.
    """

    def __init__(
        self,
        response: HTTPResponse | None,
        close: Callable[[], None],
        lost: Callable[[], MoepackError | None],
        count: int | None,
        seed: int,
        began: float,
    ) -> None:
        self._response, self._close, self._lost = response, close, lost
        self._count, self._began = count, began
        self._is_done = False
        self.facts = AnswerFacts(seed=seed)
        """The text and its figures so far."""
        self.on_event: Callable[[AnswerFacts], None] = lambda facts: None
        """Called with the facts so far, whenever the server has sent something."""

    def close(self) -> None:
        """Cancel the text: the server stops computing it."""
        if self._response is not None:
            self._response.close()
        self._close()

    @property
    def text(self) -> str:
        """The text so far, without thoughts."""
        return self.facts.text

    def __iter__(self) -> Iterator[str]:
        reason = ""
        for event in self._events():
            thought, text, ended = _read_event(event)
            reason = ended or reason
            before, facts = self.facts, _with_timings(self.facts, event)
            if facts.token_count and facts.first_token_seconds is None:
                facts = replace(facts, first_token_seconds=time.monotonic() - self._began)
            facts = replace(facts, text=facts.text + text, thoughts=facts.thoughts + thought)
            self.facts = facts
            self.on_event(facts)
            begins = _THOUGHTS_BEGIN if thought and not before.thoughts else ""
            ends = _THOUGHTS_END if text and not before.text and facts.thoughts else ""
            if piece := begins + thought + ends + text:
                yield piece
        if self.facts.thoughts and not self.facts.text:
            yield _THOUGHTS_END
        if self._is_done:
            end: End = "stop"
            if reason in ("length", "limit"):
                end = "length" if self.facts.token_count == self._count else "context"
            self.facts = replace(self.facts, end=end)

    def _events(self) -> Iterator[_Fields]:
        try:
            while self._response and (line := self._response.readline(_MAX_LINE_LENGTH)):
                name, _, value = line.rstrip(b"\r\n").partition(b": ")
                if name == b"error" or value.startswith(b'{"error"'):
                    raise _error_from(500, value)
                self._is_done = self._is_done or value == b"[DONE]"
                if name == b"data" and value != b"[DONE]":
                    event = json.loads(value)
                    self._is_done = self._is_done or bool(event.get("stop"))
                    yield event
        except (OSError, HTTPException, ValueError):
            self._is_done = False
        if not self._is_done and (error := self._lost()) is not None:
            raise error


class ServerClient:
    """Talks to the server at `url`, with its API key.

    `problem` returns why the server is gone; `on_request` is called before each request. All
    requests raise RequestError if the server refuses, and MachineError if it fails or is gone.
    """

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        problem: Callable[[], str | None] = lambda: None,
        on_request: Callable[[], None] = lambda: None,
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme != "http" or parts.hostname is None:
            raise RequestError("not the address of a server", expected="http://…", found=url)
        self.url = url
        self._host, self._port, self._path = parts.hostname, parts.port or 80, parts.path
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._problem, self._on_request = problem, on_request

    def request(self, path: str, fields: _Fields | None = None) -> Any:
        """Return the server's answer to a request, from JSON: a GET, or with `fields` a POST."""
        with contextlib.closing(HTTPConnection(self._host, self._port)) as connection:
            try:
                return json.loads(self._send(connection, path, fields).read())
            except (OSError, HTTPException, ValueError):
                raise self._lost() from None

    def tokenize(self, text: str, *, special: bool = False) -> list[int]:
        """Return the tokens of a text; `special` adds the tokens that begin a prompt."""
        fields = {"content": text, "add_special": special}
        return list(self.request("/tokenize", fields)["tokens"])

    def detokenize(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens."""
        return str(self.request("/detokenize", {"tokens": list(tokens)})["content"])

    def complete(
        self,
        prompt: str | Sequence[int],
        *,
        count: int | None = None,
        sampling: Sampling = Sampling(),
        stops: Sequence[str] = (),
        more: Mapping[str, Any] = {},
        cancellation: Cancellation | None = None,
    ) -> Answer:
        """Continue a text or its tokens, up to `count` tokens and up to the first of `stops`.

        `more` are other fields of the request, in the server's own words: `json_schema`.
        `cancellation` may end the answer before its end.
        """
        if not prompt:
            raise RequestError("the prompt is empty")
        fields = {**more, "prompt": prompt, **_options(count, sampling, stops)}
        return self._answer("/completion", fields, count, cancellation)

    def chat(
        self,
        messages: Sequence[Mapping[str, str]],
        *,
        count: int | None = None,
        sampling: Sampling = Sampling(),
        stops: Sequence[str] = (),
        more: Mapping[str, Any] = {},
        cancellation: Cancellation | None = None,
    ) -> Answer:
        """Answer the last of `messages`; the other arguments are those of `complete`."""
        fields = {**more, "messages": messages, **_options(count, sampling, stops)}
        fields["stream_options"] = {"include_usage": True}
        return self._answer("/v1/chat/completions", fields, count, cancellation)

    def _answer(
        self, path: str, fields: _Fields, count: int | None, cancellation: Cancellation | None
    ) -> Answer:
        began = time.monotonic()
        connection = HTTPConnection(self._host, self._port)
        ending = cancellation or Cancellation()

        def lost() -> MoepackError | None:
            return None if ending.is_cancelled else self._lost()

        response: HTTPResponse | None = None
        try:
            connection.connect()
            ending.attach(connection.sock)
            response = self._send(connection, path, fields)
        except (OSError, HTTPException):
            if (error := lost()) is not None:
                raise error from None
        return Answer(response, connection.close, lost, count, int(fields["seed"]), began)

    def _send(self, connection: HTTPConnection, path: str, fields: _Fields | None) -> HTTPResponse:
        """Send a request, whose answer may begin after hours; an error ends the connection."""
        body = None if fields is None else json.dumps(fields).encode()
        method = "GET" if body is None else "POST"
        self._on_request()
        try:
            connection.request(method, f"{self._path}{path}", body, self._headers)
            response = connection.getresponse()
            if response.status != 200:
                raise _error_from(response.status, response.read())
        except BaseException:
            connection.close()
            raise
        return response

    def _lost(self) -> MoepackError:
        # A program that dies loses its connections before its parent can know that it did.
        deadline = time.monotonic() + 1
        while (problem := self._problem()) is None and time.monotonic() < deadline:
            time.sleep(_SECONDS_BETWEEN_TRIES)
        return MachineError(problem or f"the server at {self.url} ended the connection")


def _options(count: int | None, sampling: Sampling, stops: Sequence[str]) -> dict[str, Any]:
    if count is not None and count < 1:
        raise RequestError("no tokens requested", expected="1 or more", found=count)
    sampling.check()
    most = -1 if count is None else count
    return {**sampling._asdict(), **_PROGRESS, "n_predict": most, "stop": list(stops)}


def _read_event(event: _Fields) -> tuple[str, str, str]:
    """Return an event's addition to the thoughts and to the text, and why the text ends."""
    if "choices" not in event:
        return "", event.get("content") or "", event.get("stop_type") or ""
    if not event["choices"]:
        return "", "", ""
    choice = event["choices"][0]
    delta = choice.get("delta") or {}
    thought = delta.get("reasoning_content") or ""
    return thought, delta.get("content") or "", choice.get("finish_reason") or ""


def _with_timings(facts: AnswerFacts, event: _Fields) -> AnswerFacts:
    """Return facts with an event's timings, which have llama.cpp's names."""
    progress, timings = event.get("prompt_progress"), event.get("timings")
    if progress:
        facts = replace(
            facts,
            prompt_count=progress["total"],
            kept_count=progress["cache"],
            processed_count=progress["processed"],
        )
    if timings:
        facts = replace(
            facts,
            step_count=max(0, timings["predicted_n"] - 1),
            seconds=timings["predicted_ms"] / 1000,
            token_count=timings["predicted_n"],
            kept_count=timings["cache_n"],
            prompt_count=max(facts.prompt_count, timings["cache_n"] + timings["prompt_n"]),
            prompt=PhaseFacts(timings["prompt_n"], timings["prompt_ms"] / 1000),
            draft_count=timings.get("draft_n", 0),
            accepted_count=timings.get("draft_n_accepted", 0),
        )
    return facts


def _error_from(status: int, body: bytes) -> MoepackError:
    """Return the error in a server's answer, in its own words."""
    message, kind = body.decode(errors="replace").strip(), ""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        error = json.loads(body)["error"]
        message, kind, status = error["message"], error.get("type", ""), error.get("code", status)
    if kind == "exceed_context_size_error":
        return RequestError(
            "the prompt does not fit into the context",
            expected=f"up to {error['n_ctx']:,} tokens",
            found=f"{error['n_prompt_tokens']:,}",
            hint="give it more with `context`",
        )
    if _TEMPLATE_ERROR in message:  # after several lines of the template's text
        words = message.rpartition(_TEMPLATE_ERROR)[2]
        return RequestError(f"the model's chat template refuses the messages: {words}")
    if 400 <= status < 500 or status == _NOT_IMPLEMENTED:
        return RequestError(f"the server refuses: {message or status}")
    return MachineError(f"the server failed: {message or status}")
