"""A client of llama.cpp's server: whether it is ready, prompts, and texts as they come."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from http.client import HTTPConnection, HTTPException, HTTPResponse
from typing import Any
from urllib.parse import urlsplit

from moepack.errors import MachineError, MoepackError, RequestError
from moepack.programs.answer import Answer, error_of
from moepack.programs.cancellation import Cancellation
from moepack.programs.sampling import Sampling

_SECONDS_BETWEEN_TRIES = 0.03
_SECONDS_OF_A_TRY = 5.0
_PROGRESS = {"stream": True, "timings_per_token": True, "return_progress": True}


class ServerClient:
    """Talks to the server at `url`, with the key that it wants.

    `problem` says why the server is gone, None while it is there; it is asked where a connection
    fails. `on_request` is called before each request. All requests raise RequestError for what the
    server refuses, and MachineError where it fails or is gone.
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

    def wait_until_ready(self, seconds: float | None = None) -> None:
        """Wait until the model is loaded. Raises MachineError when the server ends before."""
        deadline = None if seconds is None else time.monotonic() + seconds
        while not self._is_ready():
            if (problem := self._problem()) is not None:
                raise MachineError(problem)
            if deadline is not None and time.monotonic() > deadline:
                raise MachineError(f"the server is not ready after {seconds:g} s")
            time.sleep(_SECONDS_BETWEEN_TRIES)

    def _is_ready(self) -> bool:
        connection = HTTPConnection(self._host, self._port, timeout=_SECONDS_OF_A_TRY)
        with contextlib.closing(connection):
            try:
                connection.request("GET", f"{self._path}/health", headers=self._headers)
                return connection.getresponse().status == 200
            except (OSError, HTTPException):
                return False

    def properties(self) -> dict[str, Any]:
        """Return what the server says of itself and its model (`/props`)."""
        return dict(self._json("GET", "/props", None))

    def slots(self) -> list[dict[str, Any]]:
        """Return what the server says of the texts that it may compute at once (`/slots`)."""
        return list(self._json("GET", "/slots", None))

    def prompt(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Return the text that the model's template makes of messages."""
        return str(self._json("POST", "/apply-template", {"messages": messages})["prompt"])

    def save_slot(self, slot: int, name: str) -> int:
        """Save what a slot has computed to a file in the folder of `--slot-save-path`.

        Returns how many tokens that is. Raises RequestError where the server has no such folder.
        """
        return int(self._act(slot, "save", name)["n_saved"])

    def restore_slot(self, slot: int, name: str) -> int:
        """Have a slot go on with what was saved from the same model; return how many tokens."""
        return int(self._act(slot, "restore", name)["n_restored"])

    def _act(self, slot: int, action: str, name: str) -> Any:
        return self._json("POST", f"/slots/{slot}?action={action}", {"filename": name})

    def tokenize(self, text: str) -> list[int]:
        """Return the tokens of a text, without those that begin and end one."""
        return list(self._json("POST", "/tokenize", {"content": text})["tokens"])

    def detokenize(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens."""
        return str(self._json("POST", "/detokenize", {"tokens": list(tokens)})["content"])

    def complete(
        self,
        prompt: str,
        *,
        count: int | None = None,
        sampling: Sampling = Sampling(),
        stops: Sequence[str] = (),
        more: Mapping[str, Any] = {},
        cancellation: Cancellation | None = None,
    ) -> Answer:
        """Go on with a text, up to `count` tokens and up to the first of `stops`.

        `more` are fields of the request besides, in the server's own words: `json_schema`.
        `cancellation` may end it; then what was not sent yet is not waited for.
        """
        if not prompt:
            raise RequestError("the prompt is empty")
        fields = {**more, "prompt": prompt, **_options(count, sampling, stops)}
        return self._answer("/completion", fields, _read_completion, count, cancellation)

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
        """Answer the last of `messages`; else as `complete`."""
        fields = {**more, "messages": messages, **_options(count, sampling, stops)}
        fields["stream_options"] = {"include_usage": True}
        return self._answer("/v1/chat/completions", fields, _read_chat, count, cancellation)

    def _answer(
        self,
        path: str,
        fields: Mapping[str, Any],
        read_event: Callable[[Mapping[str, Any]], tuple[str, str, str]],
        count: int | None,
        cancellation: Cancellation | None,
    ) -> Answer:
        began = time.monotonic()
        connection = HTTPConnection(self._host, self._port)
        ending = cancellation or Cancellation()

        def lost() -> MoepackError | None:
            return None if ending.is_cancelled else self._lost()

        try:
            connection.connect()
            ending.attach(connection.sock)
            response: HTTPResponse | None = self._send(connection, "POST", path, fields)
        except (OSError, HTTPException):
            if (error := lost()) is not None:
                raise error from None
            response = None
        return Answer(
            response, connection.close, lost, read_event, count, int(fields["seed"]), began
        )

    def _json(self, method: str, path: str, fields: Mapping[str, Any] | None) -> Any:
        connection, response = self._request(method, path, fields)
        with contextlib.closing(connection):
            try:
                return json.loads(response.read())
            except (OSError, HTTPException, ValueError):
                raise self._lost() from None

    def _request(
        self, method: str, path: str, fields: Mapping[str, Any] | None
    ) -> tuple[HTTPConnection, HTTPResponse]:
        """Send a request on a connection of its own."""
        connection = HTTPConnection(self._host, self._port)
        try:
            return connection, self._send(connection, method, path, fields)
        except (OSError, HTTPException):
            raise self._lost() from None

    def _send(
        self,
        connection: HTTPConnection,
        method: str,
        path: str,
        fields: Mapping[str, Any] | None,
    ) -> HTTPResponse:
        """Send a request; a long prompt may take hours until its answer begins.

        Raises what http.client does. Whatever is raised, the connection is closed.
        """
        body = None if fields is None else json.dumps(fields).encode()
        self._on_request()
        try:
            connection.request(method, f"{self._path}{path}", body, self._headers)
            response = connection.getresponse()
            if response.status != 200:
                raise error_of(response.status, response.read())
        except BaseException:
            connection.close()
            raise
        return response

    def _lost(self) -> MoepackError:
        """Return the error for a connection that ended or failed."""
        # A program that dies loses its connections before anybody can be told that it did.
        deadline = time.monotonic() + 1
        while (problem := self._problem()) is None and time.monotonic() < deadline:
            time.sleep(_SECONDS_BETWEEN_TRIES)
        return MachineError(problem or f"the server at {self.url} ended the connection")


def _options(count: int | None, sampling: Sampling, stops: Sequence[str]) -> dict[str, Any]:
    if count is not None and count < 1:
        raise RequestError("no tokens are asked for", expected="1 or more", found=count)
    sampling.check()
    most = -1 if count is None else count
    return {**sampling.fields(), **_PROGRESS, "n_predict": most, "stop": list(stops)}


def _read_completion(event: Mapping[str, Any]) -> tuple[str, str, str]:
    return "", event.get("content") or "", event.get("stop_type") or ""


def _read_chat(event: Mapping[str, Any]) -> tuple[str, str, str]:
    if not event.get("choices"):
        return "", "", ""
    choice = event["choices"][0]
    delta = choice.get("delta") or {}
    thought = delta.get("reasoning_content") or ""
    return thought, delta.get("content") or "", choice.get("finish_reason") or ""
