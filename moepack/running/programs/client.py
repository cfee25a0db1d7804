"""A client of llama.cpp's server: prompts, and texts piece by piece."""

import contextlib
import json
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from http.client import HTTPConnection, HTTPException, HTTPResponse
from typing import Any
from urllib.parse import urlsplit

from moepack.common.errors import MachineError, MoepackError, RequestError
from moepack.running.programs.answer import Answer, error_from
from moepack.running.programs.sampling import Sampling

_SECONDS_BETWEEN_TRIES = 0.03
_PROGRESS = {"stream": True, "timings_per_token": True, "return_progress": True}

Fields = Mapping[str, Any]


class Cancellation:
    """Cancels a request without an exception, even before it begins.

    A signal's handler may call it at any moment.
    """

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


class ServerClient:
    """Talks to the server at `url`, with its API key.

    If a connection fails, `problem` returns why the server is gone. `on_request` is called before
    each request. All requests raise RequestError if the server refuses, and MachineError if it
    fails or is gone.
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

    def request(self, path: str, fields: Fields | None = None) -> Any:
        """Return the server's answer to a request, from JSON: a GET, or with `fields` a POST."""
        connection = HTTPConnection(self._host, self._port)
        with contextlib.closing(connection):
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

        def read_event(event: Fields) -> tuple[str, str, str]:
            return "", event.get("content") or "", event.get("stop_type") or ""

        return self._answer("/completion", fields, read_event, count, cancellation)

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
        return self._answer("/v1/chat/completions", fields, _read_chat, count, cancellation)

    def _answer(
        self,
        path: str,
        fields: Fields,
        read_event: Callable[[Fields], tuple[str, str, str]],
        count: int | None,
        cancellation: Cancellation | None,
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
        seed = int(fields["seed"])
        return Answer(response, connection.close, lost, read_event, count, seed, began)

    def _send(self, connection: HTTPConnection, path: str, fields: Fields | None) -> HTTPResponse:
        """Send a request; a long prompt may take hours until its answer begins.

        Raises the errors of http.client. After any error the connection is closed.
        """
        body = None if fields is None else json.dumps(fields).encode()
        self._on_request()
        try:
            connection.request(
                "GET" if body is None else "POST", f"{self._path}{path}", body, self._headers
            )
            response = connection.getresponse()
            if response.status != 200:
                raise error_from(response.status, response.read())
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


def _read_chat(event: Fields) -> tuple[str, str, str]:
    if not event.get("choices"):
        return "", "", ""
    choice = event["choices"][0]
    delta = choice.get("delta") or {}
    thought = delta.get("reasoning_content") or ""
    return thought, delta.get("content") or "", choice.get("finish_reason") or ""
