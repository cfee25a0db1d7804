"""The gate before a server: requests that pass it whole, and clients and pages that it refuses."""

import asyncio
import contextlib
import inspect
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from moepack.running.serving.access import Access
from moepack.running.serving.admission import Turns
from moepack.running.serving.gate import Gate, GateLimits
from moepack.running.serving.peer import Connection
from moepack.running.serving.server_log import RequestFacts
from moepack.running.serving.watch import Watch
from tests.support.certificates import authority_in
from tests.support.children import PATIENCE

ACCESS = Access("localhost", ["127.0.0.1"], has_key=False)
LIMITS = GateLimits(
    head_length=2048,
    head_seconds=0.2,
    body_length=400_000,
    body_seconds=0.2,
    body_speed=1 << 20,
    held_length=500_000,
    connection_count=7,
    open_count=5,
    ping_seconds=0.1,
)
HEAD = b"POST /x HTTP/1.1\r\nHost: localhost\r\n"
REQUEST = HEAD + b"Content-Length: 3\r\n\r\nend"
WAITING = HEAD + b"Content-Length: 5\r\n\r\nnever"
ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nfine"
WRONG = b'HTTP/1.1 400 Bad Request\r\nContent-Length: 14\r\n\r\n{"error": "x"}'


class Behind(NamedTuple):
    """The gate's port, the bytes of each connection that came through it, and its log.

    `left` has the numbers of the connections that the gate has closed, `counts` those of the
    requests that the server had at a time, `watch` the figures of `log`.
    """

    port: int
    came: list[bytes]
    left: list[int]
    log: list[RequestFacts]
    counts: list[int]
    watch: Watch

    async def ask(self, *pieces: bytes, pause: float = 0.0, leaves: bool = False) -> bytes:
        """Send pieces, and return the answers; or leave after the last piece."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(pause)
            if leaves:
                return b""
            return await asyncio.wait_for(reader.read(), 5)
        finally:
            writer.close()


@contextlib.asynccontextmanager
async def gate(tls: ssl.SSLContext | None = None) -> AsyncIterator[Behind]:
    """Run a gate before a server that answers requests which end with `end`."""
    came: list[bytes] = []
    left: list[int] = []
    log: list[RequestFacts] = []
    counts: list[int] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = len(came)
        came.append(b"")
        while data := await reader.read(1000):
            came[number] += data
            sent = came[number].removesuffix(b'"}')
            if sent.endswith(b"slow-end"):
                writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
                for piece in (b"1\r\na\r\n", b"1\r\nb\r\n", b"0\r\n\r\n"):
                    writer.write(piece)
                    await asyncio.sleep(0.1)
                break
            if sent.endswith(b"late-end"):
                await asyncio.sleep(0.2)
            if sent.endswith(b"stream-end"):
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n")
                for piece in (b"data: 1\n\n", b"data: ", b"2\n\n"):
                    writer.write(piece)
                    await asyncio.sleep(0.3)
                break
            if sent.endswith(b"silent-end"):
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n")
                continue
            if sent.endswith(b"endless-end"):
                writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
                with contextlib.suppress(OSError):
                    while True:
                        writer.write(b"x" * 100_000)
                        await writer.drain()
                break
            if sent.endswith(b"wrong-end"):
                writer.write(WRONG)
                break
            if sent.endswith(b"end"):
                writer.write(ANSWER.replace(b"content", b"Connection: close\r\nContent"))
                break
        else:
            left.append(number)
        writer.close()

    inner = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = inner.sockets[0].getsockname()[1]

    async def connect() -> Connection:
        return await asyncio.open_connection("127.0.0.1", port)

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        turns, watch = Turns(1, lambda: None, lambda text: None), Watch(log.append)
        Gate(connect, ACCESS, LIMITS, watch, counts.append, lambda path, body: turns.turn()).listen(
            listener, tls
        )
        async with inner:
            yield Behind(listener.getsockname()[1], came, left, log, counts, watch)


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


@pytest.mark.parametrize("pause", [0, 0.02])
@through_a_gate
async def test_a_connection_is_for_many_requests_and_each_is_looked_at(
    behind: Behind, pause: float
) -> None:
    other = b"GET /other HTTP/1.1\r\nHost: evil.example\r\n\r\n"
    answers = await behind.ask(REQUEST, REQUEST, other, REQUEST, pause=pause)
    assert answers.startswith(2 * ANSWER + b"HTTP/1.1 403 ")
    assert answers.count(b"HTTP/1.1") == 3
    assert len(behind.came) == 2
    *_, last = behind.log
    assert [facts.status for facts in behind.log] == [200, 200, 403]
    assert (last.method, last.path) == ("GET", "/other")
    assert "evil.example" in (last.reason or "")
    assert "--cors-origins" in (last.reason or "")


@through_a_gate
async def test_an_answer_comes_piece_by_piece(behind: Behind) -> None:
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{behind.port}") as client:
        clock = asyncio.get_running_loop().time
        async with client.stream("POST", "/x", content=b"slow-end") as answer:
            pieces = [(piece, clock()) async for piece in answer.aiter_bytes()]
    assert [piece for piece, _ in pieces] == [b"a", b"b"]
    assert pieces[1][1] - pieces[0][1] > 0.05


@through_a_gate
async def test_http_1_0_needs_no_host_and_gets_no_chunks(behind: Behind) -> None:
    head = b"POST /x HTTP/1.0\r\nContent-Length: "
    answer = await behind.ask(head + b"3\r\n\r\nend")
    assert answer == ANSWER.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
    assert b"host: localhost\r\n" in behind.came[0]
    answer = await behind.ask(head + b"8\r\n\r\nslow-end")
    assert answer.endswith(b"\r\n\r\nab")
    answer = await behind.ask(head + b"8\r\n\r\nlate-end")  # and nothing before it
    assert answer == ANSWER.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
    assert not behind.left


def test_an_answer_that_ends_with_the_connection_ends_at_once_with_tls(tmp_path: Path) -> None:
    authority = authority_in(tmp_path)

    async def ask() -> bytes:
        async with gate(authority.context) as behind:
            context = ssl.create_default_context(cafile=authority.certificate)
            reader, writer = await asyncio.open_connection("127.0.0.1", behind.port, ssl=context)
            writer.write(b"POST /x HTTP/1.0\r\nContent-Length: 8\r\n\r\nslow-end")
            try:
                return await asyncio.wait_for(reader.read(), 5)
            finally:
                writer.close()

    assert asyncio.run(ask()).endswith(b"\r\n\r\nab")


@through_a_gate
async def test_a_client_that_leaves_has_its_request_ended_and_others_not(behind: Behind) -> None:
    asking = asyncio.create_task(behind.ask(WAITING))
    await asyncio.sleep(0.02)
    silent = HEAD + b"Content-Length: 10\r\n\r\nsilent-end"
    await behind.ask(silent, pause=0.1, leaves=True)
    await asyncio.sleep(0.1)
    assert behind.left == [1]
    asking.cancel()
    await asyncio.sleep(0.1)
    assert behind.left == [1, 0]


@through_a_gate
async def test_the_log_has_each_request_once_with_its_end_and_without_its_query(
    behind: Behind,
) -> None:
    query = REQUEST.replace(b"/x", b"/x?api_key=sesame\x01")
    assert await behind.ask(query.replace(b"\x01", b""), REQUEST) == 2 * ANSWER
    await behind.ask(WAITING, leaves=True)
    await behind.ask(HEAD + b"Content-Length: 50\r\n\r\nabc", leaves=True)
    await behind.ask(b"", leaves=True)
    with socket.create_connection(("127.0.0.1", behind.port)) as connection:
        connection.sendall(HEAD + b"Content-Length: 50\r\n\r\nabc")
        await asyncio.sleep(0.05)
        reset = struct.pack("ii", 1, 0)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
    await asyncio.sleep(0.4)
    assert {(facts.method, facts.path) for facts in behind.log} == {("POST", "/x")}
    ends = [(facts.status, facts.has_left) for facts in behind.log]
    assert ends[:2] == 2 * [(200, False)]
    assert ends[2:] == 3 * [(None, True)]
    lines = behind.watch.metrics().splitlines()
    assert 'moepack_requests_total{status="200"} 2' in lines
    assert 'moepack_requests_total{status="left"} 3' in lines


@through_a_gate
async def test_texts_that_wait_for_their_turn_are_counted_and_their_wait_is_logged(
    behind: Behind,
) -> None:
    async with busy(behind):
        waiting = asyncio.create_task(behind.ask(text_request(b"end")))
        async with asyncio.timeout(PATIENCE):
            while "moepack_requests_waiting 1" not in behind.watch.metrics().splitlines():
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.3)
    await waiting
    (wait,) = (facts.waited_seconds for facts in behind.log if facts.status == 200)
    assert wait is not None
    assert 0.2 < wait < PATIENCE
    assert "moepack_requests_waiting 0" in behind.watch.metrics().splitlines()


@through_a_gate
async def test_what_is_too_long_is_said_to_a_client_that_is_still_sending(behind: Behind) -> None:
    """Not by a reset of the connection, in which the answer is lost."""

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(300):
            yield b"x" * 100_000

    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{behind.port}") as client:
        bodies: tuple[Any, ...] = (b"x" * 30_000_000, pieces())
        for body in bodies:
            answer = await client.post("/x", content=body)
            assert answer.status_code == 413
            assert "more than 400,000 bytes" in answer.json()["error"]["message"]
    assert not behind.came


CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("pieces", "status"),
    [
        ([b"POST /x HTTP/1.1\r\n"], 408),
        ([HEAD + b"a: b\r\n" * 1000], 431),
        ([b"POST /x\r\n\r\n"], 400),
        ([HEAD + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\n"], 400),
        ([HEAD + b"Content-Length: -3\r\n\r\n"], 400),
        ([HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n"], 501),
        ([b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n"], 400),
        ([b"GET / HTTP/1.1\r\nHost : localhost\r\n\r\n"], 400),
        ([b"GET / HTTP/1.1\r\n\r\n"], 400),
        ([HEAD.replace(b"/x", b"/%u0078") + b"Content-Length: 3\r\n\r\n"], 400),
        ([b"POST /x HTTP/1.1\r\nHost: evil.example\r\n\r\n"], 403),
        ([HEAD + b"Origin: http://evil.example\r\n\r\n"], 403),
        ([HEAD + b"Content-Length: 50\r\n\r\n", *[b"1"] * 6], 408),
        ([CHUNKED, b"9\r\n", *[b"1"] * 6], 408),
        ([CHUNKED, b"x" * 5000], 431),
        ([CHUNKED, b"five\r\n"], 400),
        ([CHUNKED, b"-1\r\n"], 400),
        ([CHUNKED, b"1\r\nabc\r\n"], 400),
        ([CHUNKED, b"61a81\r\n", b"x" * 400_001], 413),
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
    (facts,) = behind.log
    assert facts.status == status
    is_own = status in (403, 408, 413) or b"%u" in pieces[0]
    assert is_own or facts.reason == "no valid HTTP"  # h11 quotes the request


@through_a_gate
async def test_only_so_much_is_in_memory_at_a_time_and_freed(behind: Behind) -> None:
    head = HEAD + b"Content-Length: 300000\r\n\r\n"
    first = asyncio.create_task(behind.ask(head + b"x" * 299_000, pause=0.1, leaves=True))
    await asyncio.sleep(0.02)
    assert (await behind.ask(head + b"x" * 299_000)).startswith(b"HTTP/1.1 503 ")
    await first
    await asyncio.sleep(0.1)
    assert await behind.ask(head, b"x" * 299_997 + b"end") == ANSWER


@through_a_gate
async def test_no_more_requests_than_allowed_pass_at_a_time(behind: Behind) -> None:
    waiting = [
        asyncio.create_task(behind.ask(WAITING, pause=0.2, leaves=True))
        for _ in range(LIMITS.open_count)
    ]
    await asyncio.sleep(0.05)
    assert (await behind.ask(REQUEST)).startswith(b"HTTP/1.1 503 ")
    await asyncio.gather(*waiting)
    await asyncio.sleep(0.4)
    answers = await asyncio.gather(*(behind.ask(REQUEST) for _ in range(LIMITS.open_count)))
    assert answers == [ANSWER] * LIMITS.open_count


def text_request(body: bytes, path: bytes = b"/v1/chat/completions", fields: bytes = b"") -> bytes:
    """Return a request for a text; one whose body does not end with `end` is never answered."""
    head = b"POST %s HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    return (head + b"%sContent-Length: %d\r\n\r\n%s") % (path, fields, len(body), body)


def stream(word: bytes) -> bytes:
    """Return a body that asks for an answer piece by piece, and ends with a word in JSON."""
    return b'{"stream": true, "word": "%s"}' % word


@contextlib.asynccontextmanager
async def busy(behind: Behind) -> AsyncIterator[None]:
    """Have a text computed that does not end before the block."""
    first = asyncio.create_task(behind.ask(text_request(b"never")))
    await asyncio.sleep(0.02)
    yield
    first.cancel()


@through_a_gate
async def test_a_stream_that_waits_gets_comments_and_then_its_answer(behind: Behind) -> None:
    page = b"Origin: http://localhost:3000\r\n"
    async with busy(behind):
        waiting = [
            asyncio.create_task(behind.ask(text_request(body, path, page)))
            for path in (b"/completion?a=b", b"/v1/messages#a")
            for body in (stream(b"slow-end"), b"slow-end")
        ]
        await asyncio.sleep(0.35)
        assert len(behind.came) == 1
    answers = await asyncio.gather(*waiting)
    for answer in answers[::2]:
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 ")
        assert b"content-type: text/event-stream" in head
        assert b"access-control-allow-origin: http://localhost:3000" in head
        assert body.startswith(3 * b"3\r\n:\n\n\r\n")
        assert body.endswith(b"1\r\na\r\n1\r\nb\r\n0\r\n\r\n")
        assert answer.count(b"HTTP/1.1") == 1
    for answer in answers[1::2]:
        assert b":\n\n" not in answer
        assert answer.endswith(b"1\r\na\r\n1\r\nb\r\n0\r\n\r\n")


@through_a_gate
async def test_a_body_that_python_does_not_parse_waits_too(behind: Behind) -> None:
    async with busy(behind):
        asking = asyncio.create_task(behind.ask(text_request(b"[" * 100_000 + b"end")))
        await asyncio.sleep(0.3)
    assert (await asking).endswith(b"fine")


@through_a_gate
async def test_an_error_after_comments_is_an_event(behind: Behind) -> None:
    async with busy(behind):
        waiting = [
            asyncio.create_task(behind.ask(text_request(body)))
            for body in (stream(b"wrong-end"), b"wrong-end")
        ]
        await asyncio.sleep(0.15)
    streamed, whole = await asyncio.gather(*waiting)
    event = b"".join(streamed.partition(b"\r\n\r\n")[2].split(b"\r\n")[1::2])
    assert event.replace(b":\n\n", b"") == b'event: error\ndata: {"error": "x"}\n\n'
    assert event.startswith(b":\n\n")
    assert whole.startswith(b"HTTP/1.1 400 ")
    assert whole.endswith(b'{"error": "x"}')


@through_a_gate
async def test_texts_wait_in_their_order_and_others_pass(behind: Behind) -> None:
    async with busy(behind):
        waiting = []
        for number in range(3):
            request = text_request(b"%d-late-end" % number)
            waiting.append(asyncio.create_task(behind.ask(request)))
            await asyncio.sleep(0.02)
        assert len(behind.came) == 1
    for number, answer in enumerate(waiting):
        assert (await answer).endswith(b"fine")
        assert len(behind.came) - number in (2, 3), "one at a time"
        assert behind.came[1 + number].endswith(b"%d-late-end" % number)
    async with busy(behind):
        for path in (b"/tokenize", b"/v1/messages/count_tokens", b"/slots/0?action=save"):
            assert (await behind.ask(text_request(b"end", path))).endswith(b"fine")
        get = b"GET /completion HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3\r\n\r\nend"
        assert await behind.ask(get) == ANSWER


@through_a_gate
async def test_a_client_that_does_not_read_its_answer_holds_nobody_up(behind: Behind) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", behind.port)
    writer.write(text_request(b"endless-end"))
    assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
    answer = await asyncio.wait_for(behind.ask(text_request(b"end")), 3)
    assert answer.endswith(b"fine")
    writer.close()


@through_a_gate
async def test_a_client_that_leaves_while_it_waits_is_never_forwarded(behind: Behind) -> None:
    async with busy(behind):
        for body in (stream(b"gone-end"), b"gone-end"):
            await behind.ask(text_request(body), leaves=True)
        asking = asyncio.create_task(behind.ask(text_request(b"end")))
        await asyncio.sleep(0.3)
        assert behind.counts == [1]
    assert (await asking).endswith(b"fine")
    assert len(behind.came) == 2
    assert b"gone" not in behind.came[1]


@pytest.mark.parametrize("piece", [b"", b"POST"])
@through_a_gate
async def test_more_clients_than_there_are_places_wait_until_one_is_free(
    behind: Behind, piece: bytes
) -> None:
    """Those that send nothing, or not enough, lose theirs soon."""
    holders = [asyncio.create_task(behind.ask(piece)) for _ in range(2 * LIMITS.connection_count)]
    await asyncio.sleep(0.05)
    assert (await behind.ask(REQUEST)).endswith(b"fine")
    assert sum(holder.done() for holder in holders) > LIMITS.connection_count
    await asyncio.gather(*holders)
