"""The end of a request that comes from outside: a Ctrl-C, another thread."""

from __future__ import annotations

import contextlib
import socket


class Cancellation:
    """Ends a request, also one that is yet to begin, without an exception where it is awaited.

    A signal's handler may call it at any moment.
    """

    def __init__(self) -> None:
        self.is_cancelled = False
        self._socket: socket.socket | None = None

    def cancel(self) -> None:
        """End the request: what waits for the server finds that its connection has ended."""
        self.is_cancelled = True
        if self._socket is not None:
            with contextlib.suppress(OSError):  # it has ended by itself
                self._socket.shutdown(socket.SHUT_RDWR)

    def attach(self, connection: socket.socket) -> None:
        """Take the connection of the request."""
        self._socket = connection
        if self.is_cancelled:
            self.cancel()
