"""The gate before a server: requests that pass it whole, and clients that are sent away."""

import asyncio
import contextlib
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NamedTuple

import pytest

from moepack.running.programs.access import Access
from moepack.running.programs.gate import Connection, Gate, GateLimits

ACCESS = Access.from_options("localhost", ["127.0.0.1"], has_key=False)
LIMITS = GateLimits(
    head_length=2048,
    head_seconds=0.2,
    body_length=400_000,
    body_seconds=0.2,
    body_speed=1 << 20,
    held_length=500_000,
    open_count=2,
)
HEAD = b"POST /x HTTP/1.1\r\nHost: localhost\r\n"
REQUEST = HEAD + b"Content-Length: 3\r\n\r\nend"
ANSWER = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nfine"


class Behind(NamedTuple):
    """The gate's address, and the bytes of each connection that came through it."""

    port: int
    came: list[bytes]

    async def ask(self, *pieces: bytes, pause: float = 0.0, ends: bool = False) -> bytes:
        """Send pieces; return the answer. With `ends`, the connection is left after the last."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(pause)
            return b"" if ends else await asyncio.wait_for(reader.read(), 5)
        finally:
            writer.close()


@contextlib.asynccontextmanager
async def gate() -> AsyncIterator[Behind]:
    """Run a gate before a server that answers requests which end with `end`."""
    came: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = len(came)
        came.append(b"")
        while data := await reader.read(1000):
            came[number] += data
            if came[number].endswith(b"end"):
                writer.write(ANSWER)
                break
        writer.close()

    inner = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = inner.sockets[0].getsockname()[1]

    async def connect() -> Connection:
        return await asyncio.open_connection("127.0.0.1", port)

    outer = await asyncio.start_server(
        Gate(connect, ACCESS, LIMITS).answer, "127.0.0.1", 0, limit=LIMITS.head_length
    )
    async with inner, outer:
        yield Behind(outer.sockets[0].getsockname()[1], came)


def through_a_gate(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run a test with a gate."""

    def run(**arguments: Any) -> None:
        async def with_gate() -> None:
            async with gate() as behind:
                await test(behind, **arguments)

        asyncio.run(with_gate())

    _, *others = inspect.signature(test).parameters.values()
    run.__signature__ = inspect.Signature(others)  # type: ignore[attr-defined]
    return run


@pytest.mark.parametrize(
    ("fields", "sent", "body"),
    [
        (b"Content-Length: 5", b"a\0end", b"a\0end"),
        (b"Content-Length: 300003", b"x" * 300_000 + b"end", b"x" * 300_000 + b"end"),
        (
            b"Transfer-Encoding: Chunked",
            b"4\r\nabcd\r\n3;q=1\r\nend\r\n0\r\nA: b\r\n\r\n",
            b"abcdend",
        ),
    ],
)
@through_a_gate
async def test_a_request_and_its_answer_pass_as_they_are(
    behind: Behind, fields: bytes, sent: bytes, body: bytes
) -> None:
    request = HEAD + b"Connection: keep-alive\r\nX: a  b\r\n" + fields + b"\r\n\r\n" + sent
    assert await behind.ask(request[:70], request[70:], pause=0.01) == ANSWER
    came, _, came_body = behind.came[0].partition(b"\r\n\r\n")
    assert came_body == body
    first, *lines = came.split(b"\r\n")
    assert first == b"POST /x HTTP/1.1"
    length = b"content-length: %d" % len(body)
    assert set(lines) == {b"host: localhost", b"x: a  b", b"connection: close", length}


@through_a_gate
async def test_a_client_that_waits_before_its_body_is_told_to_go_on(behind: Behind) -> None:
    fields = b"Content-Length: 3\r\nExpect: 100-continue\r\n\r\n"
    answer = await behind.ask(HEAD + fields, b"end", pause=0.02)
    assert answer == b"HTTP/1.1 100 Continue\r\n\r\n" + ANSWER


@through_a_gate
async def test_a_second_request_in_a_connection_does_not_pass(behind: Behind) -> None:
    second = b"GET /second HTTP/1.1\r\nHost: evil.example\r\n\r\n"
    assert await behind.ask(REQUEST + second) == ANSWER
    assert b"second" not in b"".join(behind.came)


CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("pieces", "status"),
    [
        ([b"POST /x HTTP/1.1\r\n"], 408),
        ([HEAD + b"a: b\r\n" * 1000], 431),
        ([b"POST /x\r\n\r\n"], 400),
        ([HEAD + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\n"], 400),
        ([HEAD + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n"], 400),
        ([HEAD + b"Content-Length: -3\r\n\r\n"], 400),
        ([HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n"], 400),
        ([b"POST /x HTTP/1.1\r\nHost: evil.example\r\n\r\n"], 403),
        ([HEAD + b"Origin: http://evil.example\r\n\r\n"], 403),
        ([HEAD + b"Content-Length: 50\r\n\r\n", *[b"1"] * 6], 408),
        ([CHUNKED, b"5\r\n", *[b"1"] * 6], 408),
        ([CHUNKED, b"x" * 5000], 408),
        ([CHUNKED, b"five\r\n"], 400),
        ([CHUNKED, b"-1\r\n"], 400),
        ([CHUNKED, b"1\r\nabc\r\n"], 400),
        ([CHUNKED, b"ffffff\r\n"], 413),
        ([HEAD + b"Content-Length: 400001\r\n\r\n"], 413),
    ],
)
@through_a_gate
async def test_others_are_told_why_and_nothing_passes(
    behind: Behind, pieces: list[bytes], status: int
) -> None:
    answer = await behind.ask(*pieces, pause=0.015)
    assert answer.startswith(b"HTTP/1.1 %d " % status)
    assert b'"message": "' in answer
    assert not behind.came


@through_a_gate
async def test_only_so_much_is_in_memory_at_a_time_and_freed(behind: Behind) -> None:
    head = HEAD + b"Content-Length: 300000\r\n\r\n"
    first = asyncio.create_task(behind.ask(head + b"x" * 299_000, pause=0.1, ends=True))
    await asyncio.sleep(0.02)
    assert (await behind.ask(head + b"x" * 299_000)).startswith(b"HTTP/1.1 503 ")
    await first
    await asyncio.sleep(0.1)
    assert await behind.ask(head, b"x" * 299_997 + b"end") == ANSWER


@through_a_gate
async def test_no_more_requests_than_allowed_pass_at_a_time(behind: Behind) -> None:
    """A client that leaves is gone for the server too."""
    waiting = [
        asyncio.create_task(behind.ask(HEAD + b"\r\n", pause=0.2, ends=True))
        for _ in range(LIMITS.open_count)
    ]
    await asyncio.sleep(0.05)
    assert (await behind.ask(HEAD + b"\r\n")).startswith(b"HTTP/1.1 503 ")
    await asyncio.gather(*waiting)
    await asyncio.sleep(0.1)
    answers = await asyncio.gather(*(behind.ask(REQUEST) for _ in range(LIMITS.open_count)))
    assert answers == [ANSWER] * LIMITS.open_count
