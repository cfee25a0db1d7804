"""The server behind `run`: its start, with progress and notes."""

from __future__ import annotations

import os
import secrets
import shlex
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from moepack.cli.running.program import learner_of, say_memory
from moepack.cli.shared.progress import progress, watched_progress
from moepack.cli.shared.terminal import complain, is_json, is_quiet, is_verbose, say
from moepack.common.sizes import Size

if TYPE_CHECKING:
    from moepack.host.processors import OtherWork
    from moepack.pack.reading.pack import Pack
    from moepack.running.programs.model_server import ModelServer
    from moepack.running.programs.trace_writer import TraceWriter


def start_server(
    pack: Pack,
    trace: TraceWriter | None,
    options: Sequence[str],
    other_work: OtherWork,
    *,
    context: int | None,
    threads: int | None,
    micro_batch: int | None,
    memory: Size | None,
    pin: Size | None,
    no_learn: bool,
    **pager: Any,
) -> ModelServer:
    """Return a server for this process alone, which has the only key, when its model is loaded.

    `options` are llama-server's; `other_work` has watched other programs for a while.
    """
    from moepack.running.pager.pager import PagerOptions
    from moepack.running.programs.model_server import ModelServer
    from moepack.running.programs.server_memory import choose_context, single_text_server

    length = choose_context(pack, context, note)
    threads = _usual_threads(options) if threads is None else threads
    words, count, beside = single_text_server(
        pack, options, memory, pin or 0, context=length, threads=threads, micro_batch=micro_batch
    )
    sizes: Any = {"pinned": pin, "micro_batch": count, "beside": beside}
    pager_options = PagerOptions(memory, **sizes, **pager)
    serve: Callable[..., ModelServer] = partial(
        ModelServer,
        pack,
        pager_options,
        options=words,
        api_key=secrets.token_urlsafe(),
        trace=trace,
        learner=learner_of(pack, no_learn),
    )
    if is_json() or is_quiet():
        return serve()
    began = time.monotonic()
    with progress(None, "pinning experts", has_summary=bool(pin)) as pinning:
        server = serve(pinning=pinning)
    try:
        say_memory(server.pager)
        with watched_progress("loading the model", "s"):
            _ = server.url
    except BaseException:
        server.close()
        raise
    _note_other_work(other_work.processor_count(server.process.processor_seconds()), threads)
    if is_verbose():
        say(f"loaded in {time.monotonic() - began:.1f} s", err=True)
        say(f"experts are read by {server.pager.backend}", err=True)
        say(f"options of llama-server: {shlex.join(words)}", err=True)
    return server


def _usual_threads(options: Sequence[str]) -> int | None:
    """Return the threads by llama-server's options or variables, or else by this process' limits.

    None if neither says it.
    """
    from moepack.host.processors import limited_threads
    from moepack.running.programs.command import THREADS

    if THREADS.is_set(options, os.environ):
        return THREADS.number(options, os.environ)
    return limited_threads()


def note(text: str) -> None:
    """Print a note, unless the command is quiet."""
    if not is_quiet():
        complain("note", text)


def _note_other_work(busy: float | None, threads: int | None) -> None:
    """Print a note if other programs keep so many processors `busy` that threads wait."""
    from moepack.host.processors import fewer_threads

    if busy is not None and (fewer := fewer_threads(threads, busy)) is not None:
        note(f"other programs keep {busy:.1f} processors busy: -t {fewer} may be faster")
