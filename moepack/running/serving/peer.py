"""HTTP on one connection of the gate: with a client, or with llama.cpp's server."""

import asyncio
import json
from http import HTTPStatus

import h11

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Fields = list[tuple[bytes, bytes]]
"""Header fields: names in lower case, and values."""
PING = b":\n\n"
"""A comment in a stream, as llama.cpp sends them."""
_PIECE_LENGTH = 1 << 16
_SECONDS_TO_LEAVE = 10.0
_KINDS = {403: "permission_error", 503: "unavailable_error"}


class RefusedError(h11.RemoteProtocolError):
    """The refusal of a request: a sentence of the gate's own, and the status."""


class Peer:
    """One side of the gate: HTTP on a connection."""

    def __init__(self, http: h11.Connection, connection: Connection) -> None:
        self.http = http
        self.reader, self.writer = connection

    async def next_event(self) -> object:
        """Return what h11 reads next. Raises h11.RemoteProtocolError, OSError."""
        while (event := self.http.next_event()) is h11.NEED_DATA:
            if self.http.they_are_waiting_for_100_continue:
                go_on = h11.InformationalResponse(status_code=100, headers=[], reason="Continue")
                self.send(go_on)
            self.http.receive_data(await self.reader.read(_PIECE_LENGTH))
        return event

    def send(self, *events: h11.Event) -> None:
        """Send events, without waiting until they have left."""
        self.writer.write(b"".join(self.http.send(event) or b"" for event in events))

    def send_whole(self, status: int, fields: Fields, body: bytes) -> None:
        """Send a whole answer."""
        fields = [*fields, (b"content-length", b"%d" % len(body))]
        reason = HTTPStatus(status).phrase
        head = h11.Response(status_code=status, headers=fields, reason=reason)
        self.send(head, h11.Data(data=body), h11.EndOfMessage())

    def refuse(self, error: h11.RemoteProtocolError) -> None:
        """Send an answer with an error, as llama.cpp's server writes them."""
        status = error.error_status_hint
        kind = _KINDS.get(status, "invalid_request_error")
        facts = {"error": {"code": status, "message": str(error), "type": kind}}
        fields = [(b"content-type", b"application/json"), (b"connection", b"close")]
        self.send_whole(status, fields, json.dumps(facts).encode())

    async def wait_until_gone(self, most: int) -> None:
        """Wait until a client that has sent a request closes the connection, or ends its sending.

        More than `most` bytes that are sent in advance count as the end.
        """
        while data := await self.reader.read(_PIECE_LENGTH):
            self.http.receive_data(data)
            if len(self.http.trailing_data[0]) > most:
                return

    async def leave(self) -> None:
        """Close the connection when the other side has, or is too slow.

        If something was unread, the system would reset the connection, and the answer be lost.
        """
        try:
            async with asyncio.timeout(_SECONDS_TO_LEAVE):
                if self.writer.can_write_eof():
                    self.writer.write_eof()
                else:  # with TLS no side can end alone
                    self.writer.close()
                while await self.reader.read(_PIECE_LENGTH):
                    pass
        finally:
            self.writer.transport.abort()


def send_request(
    connection: Connection, method: bytes, target: bytes, fields: Fields, body: bytes
) -> Peer:
    """Send a whole request to a server; return its side. The caller closes it."""
    server = Peer(h11.Connection(h11.CLIENT), connection)
    fields = [*fields, (b"content-length", b"%d" % len(body)), (b"connection", b"close")]
    fields += [] if b"host" in dict(fields) else [(b"host", b"localhost")]
    head = h11.Request(method=method, target=target, headers=fields)
    server.send(head, h11.Data(data=body), h11.EndOfMessage())
    return server


async def fetch(
    connection: Connection, method: bytes, target: bytes, fields: Fields, body: bytes
) -> tuple[int, bytes]:
    """Return the status and the body of an answer, and close the connection.

    Raises h11.RemoteProtocolError, OSError.
    """
    try:
        server = send_request(connection, method, target, fields, body)
        while not isinstance(head := await server.next_event(), h11.Response):
            pass
        answer = b""
        while isinstance(event := await server.next_event(), h11.Data):
            answer += event.data
        return head.status_code, answer
    finally:
        connection[1].close()
