"""One call for a model by its path: serve it, or run a program that uses llama.cpp with it."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from moepack.errors import RequestError
from moepack.machine.memory_limits import memory_length
from moepack.packing.opening import open_model
from moepack.pager.pager import PagerOptions
from moepack.paths import AnyPath, PathOrPaths
from moepack.programs.command import llama_variables, micro_batch
from moepack.programs.learner import make_learner
from moepack.programs.micro_batch import server_options
from moepack.programs.model_server import ModelServer
from moepack.programs.runner import ProgramEnd, run_program
from moepack.programs.trace_writer import TraceWriter
from moepack.sizes import Size
from moepack.storage.backend import Backend


class ServedModel(ModelServer):
    """A model behind llama.cpp's own server at `url`. A context manager, which ends the server."""

    def __init__(
        self,
        path: PathOrPaths,
        pager_options: PagerOptions,
        options: Sequence[str],
        api_key: str | None,
        trace: AnyPath | None,
        learn: bool,
    ) -> None:
        with ExitStack() as stack:
            pack = stack.enter_context(open_model(path))
            writers: Any = {
                "trace": None if trace is None else stack.enter_context(TraceWriter(trace, pack)),
                "learner": make_learner(pack, learn=learn),
            }
            options = server_options(pack, options, pager_options.memory, pager_options.pinned or 0)
            count = micro_batch(options, os.environ)
            pager_options = pager_options._replace(micro_batch=count)
            super().__init__(pack, pager_options, options=options, api_key=api_key, **writers)
            self._opened = stack.pop_all()

    def close(self) -> None:
        """End the server, free the memory of all experts, and close the model."""
        super().close()
        self._opened.close()


def serve(
    path: PathOrPaths,
    *,
    memory: Size | None = None,
    policy: str = "lru",
    pin: Size | None = None,
    backend: str | Backend = "auto",
    check: str = "first",
    trace: AnyPath | None = None,
    learn: bool = True,
    options: Sequence[str] = (),
    api_key: str | None = None,
) -> ServedModel:
    """Serve a model that may be larger than memory by llama.cpp's own server.

    `path` is a pack, or any shard of a GGUF: then experts are read from the shards as they lie.
    `memory` and `pin` are bytes for experts or a text such as `8GiB`. `memory` may be `floor`, or
    `50%` of the memory of this machine or its container, `pin` `10%` of the experts. `options` are
    those of llama-server: `-c 8192`, `-np 4`, `--port 8080`. Without a port it is one that is free.
    `api_key` is asked of all clients. What routers choose is written to `trace`.

    Raises what opening a source or a pack raises, and what `ModelServer` does.
    """
    options = _words(options, "options")
    pager_options = _pager_options(
        options, memory=memory, policy=policy, pin=pin, backend=backend, check=check
    )
    return ServedModel(path, pager_options, options, api_key, trace, learn)


def run(
    path: PathOrPaths,
    command: Sequence[str],
    *,
    memory: Size | None = None,
    policy: str = "lru",
    pin: Size | None = None,
    backend: str | Backend = "auto",
    check: str = "first",
    trace: AnyPath | None = None,
    learn: bool = True,
) -> ProgramEnd:
    """Run a program that uses llama.cpp with a model that may be larger than memory.

    Wait until it has ended. `{}` among the arguments is the model's path, as is the variable
    MOEPACK_MODEL; else as `serve`. To be called in the main thread: signals that reach this process
    go to the program.

    Raises what opening a source or a pack raises, and what `run_program` does.
    """
    command = _words(command, "command")
    if not command:
        raise RequestError("no program is named")
    pager_options = _pager_options(
        command[1:], memory=memory, policy=policy, pin=pin, backend=backend, check=check
    )
    with ExitStack() as stack:
        pack = stack.enter_context(open_model(path))
        writer = None if trace is None else stack.enter_context(TraceWriter(trace, pack))
        variables = llama_variables(command, os.environ)
        learner = make_learner(pack, learn=learn)
        return run_program(
            pack, command, pager_options, variables=variables, trace=writer, learner=learner
        )


def _words(words: Sequence[str], argument: str) -> list[str]:
    """Return words as a list. Raises RequestError for one text, which a shell would cut."""
    if isinstance(words, str):
        raise RequestError(
            "a text, not a list of words",
            argument=argument,
            expected=_split(words),
            found=repr(words),
        )
    return list(words)


def _split(text: str) -> list[str]:
    """Return the words that a shell would make of a text, or those between spaces."""
    try:
        return shlex.split(text)
    except ValueError:  # an open quotation
        return text.split()


def _pager_options(
    arguments: Sequence[str], *, memory: Size | None, pin: Size | None, **options: Any
) -> PagerOptions:
    batch = micro_batch(arguments, os.environ)
    return PagerOptions(memory=memory_length(memory), pinned=pin, micro_batch=batch, **options)
