"""llama.cpp's server on a small model: for many tests, or by the command."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from moepack.running.serving.model_server import ServerProcess
from tests.support.children import MOEPACK, Piped

OPTIONS = ("-c", "2048", "-t", "1")
"""A context for every text of a test, and a thread: tests run side by side."""


@contextlib.contextmanager
def serving(model_path: Path, *options: str, api_key: str | None = None) -> Iterator[ServerProcess]:
    """Serve a model, once it is loaded."""
    with ServerProcess(str(model_path), options=[*OPTIONS, *options], api_key=api_key) as server:
        assert server.url
        yield server


@contextlib.contextmanager
def served(model: str | Path, *options: str) -> Iterator[tuple[Piped, str]]:
    """Serve a model by the command; give its process and its address."""
    with Piped(*MOEPACK, "serve", model, "--port", "0", *options) as process:
        try:
            line = process.stdout.readline()
            assert line.startswith("listening on http://"), process.stderr.read()
            yield process, line.split()[-1]
        finally:
            process.terminate()
