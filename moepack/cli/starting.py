"""The server behind `run`: how it is started, and what is said while that takes."""

from __future__ import annotations

import os
import secrets
import shlex
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from moepack.cli.program import learner_of, say_memory
from moepack.cli.progress import progress
from moepack.cli.terminal import complain, is_quiet, is_verbose, say
from moepack.cli.watched_progress import elapsed, watched_progress
from moepack.sizes import Size, count_text

if TYPE_CHECKING:
    from moepack.machine.processors import OtherWork
    from moepack.programs.context import Context
    from moepack.programs.model_server import ModelServer
    from moepack.programs.trace_writer import TraceWriter
    from moepack.reading.pack import Pack


def start_server(
    pack: Pack,
    trace: TraceWriter | None,
    options: Sequence[str],
    *,
    is_silent: bool,
    other_work: OtherWork,
    context: int | None,
    threads: int | None,
    micro_batch: int | None,
    memory: Size | None,
    pin: Size | None,
    no_learn: bool,
    **others: Any,
) -> ModelServer:
    """Serve a model for this process alone: nobody else has the key. Wait until it is loaded.

    `options` are llama-server's. Progress is shown, and what was chosen, unless it `is_silent`;
    `other_work` was begun some time before.
    """
    from moepack.machine.processors import limited_threads
    from moepack.pager.pager import PagerOptions
    from moepack.programs.command import says_threads, single_text_options, thread_count
    from moepack.programs.context import choose_context
    from moepack.programs.micro_batch import choose_micro_batch
    from moepack.programs.model_server import ModelServer

    chosen = choose_context(pack, context)
    if not is_quiet():
        note_context(chosen)
    if micro_batch is None:
        micro_batch = choose_micro_batch(
            pack, context=chosen.length, memory=memory, pinned=pin or 0
        )
    if threads is None:
        is_said = says_threads(options, os.environ)
        threads = thread_count(options, os.environ) if is_said else limited_threads()
    words = [*single_text_options(chosen.length, threads, micro_batch), *options]
    pager_options = PagerOptions(memory=memory, pinned=pin, micro_batch=micro_batch, **others)
    writers: Any = {"trace": trace, "learner": learner_of(pack, no_learn)}
    key = secrets.token_urlsafe()

    def serve(**more: Any) -> ModelServer:
        return ModelServer(pack, pager_options, options=words, api_key=key, **writers, **more)

    if is_silent or is_quiet():
        return serve()
    began = time.monotonic()
    with progress(None, "pinning experts", has_summary=bool(pin)) as pinning:
        server = serve(pinning=pinning)
    try:
        _wait(server)
    except BaseException:
        server.close()
        raise
    note_other_work(other_work.processor_count(server.processor_seconds()), threads)
    if is_verbose():
        say(f"loaded in {time.monotonic() - began:.1f} s", err=True)
        say(f"experts are read by {server.pager.backend}", err=True)
        say(f"options of llama-server: {shlex.join(words)}", err=True)
    return server


def _wait(server: ModelServer) -> None:
    say_memory(server.pager)
    with watched_progress("loading the model", "s", elapsed()):
        _ = server.url


def note_context(context: Context) -> None:
    """Say where a context is longer than those that the model was trained for."""
    if context.is_beyond_training:
        trained = count_text(context.trained or 0, "token")
        complain("note", f"the model was trained for {trained} of context, and uses no more of it")


def note_other_work(busy: float | None, threads: int | None) -> None:
    """Say where others keep so many processors `busy` that threads wait for each other."""
    from moepack.machine.processors import fewer_threads

    if busy is not None and (fewer := fewer_threads(threads, busy)) is not None:
        complain(
            "note", f"other programs keep {busy:.1f} processors busy: -t {fewer} may be faster"
        )
