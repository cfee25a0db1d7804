"""A gate before llama.cpp's server: refuses requests of other sites, and clients that are too slow.

It reads the head of each request, and forwards those that may pass. So that no second request comes
through unread, a connection is for one request.
"""

import asyncio
import contextlib
import json
import re
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import NamedTuple

from moepack.running.programs.access import Access, MalformedError, RequestHead, parse_head

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]
_PIECE_LENGTH = 1 << 16
_OF_CONNECTIONS = (b"connection", b"keep-alive", b"proxy-connection", b"upgrade", b"expect")
_OF_LENGTHS = (b"content-length", b"transfer-encoding")
_CHUNK = re.compile(rb"([0-9a-fA-F]{1,15})[ \t]*(?:;.*)?\r\n")
_KINDS = {403: "permission_error", 503: "unavailable_error"}


class GateLimits(NamedTuple):
    """Limits for clients.

    `head_length` and `body_length` in bytes; `head_seconds` to send the head, `body_seconds` to
    send a body and a second more for each `body_speed` bytes of it. `held_length` bytes of bodies
    are in memory at a time, and `open_count` requests open.
    """

    head_length: int = 1 << 16
    head_seconds: float = 20.0
    body_length: int = 100 << 20
    body_seconds: float = 30.0
    body_speed: int = 1 << 16
    held_length: int = 256 << 20
    open_count: int = 512


class _RefusedError(Exception):
    """A request that is not forwarded."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Gate:
    """Answers connections through those of `connect`, as `access` and `limits` allow."""

    def __init__(
        self,
        connect: Callable[[], Awaitable[Connection]],
        access: Access,
        limits: GateLimits,
    ) -> None:
        self._connect = connect
        self._access = access
        self._limits = limits
        self._open_count = self._held_length = 0

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one connection, and close it. The reader's limit has to be `head_length`."""
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                await self._answer(reader, writer)
        finally:
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        body = bytearray()
        try:
            head = await self._head(reader)
            if head.values(b"expect") == ["100-continue"]:
                writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            await self._read_body(head, reader, body)
            if self._open_count >= self._limits.open_count:
                raise _RefusedError(503, "too many requests at once")
            self._open_count += 1
            try:
                await self._forward(head, body, reader, writer)
            finally:
                self._open_count -= 1
        except _RefusedError as error:
            writer.write(_refusal(error.status, str(error)))
            await writer.drain()
        finally:
            self._held_length -= len(body)

    async def _head(self, reader: asyncio.StreamReader) -> RequestHead:
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

    async def _read_body(
        self, head: RequestHead, reader: asyncio.StreamReader, body: bytearray
    ) -> None:
        """Read a request's whole body into `body`: a slow one takes no thread of the server's."""
        length = _body_length(head)
        try:
            async with asyncio.timeout(self._limits.body_seconds) as limit:
                if length is None:
                    await self._read_chunks(reader, body, limit)
                else:
                    await self._read_bytes(length, reader, body, limit)
        except (TimeoutError, asyncio.LimitOverrunError):
            raise _RefusedError(408, "the request's body took too long to arrive") from None

    async def _read_chunks(
        self, reader: asyncio.StreamReader, body: bytearray, limit: asyncio.Timeout
    ) -> None:
        """Read a body that comes in chunks (RFC 9112, 7.1)."""
        length = None
        while length != 0:
            line = await reader.readuntil(b"\r\n")
            match = _CHUNK.match(line)
            if match is None:
                raise _RefusedError(400, "a chunk of the request's body is malformed")
            length = int(match[1], 16)
            await self._read_bytes(length, reader, body, limit)
            if length and await reader.readexactly(2) != b"\r\n":
                raise _RefusedError(400, "a chunk of the request's body is malformed")
        while await reader.readuntil(b"\r\n") != b"\r\n":  # fields after the last chunk
            pass

    async def _read_bytes(
        self,
        length: int,
        reader: asyncio.StreamReader,
        body: bytearray,
        limit: asyncio.Timeout,
    ) -> None:
        if len(body) + length > self._limits.body_length:
            most = self._limits.body_length
            raise _RefusedError(413, f"the request is larger than {most:,} bytes")
        limit.reschedule((limit.when() or 0) + length / self._limits.body_speed)
        while length:
            data = await reader.read(min(length, _PIECE_LENGTH))
            if not data:
                raise ConnectionError
            if self._held_length + len(data) > self._limits.held_length:
                raise _RefusedError(503, "too many large requests at once")
            self._held_length += len(data)
            length -= len(data)
            body += data

    async def _forward(
        self,
        head: RequestHead,
        body: bytearray,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        """Forward a request, and its answer, until either side is gone."""
        try:
            ours, theirs = await self._connect()
        except OSError:
            raise _RefusedError(503, "the server is ending") from None
        theirs.write(_forwarded_head(head, len(body)) + body)
        tasks = (
            asyncio.ensure_future(_copy(ours, writer)),
            asyncio.ensure_future(_wait_for_end(reader)),
        )
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            # One side is gone, or the answer is whole: there is nobody to be told of an error.
            await asyncio.gather(*tasks, return_exceptions=True)
            theirs.close()


def _forwarded_head(head: RequestHead, length: int) -> bytes:
    """Return the head for the server: with the body's length, for one request."""
    dropped = (*_OF_CONNECTIONS, *_OF_LENGTHS)
    fields = [b": ".join(field) for field in head.fields if field[0] not in dropped]
    ours = (b"content-length: %d" % length, b"connection: close")
    return b"\r\n".join((head.line, *fields, *ours, b"", b""))


async def _wait_for_end(reader: asyncio.StreamReader) -> None:
    while await reader.read(_PIECE_LENGTH):
        pass


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(_PIECE_LENGTH):
        writer.write(data)
        await writer.drain()


def _body_length(head: RequestHead) -> int | None:
    """Return the bytes of a request's body; None if it comes in chunks."""
    lengths, encodings = head.values(b"content-length"), head.values(b"transfer-encoding")
    if len(lengths) + len(encodings) > 1:
        raise _RefusedError(400, "the request gives several lengths of its body")
    if encodings:
        if encodings[0].lower() != "chunked":
            raise _RefusedError(400, f"a body in {encodings[0]} cannot be read")
        return None
    if lengths and not (lengths[0].isascii() and lengths[0].isdigit() and len(lengths[0]) < 16):
        raise _RefusedError(400, "the length of the request's body is not a number")
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
