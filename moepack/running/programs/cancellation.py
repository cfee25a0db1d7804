"""Cancellation of a request from outside: by Ctrl-C, or another thread."""

import contextlib
import socket


class Cancellation:
    """Cancels a request, also one that is yet to begin, without an exception.

    A signal's handler may call it at any moment.
    """

    def __init__(self) -> None:
        self.is_cancelled = False
        self._socket: socket.socket | None = None

    def cancel(self) -> None:
        """Cancel the request: its connection with the server ends."""
        self.is_cancelled = True
        if self._socket is not None:
            with contextlib.suppress(OSError):  # it has ended by itself
                self._socket.shutdown(socket.SHUT_RDWR)

    def attach(self, connection: socket.socket) -> None:
        """Set the connection of the request."""
        self._socket = connection
        if self.is_cancelled:
            self.cancel()
