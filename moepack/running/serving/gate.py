"""A gate before llama.cpp's server: refuses requests of other sites, and clients that are too slow.

h11 reads and writes HTTP on both sides, so that the server gets each request as it was checked
here. What is decided here is who may pass, how much of it, and how many at a time; which texts are
computed at once, `admission` decides.
"""

import asyncio
import contextlib
import json
import re
import socket
import ssl
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager
from functools import cached_property
from http import HTTPStatus
from typing import Any, NamedTuple
from urllib.parse import unquote_to_bytes

import h11

from moepack.running.serving.access import Access
from moepack.running.serving.exchange import Exchange, PromptProgress
from moepack.running.serving.peer import PING, Connection, Fields, Peer, RefusedError, send_request
from moepack.running.serving.watch import CONTENT_TYPE, Watch

Turn = Callable[[bytes, bytes], AbstractAsyncContextManager[object]]
"""Has a request for a text wait, by its path and its body."""
_QUEUE_LENGTH = 1024
_HOP_FIELDS = {b"connection", b"keep-alive", b"transfer-encoding"}
_REQUEST_FIELDS = _HOP_FIELDS | {b"upgrade", b"expect", b"content-length", b"origin"}
"""Fields that are not forwarded: those of one connection, and those that the gate answers."""
_MESSAGES = b"/messages"
_TEXT_PATHS = (b"/completion", b"/completions", _MESSAGES, b"/responses", b"/infill")
"""The ends of llama.cpp's paths whose answers are texts."""
_METRICS_PATH = b"/metrics"
_METRICS_STATUSES = (HTTPStatus.OK, HTTPStatus.NOT_IMPLEMENTED)
"""llama.cpp's for a client that may read metrics: with `--metrics`, and without."""
_STREAM = (b"content-type", b"text/event-stream")
_SECONDS_WITHOUT_DESCRIPTORS = 0.2


class GateLimits(NamedTuple):
    """Limits for clients.

    A head may have `head_length` bytes and take `head_seconds`; a body may have `body_length` bytes
    and take `body_seconds`, and another second for each `body_speed` bytes; as long, a client may
    leave its answer unread when the buffers of the system are full. At a time memory has
    `held_length` bytes of bodies, and there are `connection_count` clients with `open_count`
    requests. A stream that waits for its turn gets a comment every `ping_seconds`; None for never.
    A client that asked for progress is told it every `progress_seconds`.
    """

    head_length: int = 1 << 16
    head_seconds: float = 20.0
    body_length: int = 1 << 20
    body_seconds: float = 30.0
    body_speed: int = 1 << 16
    held_length: int = 64 << 20
    connection_count: int = 1024
    open_count: int = 512
    ping_seconds: float | None = 10.0
    progress_seconds: float = 1.0


class _Request:
    """A client's request, with its body as far as that is read."""

    def __init__(self, head: h11.Request, client: Peer, exchange: Exchange) -> None:
        self.head, self.client, self.exchange = head, client, exchange
        self.body = bytearray()
        # The path as the server will see it, without query and fragment: it decodes escapes.
        self.path = unquote_to_bytes(re.split(b"[?#]", head.target, maxsplit=1)[0])
        self.is_post = head.method == b"POST"
        self.is_for_messages = _MESSAGES in self.path
        self.is_for_text = self.is_post and self.path.endswith(_TEXT_PATHS)
        self.is_for_metrics = head.method == b"GET" and self.path.endswith(_METRICS_PATH)

    @cached_property
    def fields(self) -> Mapping[str, Any]:
        """The fields of its JSON, none if it is something else."""
        try:
            fields = json.loads(self.body)
        except (ValueError, RecursionError):
            return {}
        return fields if isinstance(fields, dict) else {}

    @property
    def answer_fields(self) -> Fields:
        """The fields with which the page that sent it may read the answer."""
        origin = dict(self.head.headers).get(b"origin")
        if origin is None:
            return []
        return [(b"access-control-allow-origin", origin), (b"vary", b"Origin")]


class Gate:
    """Answers clients through connections of `connect`, as `access` and `limits` allow.

    `watch` learns of each request and its end. `counted` is called with the number of requests that
    the server has when it changes. Requests for texts wait until `turn` is entered, and leave it
    when they are answered. `routed_count` returns the tokens of prompts that were computed so far,
    layer by layer; None if unknown. If it `hides_slots`, clients may not save and restore texts:
    the server's folder is not theirs.
    """

    def __init__(
        self,
        connect: Callable[[], Awaitable[Connection]],
        access: Access,
        limits: GateLimits,
        watch: Watch,
        counted: Callable[[int], object] = lambda count: None,
        turn: Turn = lambda path, body: contextlib.nullcontext(),
        routed_count: Callable[[], int | None] = lambda: None,
        *,
        hides_slots: bool = False,
    ) -> None:
        self._hides_slots = hides_slots
        self._counted, self._turn, self._routed_count = counted, turn, routed_count
        self._connect, self._access = connect, access
        self._limits, self._watch = limits, watch
        self._places = asyncio.Semaphore(limits.connection_count)
        self._open_count = self._forwarded_count = self._held_length = 0
        self._tasks: set[asyncio.Task[None]] = set()

    def listen(self, listener: socket.socket, tls: ssl.SSLContext | None = None) -> None:
        """Begin to answer all who connect to a bound socket; without a place they wait there."""
        listener.setblocking(False)
        listener.listen(_QUEUE_LENGTH)
        self._start(self._accept(listener, tls))

    def _start(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self, listener: socket.socket, tls: ssl.SSLContext | None) -> None:
        while True:
            await self._places.acquire()
            try:
                connection, _ = await asyncio.get_running_loop().sock_accept(listener)
            except OSError:  # mostly out of descriptors, until something is closed
                self._places.release()
                await asyncio.sleep(_SECONDS_WITHOUT_DESCRIPTORS)
            else:
                self._start(self._serve(connection, tls))

    async def _serve(self, connection: socket.socket, tls: ssl.SSLContext | None) -> None:
        loop = asyncio.get_running_loop()
        http = h11.Connection(h11.SERVER, self._limits.head_length)
        reader = asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(reader)
        try:
            with connection, contextlib.suppress(OSError):
                async with asyncio.timeout(self._limits.head_seconds):
                    transport, _ = await loop.connect_accepted_socket(
                        lambda: protocol, connection, ssl=tls
                    )
                writer = asyncio.StreamWriter(transport, protocol, reader, loop)
                client = Peer(http, (reader, writer))
                try:
                    while await self._answer(client):
                        http.start_next_cycle()
                finally:
                    await client.leave()
        finally:
            self._places.release()

    async def _answer(self, client: Peer) -> bool:
        """Answer one request; return whether another may follow."""
        with self._watch.exchange() as exchange:
            try:
                head = await self._read_head(client, exchange)
                if head is None:
                    return False
                await self._answer_request(_Request(head, client, exchange))
            except h11.RemoteProtocolError as error:
                exchange.refuse(error, client.reader.at_eof())
                if client.http.our_state in (h11.IDLE, h11.SEND_RESPONSE):
                    client.refuse(error)
                return False
        return client.http.our_state is client.http.their_state is h11.DONE

    async def _read_head(self, client: Peer, exchange: Exchange) -> h11.Request | None:
        try:
            async with asyncio.timeout(self._limits.head_seconds):
                event = await client.next_event()
        except TimeoutError:
            if not client.http.trailing_data[0]:
                return None
            raise RefusedError("the request took too long to arrive", 408) from None
        if not isinstance(event, h11.Request):
            return None
        exchange.begin(event.method, event.target)
        return event

    async def _answer_request(self, request: _Request) -> None:
        self._check(request)
        try:
            await self._read_body(request)
            if request.is_for_messages and not isinstance(request.fields.get("messages", []), list):
                # llama.cpp takes them for none in Anthropic's API.
                raise RefusedError("Expected 'messages' to be an array", 400)
            if self._open_count >= self._limits.open_count:
                raise RefusedError("too many requests at once", 503)
            self._open_count += 1
            try:
                await self._forward(request)
            finally:
                self._open_count -= 1
        finally:
            self._held_length -= len(request.body)

    def _check(self, request: _Request) -> None:
        """Refuse requests by their heads."""
        if b"%u" in request.head.target.partition(b"?")[0]:
            raise RefusedError("the path has %u, which only llama.cpp decodes", 400)
        if (problem := self._access.refusal(request.head.headers)) is not None:
            raise RefusedError(problem, 403)
        if self._hides_slots and request.is_post and b"/slots/" in request.path:
            message = "start the server with --slot-save-path to save texts yourself"
            raise RefusedError(message, 501)

    async def _read_body(self, request: _Request) -> None:
        """Read a request's whole body: a slow one takes no thread of the server's."""
        most, body = self._limits.body_length, request.body
        length = int(dict(request.head.headers).get(b"content-length", 0))
        try:
            async with asyncio.timeout(self._limits.body_seconds) as limit:
                while max(length, len(body)) <= most:
                    event = await request.client.next_event()
                    if not isinstance(event, h11.Data):
                        return
                    if self._held_length + len(event.data) > self._limits.held_length:
                        raise RefusedError("too many large requests at once", 503)
                    self._held_length += len(event.data)
                    body += event.data
                    seconds = len(event.data) / self._limits.body_speed
                    limit.reschedule((limit.when() or 0) + seconds)
        except TimeoutError:
            raise RefusedError("the request's body took too long to arrive", 408) from None
        message = f"the request has more than {most:,} bytes; a longer context (-c) allows more"
        message += ", and a projector (--mmproj) images"
        raise RefusedError(message, 413)

    async def _forward(self, request: _Request) -> None:
        """Answer a request by the server, unless the client leaves before."""
        client, exchange = request.client, request.exchange
        answering = asyncio.create_task(self._answer_in_turn(request))
        watching = asyncio.create_task(client.wait_until_gone(self._limits.head_length))
        try:
            await asyncio.wait((answering, watching), return_when=asyncio.FIRST_COMPLETED)
            exchange.has_left = not answering.done()
            if answering.done():
                await answering
        except TimeoutError:
            raise RefusedError("the client does not read its answer", 503) from None
        except (OSError, h11.RemoteProtocolError):
            exchange.has_left = client.writer.is_closing()
            raise RefusedError("the server has ended the connection", 503) from None
        finally:
            for task in (answering, watching):
                task.cancel()
            await asyncio.gather(answering, watching, return_exceptions=True)

    async def _answer_in_turn(self, request: _Request) -> None:
        head, body = request.head, bytes(request.body)
        async with contextlib.AsyncExitStack() as stack:
            if request.is_for_text:
                request.exchange.wait()
                await self._wait_for_turn(stack, request, body)
            request.exchange.ask(self._watch.cache())
            self._count_forwarded(1)
            stack.callback(self._count_forwarded, -1)
            fields = [field for field in head.headers if field[0] not in _REQUEST_FIELDS]
            connection = await self._connect()
            server = send_request(connection, head.method, head.target, fields, body)
            stack.callback(server.writer.close)
            while not isinstance(answer := await server.next_event(), h11.Response):
                pass
            request.exchange.status = answer.status_code
            if request.is_for_metrics and answer.status_code in _METRICS_STATUSES:
                await self._pass_metrics(request, answer, server)
            else:
                await self._pass_answer(request, answer, server)

    async def _wait_for_turn(
        self, stack: contextlib.AsyncExitStack, request: _Request, body: bytes
    ) -> None:
        """Enter a turn; a client that waits for a stream gets its head, and comments."""
        client, turn = request.client, self._turn(request.path, body)
        entering = asyncio.create_task(stack.enter_async_context(turn))
        try:
            while not (await asyncio.wait([entering], timeout=self._limits.ping_seconds))[0]:
                is_stream = request.fields.get("stream") is True
                if client.http.our_state is h11.SEND_RESPONSE and is_stream:
                    fields = [_STREAM, *request.answer_fields]
                    client.send(h11.Response(status_code=200, headers=fields, reason=b"OK"))
                if client.http.our_state is h11.SEND_BODY:
                    client.send(h11.Data(data=PING))
            await entering
        finally:
            entering.cancel()
            await asyncio.gather(entering, return_exceptions=True)

    async def _pass_metrics(self, request: _Request, answer: h11.Response, server: Peer) -> None:
        """Forward the server's metrics, if it has any, with ours: it has checked the key."""
        body = bytearray()
        while isinstance(data := await server.next_event(), h11.Data):
            body += data.data
        if answer.status_code == HTTPStatus.NOT_IMPLEMENTED:
            body.clear()
        request.exchange.status = HTTPStatus.OK
        body += self._watch.metrics().encode()
        fields = [(b"content-type", CONTENT_TYPE), *request.answer_fields]
        request.client.send_whole(HTTPStatus.OK, fields, bytes(body))
        await request.client.writer.drain()

    async def _pass_answer(self, request: _Request, answer: h11.Response, server: Peer) -> None:
        """Forward an answer, piece by piece."""
        client, status = request.client, answer.status_code
        request.exchange.is_stream = _STREAM in answer.headers
        is_late_error = client.http.our_state is h11.SEND_BODY and status != HTTPStatus.OK
        if client.http.our_state is h11.SEND_RESPONSE:
            fields = [field for field in answer.headers if field[0] not in _HOP_FIELDS]
            fields += request.answer_fields
            if self._places.locked():
                fields.append((b"connection", b"close"))
            client.send(h11.Response(status_code=status, headers=fields, reason=answer.reason))
        if is_late_error:
            client.send(h11.Data(data=b"event: error\ndata: "))
        progress = PromptProgress(self._count_routed)
        telling = asyncio.create_task(self._tell(progress, client))
        try:
            while isinstance(data := await server.next_event(), h11.Data):
                client.send(data)
                progress.note(data.data)
                request.exchange.passing.note(data.data)
                async with asyncio.timeout(self._limits.body_seconds):  # others wait for this turn
                    await client.writer.drain()
        finally:
            telling.cancel()
        if is_late_error:
            client.send(h11.Data(data=b"\n\n"))
        client.send(h11.EndOfMessage())
        await client.writer.drain()

    def _count_forwarded(self, step: int) -> None:
        self._forwarded_count += step
        self._counted(self._forwarded_count)

    def _count_routed(self) -> int | None:
        return self._routed_count() if self._forwarded_count == 1 else None

    async def _tell(self, progress: PromptProgress, client: Peer) -> None:
        """Tell a client the progress of its prompt, between the events of the server."""
        while True:
            await asyncio.sleep(self._limits.progress_seconds)
            if (event := progress.next_event()) is not None:
                client.send(h11.Data(data=event))
