"""llama.cpp's server on a small model, as one process for many tests."""

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from moepack.programs.server_process import ServerProcess

OPTIONS = ("-c", "2048", "-t", "1")
"""A context that takes seconds to fill, and a thread: tests run side by side."""


@contextlib.contextmanager
def serving(model_path: Path, *options: str, api_key: str | None = None) -> Iterator[ServerProcess]:
    """Serve a model, once it is loaded."""
    with ServerProcess(str(model_path), options=[*OPTIONS, *options], api_key=api_key) as server:
        assert server.url
        yield server


def exchange(url: str, request: bytes, timeout: float = 20) -> bytes:
    """Send bytes to a server; return all that comes back until it closes the connection."""
    parts = urlsplit(url)
    assert parts.hostname is not None
    with socket.create_connection((parts.hostname, parts.port or 80), timeout) as connection:
        connection.sendall(request)
        answer = b""
        while data := connection.recv(1 << 16):
            answer += data
        return answer
