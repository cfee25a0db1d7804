"""A model behind llama.cpp's own server, with experts that are read on demand."""

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial

from moepack.common.closing import Closing
from moepack.common.errors import MoepackError
from moepack.pack.reading.pack import Pack
from moepack.running.pager.pager import PagerOptions
from moepack.running.pager.usage import PagerUsage
from moepack.running.programs.client import ServerClient
from moepack.running.programs.command import experts_used, micro_batch
from moepack.running.programs.learner import Learner
from moepack.running.programs.runner import (
    open_pager,
    preloaded_library,
    program_environment,
    serving,
    write_selections,
)
from moepack.running.programs.server_process import ServerProcess
from moepack.running.programs.trace_writer import TraceWriter


class ModelServer(Closing):
    """Serves the model of `pack`, which has to stay open. A context manager, which ends the server.

    `options` are llama-server's: `-c 8192`, `-np 4`, `--port 8080`; the default port is a free one.
    All clients must send `api_key`, by default the value of LLAMA_API_KEY. `trace` and `learner`
    get the routed experts, or with `records` the pager keeps them for `pop_calls`. `failed` is
    called, in another thread, with each error that stopped a computation; without it `take_failure`
    returns the last one. `pinning` is as for `Pager`.

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
        records: bool = False,
        pinning: Callable[[int, int], None] = lambda length, total: None,
    ) -> None:
        self._failure: MoepackError | None = None
        if pager_options is None:
            pager_options = PagerOptions(micro_batch=micro_batch(options, os.environ))
        used = experts_used(options, pack.manifest.source.architecture)
        pager_options = pager_options._replace(experts_used=used)
        self.pack, self.pager_options = pack, pager_options
        self._afterwards = ExitStack()
        with ExitStack() as stack:
            library = preloaded_library()
            receivers = failed or self._keep, trace, learner, pinning
            self.pager = stack.enter_context(
                open_pager(pack, pager_options, *receivers, records=records)
            )
            write = partial(write_selections, self.pager, trace, learner)
            stack.callback(write, is_last=True)
            stack.enter_context(serving(self.pager, write))
            self.process = stack.enter_context(
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

    def close_afterwards(self, resources: ExitStack) -> None:
        """Close resources when the server has ended."""
        self._afterwards.push(resources)

    def close(self) -> None:
        """End the server, and free the memory of all experts."""
        with self._afterwards:
            self._stack.close()

    @property
    def url(self) -> str:
        """The server's address; waits until the model is loaded.

        Raises RequestError, SourceError or MachineError if the server ends instead.
        """
        return self.process.url

    @property
    def client(self) -> ServerClient:
        """A client of the server; waits as `url` does."""
        return self.process.client

    @property
    def usage(self) -> PagerUsage:
        """The lookups and reads of experts so far."""
        return self.pager.usage

    def take_failure(self) -> MoepackError | None:
        """Return once the error that stopped the last text."""
        failure, self._failure = self._failure, None
        return failure
