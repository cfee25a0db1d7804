"""llama.cpp's server with experts whose reads are as slow as a test wants."""

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import pytest

from moepack.pack.opening.open_model import open_model
from moepack.running.serving.model_server import ModelServer
from moepack.running.streaming.supervisor import StreamingOptions
from tests.support.children import wait_until


class Answer(NamedTuple):
    """A text in tokens; of its prompt `kept_count` were not computed again."""

    tokens: list[int]
    kept_count: int


def read_answer(client: HTTPConnection) -> Answer:
    """Wait for the answer."""
    answer = json.load(client.getresponse())
    return Answer(answer["tokens"], answer["timings"]["cache_n"])


class PacedServer(NamedTuple):
    """A server of which each read takes the milliseconds that `pace` was called with."""

    server: ModelServer
    pace: Callable[[int], object]

    @contextlib.contextmanager
    def asking(
        self, prompt: Sequence[int], count: int = 8, **others: Any
    ) -> Iterator[HTTPConnection]:
        """Ask, and leave at the end, with or without the answer."""
        parts = urlsplit(self.server.url)
        assert parts.hostname is not None
        with contextlib.closing(HTTPConnection(parts.hostname, parts.port, timeout=60)) as client:
            fields = {"prompt": list(prompt), "n_predict": count, "temperature": 0}
            fields |= {"return_tokens": True, "ignore_eos": True, **others}
            headers = {"content-type": "application/json"}
            client.request("POST", "/completion", json.dumps(fields), headers)
            yield client

    def ask(self, prompt: Sequence[int], count: int = 8) -> Answer:
        """Ask, and wait for the answer."""
        with self.asking(prompt, count) as client:
            return read_answer(client)

    def wait_for_a_layer(self) -> None:
        """Wait until something is computed."""
        before = self.server.usage.routed_count
        wait_until(lambda: self.server.usage.routed_count > before)

    def slots(self) -> list[dict[str, Any]]:
        """Return what the server tells of its slots."""
        return list(self.server.client.request("/slots"))

    def wait_until_idle(self) -> float:
        """Wait until nothing is computed; return the seconds."""
        began = time.monotonic()
        wait_until(lambda: not any(slot["is_processing"] for slot in self.slots()))
        return time.monotonic() - began


@contextlib.contextmanager
def paced_server(
    model: Path, slots: int, faulty_reads: Path, folder: Path, *options: str
) -> Iterator[PacedServer]:
    """Serve a model with the least memory, to so many texts at once, in batches of 512 tokens."""

    def pace(milliseconds: int) -> None:
        (folder / "new").write_text(f"slow {milliseconds} 0 {1 << 40}")
        (folder / "new").replace(folder / "faults")

    words = ["-c", str(2048 * slots), "-np", str(slots), "-t", "1", "--cache-ram", "0"]
    words += ["-b", "512", "-ub", "512", *options]
    streaming = StreamingOptions("floor", backend="direct")
    with pytest.MonkeyPatch.context() as patch, open_model([model]) as pack:
        patch.setenv("FAULTY_READS", str(folder / "faults"))
        patch.setenv("LD_PRELOAD", str(faulty_reads))
        with ModelServer(pack, streaming, options=words) as server:
            yield PacedServer(server, pace)
