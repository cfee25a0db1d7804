"""One call for a model by its path: serve it, or run a program that uses llama.cpp with it."""

import shlex
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from moepack.common.errors import RequestError
from moepack.common.paths import AnyPath, PathOrPaths
from moepack.common.sizes import Size
from moepack.host.memory_limits import memory_length
from moepack.pack.opening.open_model import open_model
from moepack.packing.fetched import fetch_model
from moepack.running.programs.command import llama_variables
from moepack.running.programs.learned import make_learner
from moepack.running.programs.runner import ProgramEnd, run_program
from moepack.running.programs.trace_writer import TraceWriter
from moepack.running.serving.model_server import ModelServer
from moepack.running.serving.server_memory import MemoryLimits
from moepack.running.serving.server_options import server_options
from moepack.running.streaming.supervisor import StreamingOptions


def serve(
    path: PathOrPaths,
    *,
    memory: Size | None = None,
    total_memory: Size | None = None,
    policy: str = "lrfu",
    pin: Size | None = None,
    backend: str = "auto",
    check: str = "first",
    prefetch: bool = True,
    trace: AnyPath | None = None,
    learn: bool = True,
    prompt_cache: Size | None = 0,
    options: Sequence[str] = (),
    api_key: str | None = None,
) -> ModelServer:
    """Serve a model that may be larger than memory by llama.cpp's own server.

    `path` is a pack, or any shard of a GGUF, whose experts are then read from the shards; a model
    at an address is fetched first, as by `fetch_model`. `memory` and `pin` are bytes for experts or
    a text such as `8GiB`. `memory` may be `floor`, or `50%` of the memory of this machine or its
    container, `pin` `10%` of the experts. In place of `memory`, `total_memory` is for all together:
    experts get what the rest leaves. `options` are llama-server's: `-c 8192`, `-np 4`, `--port
    8080`; the default port is a free one. Without `prefetch` nothing is read for the next layer
    while a layer is decoded. With `prompt_cache` bytes, or None for the usual number, texts go on
    after a restart: their states are kept in the user's cache (`XDG_CACHE_HOME`). All clients must
    send `api_key`. The routing is recorded to `trace`.

    Raises what fetching and opening raise, and what `ModelServer` raises.
    """
    words = _as_list(options, "options")
    limits = MemoryLimits(memory, total_memory, pin or 0).checked()
    with ExitStack() as stack:
        pack = stack.enter_context(open_model(fetch_model(path, notice=_warn)))
        pack.require_files()
        writer = None if trace is None else stack.enter_context(TraceWriter(trace, pack))
        words, memory, beside = server_options(pack, words, limits)
        streaming_options = StreamingOptions(
            memory, policy, pin, backend, check, beside=beside, prefetch=prefetch
        )
        learner = make_learner(pack, learn=learn)
        others: Any = {"api_key": api_key, "trace": writer, "learner": learner}
        others["prompt_cache"] = prompt_cache
        server = ModelServer(pack, streaming_options, options=words, **others)
        server.close_afterwards(stack.pop_all())
        return server


def run(
    path: PathOrPaths,
    command: Sequence[str],
    *,
    memory: Size | None = None,
    policy: str = "lrfu",
    pin: Size | None = None,
    backend: str = "auto",
    check: str = "first",
    prefetch: bool = True,
    trace: AnyPath | None = None,
    learn: bool = True,
) -> ProgramEnd:
    """Run a program that uses llama.cpp with a model that may be larger than memory.

    Wait until it has ended. `{}` in the arguments is replaced by the model's path, which is also in
    the variable MOEPACK_MODEL; otherwise as `serve`. Call it in the main thread: signals to this
    process are passed on to the program.

    Raises what fetching and opening raise, and what `run_program` raises.
    """
    words = _as_list(command, "command")
    if not words:
        raise RequestError("no program is named")
    options = StreamingOptions(
        memory_length(memory), policy, pin, backend, check, prefetch=prefetch
    )
    with ExitStack() as stack:
        pack = stack.enter_context(open_model(fetch_model(path, notice=_warn)))
        pack.require_files()
        writer = None if trace is None else stack.enter_context(TraceWriter(trace, pack))
        variables = llama_variables(words)
        learner = make_learner(pack, learn=learn)
        return run_program(pack, words, options, variables=variables, trace=writer, learner=learner)


def _warn(text: str) -> None:
    warnings.warn(text, stacklevel=2)


def _as_list(words: Sequence[str], argument: str) -> list[str]:
    if not isinstance(words, str):
        return list(words)
    try:
        expected = shlex.split(words)
    except ValueError:  # an open quotation
        expected = words.split()
    problem = "a text, not a list of words"
    raise RequestError(problem, argument=argument, expected=expected, found=repr(words))
