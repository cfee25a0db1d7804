"""The gate before a server: what passes through it whole, and who is sent away."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import NamedTuple

import pytest

from moepack.programs.access import Access
from moepack.programs.gate import Connection, Gate, GateLimits

ACCESS = Access.of_options("localhost", ["127.0.0.1"], has_key=False)
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
ANSWER = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n"


class Behind(NamedTuple):
    """The gate's address, and what came through it: the bytes of each connection."""

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
async def gate(answers_after: bytes) -> AsyncIterator[Behind]:
    """Run a gate before a server that answers once it has read what ends with `answers_after`."""
    came: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = len(came)
        came.append(b"")
        while data := await reader.read(1000):
            came[number] += data
            if came[number].endswith(answers_after):
                writer.write(ANSWER + b"fine")
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


def through(test: Callable[[Behind], Awaitable[None]], answers_after: bytes = b"end") -> None:
    """Run a test with a gate."""

    async def run() -> None:
        async with gate(answers_after) as behind:
            await test(behind)

    asyncio.run(run())


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
def test_a_request_and_its_answer_pass_as_they_are(fields: bytes, sent: bytes, body: bytes) -> None:
    async def test(behind: Behind) -> None:
        head = HEAD + b"Connection: keep-alive\r\nX: a  b\r\n" + fields + b"\r\n\r\n"
        request = head + sent
        assert await behind.ask(request[:70], request[70:], pause=0.01) == ANSWER + b"fine"
        came, _, came_body = behind.came[0].partition(b"\r\n\r\n")
        assert came_body == body
        lines = came.split(b"\r\n")
        assert lines[0] == b"POST /x HTTP/1.1"
        assert set(lines[1:]) == {
            *(b"host: localhost", b"x: a  b", b"connection: close"),
            b"content-length: %d" % len(body),
        }

    through(test)


def test_a_client_that_waits_before_its_body_is_told_to_go_on() -> None:
    async def test(behind: Behind) -> None:
        fields = b"Content-Length: 3\r\nExpect: 100-continue\r\n\r\n"
        answer = await behind.ask(HEAD + fields, b"end", pause=0.02)
        assert answer == b"HTTP/1.1 100 Continue\r\n\r\n" + ANSWER + b"fine"

    through(test)


def test_a_second_request_in_a_connection_does_not_pass() -> None:
    async def test(behind: Behind) -> None:
        second = b"GET /second HTTP/1.1\r\nHost: evil.example\r\n\r\n"
        answer = await behind.ask(HEAD + b"Content-Length: 3\r\n\r\nend" + second)
        assert answer == ANSWER + b"fine"
        assert b"second" not in b"".join(behind.came)

    through(test)


@pytest.mark.parametrize(
    ("pieces", "status"),
    [
        ([b"POST /x HTTP/1.1\r\n"], 408),
        ([b""], 408),
        ([HEAD + b"a: b\r\n" * 1000], 431),
        ([b"x" * 5000], 431),
        ([b"POST /x\r\n\r\n"], 400),
        ([HEAD + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\n"], 400),
        ([HEAD + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n"], 400),
        ([HEAD + b"Content-Length: -3\r\n\r\n"], 400),
        ([HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n"], 400),
        ([b"POST /x HTTP/1.1\r\nHost: evil.example\r\n\r\n"], 403),
        ([HEAD + b"Origin: http://evil.example\r\n\r\n"], 403),
    ],
)
def test_others_are_told_why_and_nothing_passes(pieces: list[bytes], status: int) -> None:
    async def test(behind: Behind) -> None:
        answer = await behind.ask(*pieces)
        assert answer.startswith(b"HTTP/1.1 %d " % status)
        assert b'"message": "' in answer
        assert not behind.came

    through(test)


@pytest.mark.parametrize(
    ("fields", "pieces", "status"),
    [
        (b"Content-Length: 50", [b"1"] * 6, 408),
        (b"Transfer-Encoding: chunked", [b"5\r\n", *[b"1"] * 6], 408),
        (b"Transfer-Encoding: chunked", [b"x" * 5000], 408),
        (b"Transfer-Encoding: chunked", [b"five\r\n"], 400),
        (b"Transfer-Encoding: chunked", [b"-1\r\n"], 400),
        (b"Transfer-Encoding: chunked", [b"1\r\nabc\r\n"], 400),
        (b"Transfer-Encoding: chunked", [b"ffffff\r\n"], 413),
        (b"Content-Length: 400001", [], 413),
    ],
)
def test_a_body_that_does_not_come_or_cannot_be_read_is_not_passed_on(
    fields: bytes, pieces: list[bytes], status: int
) -> None:
    async def test(behind: Behind) -> None:
        answer = await behind.ask(HEAD + fields + b"\r\n\r\n", *pieces, pause=0.015)
        assert answer.startswith(b"HTTP/1.1 %d " % status)
        assert not behind.came

    through(test)


def test_only_so_much_is_held_at_a_time_and_given_back() -> None:
    async def test(behind: Behind) -> None:
        head = HEAD + b"Content-Length: 300000\r\n\r\n"
        first = asyncio.create_task(behind.ask(head + b"x" * 299_000, pause=0.1, ends=True))
        await asyncio.sleep(0.02)
        assert (await behind.ask(head + b"x" * 299_000)).startswith(b"HTTP/1.1 503 ")
        await first
        await asyncio.sleep(0.1)
        answer = await behind.ask(head, b"x" * 299_997 + b"end")
        assert answer == ANSWER + b"fine"

    through(test)


def test_a_client_that_leaves_is_gone_for_the_server_too() -> None:
    async def test(behind: Behind) -> None:
        for _ in range(LIMITS.open_count):
            await behind.ask(HEAD + b"\r\n", pause=0.02, ends=True)
        await asyncio.sleep(0.1)
        answers = await asyncio.gather(
            *(behind.ask(HEAD + b"Content-Length: 3\r\n\r\nend") for _ in range(2))
        )
        assert answers == [ANSWER + b"fine"] * 2

    through(test)


def test_no_more_requests_than_allowed_pass_at_a_time() -> None:
    async def test(behind: Behind) -> None:
        waiting = [
            asyncio.create_task(behind.ask(HEAD + b"\r\n", pause=0.2, ends=True))
            for _ in range(LIMITS.open_count)
        ]
        await asyncio.sleep(0.05)
        assert (await behind.ask(HEAD + b"\r\n")).startswith(b"HTTP/1.1 503 ")
        await asyncio.gather(*waiting)
        await asyncio.sleep(0.1)
        answer = await behind.ask(HEAD + b"Content-Length: 3\r\n\r\nend")
        assert answer == ANSWER + b"fine"

    through(test)
