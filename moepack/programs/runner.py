"""A program with the experts of a model brought to it, from its start to its end."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import resources
from pathlib import Path
from typing import NamedTuple

from moepack.errors import MoepackError, RequestError
from moepack.pager.pager import Pager, PagerOptions, PagerUsage
from moepack.programs.command import (
    extend_environment,
    fill_in,
    find_reading_option,
    waiting_variables,
)
from moepack.programs.executable import check_executable, find_executable
from moepack.programs.learner import Learner
from moepack.programs.library import find_library
from moepack.programs.process import Process
from moepack.programs.signals import SignalRelay
from moepack.programs.trace_writer import TraceWriter
from moepack.reading.pack import Pack

_SOURCE = "preload.c"


class ProgramEnd(NamedTuple):
    """How a program ended: `returncode` is its exit code, or -N where signal N killed it.

    `has_mapped` says whether it, or what it started, ever mapped the model.
    """

    returncode: int
    usage: PagerUsage
    has_mapped: bool


class Listener(NamedTuple):
    """Who is told what happens while a program runs.

    `begun` gets the pager before the program starts; `failed` each error for which it could not
    compute; `tick` comes each second; `pinning` is as for `Pager`.
    """

    begun: Callable[[Pager], None] = lambda pager: None
    failed: Callable[[MoepackError], None] = lambda error: None
    tick: Callable[[Pager], None] = lambda pager: None
    pinning: Callable[[int, int], None] = lambda length, total: None


_SILENT = Listener()


def preloaded_library() -> Path:
    """Return the library that programs get; raise MachineError where it cannot be compiled."""
    return find_library(Path(str(resources.files("moepack.pager"))) / _SOURCE)


def program_environment(
    pager: Pager, library: Path, variables: Mapping[str, str] = {}
) -> dict[str, str]:
    """Return the environment of a program that `pager` serves: this one's, and `variables`."""
    ours = {**pager.environment, "LD_PRELOAD": str(library)}
    additions = {**waiting_variables(os.environ), **variables, **ours}
    return extend_environment(os.environ, additions)


def run_program(
    pack: Pack,
    command: Sequence[str],
    options: PagerOptions,
    listener: Listener = _SILENT,
    variables: Mapping[str, str] = {},
    trace: TraceWriter | None = None,
    learner: Learner | None = None,
) -> ProgramEnd:
    """Run a command in the foreground, with the experts of `pack`; wait until it has ended.

    `{}` among its arguments is the model's path, as is the variable MOEPACK_MODEL; `variables` are
    added to its environment; `trace` and `learner` get what routers choose. To be called in the
    main thread: signals that reach this process go to the program. Raises CommandError for what
    cannot be started, RequestError for options with which llama.cpp maps no model, and what `Pager`
    raises.
    """
    executable = find_executable(command[0])
    check_executable(executable)
    _check_maps(command)
    library = preloaded_library()
    with (
        SignalRelay() as relay,
        open_pager(pack, options, listener.failed, trace, learner, listener.pinning) as pager,
    ):
        arguments = fill_in(command, pager.model_path)
        environment = program_environment(pager, library, variables)
        listener.begun(pager)
        with Process(executable, arguments, environment, relay.inherited_mask) as process:
            relay.attach(process)
            pager.serve(process.descriptor, partial(_tick, pager, listener, trace, learner))
            returncode = process.wait()
        write_choices(pager, trace, learner, is_last=True)
        assert returncode is not None
        return ProgramEnd(returncode, pager.usage, pager.has_served)


def open_pager(
    pack: Pack,
    options: PagerOptions,
    failed: Callable[[MoepackError], None],
    trace: TraceWriter | None,
    learner: Learner | None,
    pinning: Callable[[int, int], None] = lambda length, total: None,
) -> Pager:
    """Return a pager that has for `trace` and `learner` what they take, and what was learned."""
    if learner is not None:
        options = options._replace(most_used=learner.most_used)
    records, counts = trace is not None, learner is not None
    return Pager(pack, options, failed, records=records, counts=counts, pinning=pinning)


def write_choices(
    pager: Pager, trace: TraceWriter | None, learner: Learner | None, *, is_last: bool = False
) -> None:
    """Have `trace` and `learner` take what was chosen since the last time."""
    for writer in (trace, learner):
        if writer is not None:
            writer.write(pager, is_last=is_last)


def _tick(
    pager: Pager, listener: Listener, trace: TraceWriter | None, learner: Learner | None
) -> None:
    listener.tick(pager)
    write_choices(pager, trace, learner)


def _check_maps(command: Sequence[str]) -> None:
    option = find_reading_option(command[1:], os.environ)
    if option is not None:
        raise RequestError(
            f"with {option} the program reads the whole model into memory",
            hint="leave it out, or say --load-mode mmap: experts come when they are chosen",
        )
