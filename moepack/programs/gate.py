"""A gate before llama.cpp's server: refuses requests of other sites, and clients that are too slow.

It reads the head of each request, and passes on what may pass. So that no second request comes
through unread, a connection is for one request.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import NamedTuple

from moepack.programs.access import Access, Head, MalformedError, parse_head

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]
_PIECE_LENGTH = 1 << 16
_OF_CONNECTIONS = (b"connection", b"keep-alive", b"proxy-connection", b"upgrade")
_KINDS = {403: "permission_error", 503: "unavailable_error"}


class GateLimits(NamedTuple):
    """What clients may do.

    `head_length` in bytes, `head_seconds` to send it, `body_seconds` to send a body, and a second
    more for each `body_speed` bytes of it; `open_count` requests are passed on at a time.
    """

    head_length: int = 1 << 16
    head_seconds: float = 20.0
    body_seconds: float = 30.0
    body_speed: int = 1 << 16
    open_count: int = 512


class _RefusedError(Exception):
    """A request that is not passed on."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Gate:
    """Answers connections by what `connect` leads to, as `access` and `limits` allow it."""

    def __init__(
        self,
        connect: Callable[[], Awaitable[Connection]],
        access: Access,
        limits: GateLimits,
    ) -> None:
        self._connect = connect
        self._access = access
        self._limits = limits
        self._open_count = 0

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one connection, and close it. The reader's limit has to be `head_length`."""
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                await self._answer(reader, writer)
        finally:
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await self._head(reader)
            if self._open_count >= self._limits.open_count:
                raise _RefusedError(503, "too many requests at once")
            self._open_count += 1
            try:
                await self._pass(head, reader, writer)
            finally:
                self._open_count -= 1
        except _RefusedError as error:
            writer.write(_refusal(error.status, str(error)))
            await writer.drain()

    async def _head(self, reader: asyncio.StreamReader) -> Head:
        try:
            async with asyncio.timeout(self._limits.head_seconds):
                head = parse_head(await reader.readuntil(b"\r\n\r\n"))
        except TimeoutError:
            raise _RefusedError(408, "the request took too long to arrive") from None
        except asyncio.LimitOverrunError:
            raise _RefusedError(431, "the request's header is too long") from None
        except MalformedError as error:
            raise _RefusedError(400, str(error)) from None
        if (problem := self._access.refusal(head)) is not None:
            raise _RefusedError(403, problem)
        return head

    async def _pass(
        self, head: Head, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Pass a request on, and its answer back, until either side is gone."""
        length = _body_length(head)
        try:
            ours, theirs = await self._connect()
        except OSError:
            raise _RefusedError(503, "the server is ending") from None
        tasks = (
            asyncio.ensure_future(self._send(head, length, reader, theirs)),
            asyncio.ensure_future(_copy(ours, writer)),
        )
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            # One side is gone, or the answer is whole: there is nobody to be told of an error.
            await asyncio.gather(*tasks, return_exceptions=True)
            theirs.close()

    async def _send(
        self,
        head: Head,
        length: int | None,
        reader: asyncio.StreamReader,
        theirs: asyncio.StreamWriter,
    ) -> None:
        """Send a request; return when its client is gone, or too slow."""
        fields = [field for field in head.fields if field[0] not in _OF_CONNECTIONS]
        lines = [head.line, *(b": ".join(field) for field in fields), b"Connection: close"]
        theirs.write(b"\r\n".join(lines) + b"\r\n\r\n")
        async with asyncio.timeout(self._limits.body_seconds) as limit:
            if length is None:
                while await self._send_chunk(reader, theirs, limit):
                    pass
            else:
                await self._send_bytes(length, reader, theirs, limit)
        while await reader.read(_PIECE_LENGTH):
            pass

    async def _send_chunk(
        self, reader: asyncio.StreamReader, theirs: asyncio.StreamWriter, limit: asyncio.Timeout
    ) -> int:
        """Send a chunk of a body (RFC 9112, 7.1); return its length, 0 for the last."""
        line = await reader.readuntil(b"\r\n")
        try:
            length = int(line.partition(b";")[0], 16)
        except ValueError:
            raise ConnectionError from None
        theirs.write(line)
        if length:
            await self._send_bytes(length + 2, reader, theirs, limit)
            return length
        while line != b"\r\n":  # the last chunk has fields of its own, and an empty line
            line = await reader.readuntil(b"\r\n")
            theirs.write(line)
        return 0

    async def _send_bytes(
        self,
        length: int,
        reader: asyncio.StreamReader,
        theirs: asyncio.StreamWriter,
        limit: asyncio.Timeout,
    ) -> None:
        limit.reschedule((limit.when() or 0) + length / self._limits.body_speed)
        while length:
            data = await reader.read(min(length, _PIECE_LENGTH))
            if not data:
                raise ConnectionError
            length -= len(data)
            theirs.write(data)
            await theirs.drain()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(_PIECE_LENGTH):
        writer.write(data)
        await writer.drain()


def _body_length(head: Head) -> int | None:
    """Return how long a request's body is; None where it comes in chunks."""
    lengths, encodings = head.values(b"content-length"), head.values(b"transfer-encoding")
    if len(lengths) + len(encodings) > 1:
        raise _RefusedError(400, "the request gives several lengths of its body")
    if encodings:
        if encodings[0].lower() != "chunked":
            raise _RefusedError(400, f"a body in {encodings[0]} cannot be read")
        return None
    if lengths and not (lengths[0].isascii() and lengths[0].isdigit() and len(lengths[0]) < 16):
        raise _RefusedError(400, "the length of the request's body is no number")
    return int(lengths[0]) if lengths else 0


def _refusal(status: int, message: str) -> bytes:
    """Return an answer with an error, as llama.cpp's server writes them."""
    kind = _KINDS.get(status, "invalid_request_error")
    body = json.dumps({"error": {"code": status, "message": message, "type": kind}}).encode()
    head = (
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body
