"""A model behind llama.cpp's own server, with its experts brought to it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from types import TracebackType

from moepack.errors import MoepackError
from moepack.pager.background import PagerThread
from moepack.pager.pager import PagerOptions, PagerUsage
from moepack.programs.client import ServerClient
from moepack.programs.command import micro_batch
from moepack.programs.learner import Learner
from moepack.programs.runner import (
    open_pager,
    preloaded_library,
    program_environment,
    write_choices,
)
from moepack.programs.server_process import ServerProcess
from moepack.programs.trace_writer import TraceWriter
from moepack.reading.pack import Pack


class ModelServer:
    """Serves the model of `pack`, which has to stay open. A context manager, which ends the server.

    `options` are those of llama-server: `-c 8192`, `-np 4`, `--port 8080`. Without a port it is
    one that is free. `api_key` is asked of all clients, by default what the variable LLAMA_API_KEY
    has, if anything. `trace` and `learner` get what routers choose. `failed` is called, in another
    thread, with each error for which the server could not compute; without it `take_failure` has
    the last one. `pinning` is as for `Pager`.

    Raises what `Pager` and `ServerProcess` raise.
    """

    def __init__(
        self,
        pack: Pack,
        pager_options: PagerOptions | None = None,
        *,
        options: Sequence[str] = (),
        api_key: str | None = None,
        failed: Callable[[MoepackError], None] | None = None,
        trace: TraceWriter | None = None,
        learner: Learner | None = None,
        pinning: Callable[[int, int], None] = lambda length, total: None,
    ) -> None:
        self._failure: MoepackError | None = None
        self._failed = self._keep if failed is None else failed
        if pager_options is None:
            pager_options = PagerOptions(micro_batch=micro_batch(options, os.environ))
        self.pack, self.pager_options = pack, pager_options
        with ExitStack() as stack:
            library = preloaded_library()
            self.pager = stack.enter_context(
                open_pager(pack, pager_options, self._failed, trace, learner, pinning)
            )
            write = partial(write_choices, self.pager, trace, learner)
            stack.callback(write, is_last=True)
            stack.enter_context(PagerThread(self.pager, write))
            self._process = stack.enter_context(
                ServerProcess(
                    self.pager.model_path,
                    options=options,
                    environment=program_environment(self.pager, library),
                    api_key=api_key,
                )
            )
            self._stack = stack.pop_all()

    def _keep(self, error: MoepackError) -> None:
        self._failure = error

    def __enter__(self) -> ModelServer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the server, and free the memory of all experts."""
        self._stack.close()

    @property
    def url(self) -> str:
        """The server's address; waits until the model is loaded.

        Raises RequestError, SourceError or MachineError where the server ends instead.
        """
        return self._process.url

    @property
    def client(self) -> ServerClient:
        """A client of the server; waits as `url` does."""
        return self._process.client

    @property
    def is_running(self) -> bool:
        """Whether the server has not ended."""
        return self._process.is_running

    def processor_seconds(self) -> float:
        """Return how long processors have worked for the server."""
        return self._process.processor_seconds()

    @property
    def usage(self) -> PagerUsage:
        """What the server needed of its experts so far."""
        return self.pager.usage

    def take_failure(self) -> MoepackError | None:
        """Return why the last text could not be computed, once; None where nothing is known."""
        failure, self._failure = self._failure, None
        return failure
