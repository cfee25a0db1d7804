"""The server: addresses, limits, keys, and what becomes of errors."""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, NamedTuple, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from moepack.errors import MoepackError, RequestError
from moepack.running.generation import Generation
from moepack.running.model import Model
from moepack.serving.answer import Answer, error_body
from moepack.serving.metrics import CONTENT_TYPE, Metrics
from moepack.serving.request import TextRequest, chat_request, completion_request
from moepack.serving.turns import BusyError, Turns

_INVALID, _FAILED = "invalid_request_error", "server_error"
_Result = TypeVar("_Result")

Pieces = AsyncGenerator[str | Generation, None]
"""Of a text, as `Turns` gives them."""


class Limits(NamedTuple):
    """What clients may do: `body_length` in bytes, `body_seconds` to send it, clients `waiting`."""

    body_length: int = 4 << 20
    body_seconds: float = 30.0
    poll_seconds: float = 0.25
    waiting: int = 64


class _GoneError(Exception):
    """The client has gone away."""


class Server:
    """An application (ASGI) that answers for `model`, which it calls `name`.

    Where `api_key` is given, only those who bear it are answered, but for `/health`.
    """

    def __init__(
        self, model: Model, name: str, *, api_key: str | None = None, limits: Limits = Limits()
    ) -> None:
        self._model = model
        self._name = name
        self._api_key = api_key
        self._limits = limits
        self._metrics = Metrics()
        self._turns = Turns(limits.waiting, self._metrics.add)
        routes = [
            Route("/health", self._health),
            Route("/metrics", self._guarded(self._show_metrics)),
            Route("/v1/models", self._guarded(self._models)),
            Route("/v1/models/{name:path}", self._guarded(self._named_model)),
            Route("/v1/chat/completions", self._guarded(self._chat), methods=["POST"]),
            Route("/v1/completions", self._guarded(self._complete), methods=["POST"]),
        ]
        handlers: Any = {HTTPException: _http_error}
        self.application = Starlette(routes=routes, exception_handlers=handlers)

    def close(self) -> None:
        """Wait for the text that is being made."""
        self._turns.close()

    def _guarded(
        self, answer: Callable[[Request], Coroutine[Any, Any, Response]]
    ) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Ask for the key, and turn what goes wrong into answers."""

        async def guarded(request: Request) -> Response:
            if not self._is_allowed(request):
                headers = {"WWW-Authenticate": "Bearer"}
                body = error_body("the API key is missing or wrong", "authentication_error")
                return JSONResponse(body, 401, headers)
            try:
                return await answer(request)
            except RequestError as error:
                return _refusal(400, str(error), _INVALID, error.place)
            except BusyError:
                body = error_body("too many requests wait", "overloaded_error")
                return JSONResponse(body, 503, {"Retry-After": "5"})
            except MoepackError as error:
                self._metrics.add_failure()
                return _refusal(500, str(error), _FAILED)
            except (_GoneError, ClientDisconnect):
                return Response(status_code=499)  # nobody reads it

        return guarded

    def _is_allowed(self, request: Request) -> bool:
        if self._api_key is None:
            return True
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        is_right = hmac.compare_digest(given.strip().encode(), self._api_key.encode())
        return is_right and scheme.lower() == "bearer"

    async def _health(self, _: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def _show_metrics(self, _: Request) -> Response:
        text = self._metrics.text(self._model.memory, self._turns.waiting_count)
        return PlainTextResponse(text, media_type=CONTENT_TYPE)

    async def _models(self, _: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._listed()]})

    async def _named_model(self, request: Request) -> Response:
        if request.path_params["name"] != self._name:
            return _refusal(404, "there is no such model here", _INVALID)
        return JSONResponse(self._listed())

    def _listed(self) -> dict[str, Any]:
        return {"id": self._name, "object": "model", "created": 0, "owned_by": "moepack"}

    async def _chat(self, request: Request) -> Response:
        asked = chat_request(await self._body(request))
        return await self._answer(request, asked, Answer(self._name, is_chat=True))

    async def _complete(self, request: Request) -> Response:
        asked = completion_request(await self._body(request))
        return await self._answer(request, asked, Answer(self._name, is_chat=False))

    async def _body(self, request: Request) -> Any:
        """Read a request's body. Raises RequestError for what is no JSON."""
        try:
            async with asyncio.timeout(self._limits.body_seconds):
                data = await self._data(request)
        except TimeoutError:
            raise HTTPException(408, "the request took too long to arrive") from None
        try:
            return json.loads(data)
        except (ValueError, RecursionError):
            raise RequestError("the body is not JSON") from None

    async def _data(self, request: Request) -> bytes:
        data = bytearray()
        async for piece in request.stream():
            data += piece
            if len(data) > self._limits.body_length:
                most = self._limits.body_length
                raise HTTPException(413, f"the request is larger than {most:,} bytes")
        return bytes(data)

    async def _answer(self, request: Request, asked: TextRequest, answer: Answer) -> Response:
        pieces = self._turns.pieces(lambda: self._begin(asked))
        if not asked.streams:
            generation = await self._while_there(request, _last(pieces))
            return JSONResponse(answer.whole(generation.facts))
        # What goes wrong before the first piece still has a status of its own.
        first = await self._while_there(request, anext(pieces))
        events = self._events(first, pieces, asked, answer)
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        return StreamingResponse(events, media_type="text/event-stream", headers=headers)

    def _begin(self, asked: TextRequest) -> Generation:
        options: Any = {
            "count": asked.token_count,
            "sampling": asked.sampling,
            "stops": asked.stops,
        }
        if asked.messages:
            return self._model.chat(asked.messages, **options)
        return self._model.generate(asked.prompt, **options)

    async def _while_there(self, request: Request, work: Awaitable[_Result]) -> _Result:
        """Wait for `work` as long as the client is there."""
        task = asyncio.ensure_future(work)
        try:
            while not task.done():
                await asyncio.wait([task], timeout=self._limits.poll_seconds)
                if not task.done() and await request.is_disconnected():
                    raise _GoneError
            return task.result()
        finally:
            task.cancel()

    async def _events(
        self,
        first: str | Generation,
        pieces: Pieces,
        asked: TextRequest,
        answer: Answer,
    ) -> AsyncIterator[bytes]:
        """Yield a stream's events; an error is the last of them."""
        for body in answer.begin():
            yield _event(body)
        try:
            piece = first
            while isinstance(piece, str):
                yield _event(answer.piece(piece))
                piece = await anext(pieces)
            for body in answer.end(piece.facts, counts_usage=asked.counts_usage):
                yield _event(body)
            yield b"data: [DONE]\n\n"
        except MoepackError as error:
            self._metrics.add_failure()
            yield _event(error_body(str(error), _FAILED))
        finally:
            await pieces.aclose()


async def _last(pieces: Pieces) -> Generation:
    """Wait for the end of a text."""
    async for piece in pieces:
        if isinstance(piece, Generation):
            return piece
    raise AssertionError("a text without an end")


def _event(body: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(body)}\n\n".encode()


def _refusal(status: int, message: str, kind: str, field: str | None = None) -> Response:
    return JSONResponse(error_body(message, kind, field), status)


async def _http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _refusal(error.status_code, str(error.detail), _INVALID)
