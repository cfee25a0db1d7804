"""Runs programs with experts that are read on demand, by a library that is loaded into them."""

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from moepack.common.errors import MoepackError, RequestError
from moepack.host.memory_limits import kill_count
from moepack.pack.reading.pack import Pack
from moepack.running.programs.command import (
    experts_used,
    fill_in,
    find_reading_option,
    micro_batch,
    waiting_variables,
)
from moepack.running.programs.executable import check_executable, find_executable
from moepack.running.programs.learned import Learner
from moepack.running.programs.library import find_library
from moepack.running.programs.process import in_foreground, is_out_of_memory
from moepack.running.programs.trace_writer import TraceWriter
from moepack.running.streaming.control import ExpertUsage
from moepack.running.streaming.supervisor import StreamingOptions, Supervisor


class ProgramEnd(NamedTuple):
    """The end of a program: `returncode` is its exit code, or -N if signal N killed it.

    `has_mapped` is whether the program, or one that it started, ever mapped the model;
    `is_out_of_memory` is whether the system killed it to free memory.
    """

    returncode: int
    usage: ExpertUsage
    has_mapped: bool
    is_out_of_memory: bool


def run_program(
    pack: Pack,
    command: Sequence[str],
    options: StreamingOptions,
    *,
    variables: Mapping[str, str] = {},
    trace: TraceWriter | None = None,
    learner: Learner | None = None,
    begun: Callable[[Supervisor], None] = lambda supervisor: None,
    failed: Callable[[MoepackError], None] = lambda error: None,
    tick: Callable[[Supervisor], None] = lambda supervisor: None,
) -> ProgramEnd:
    """Run a command in the foreground, with the experts of `pack`; wait until it has ended.

    `{}` among its arguments is the model's path, as is the variable MOEPACK_MODEL; `variables` are
    added to its environment; `trace` and `learner` get the routed experts. `begun` is called before
    the program starts, `failed` each error that stopped a computation; `tick` is called each
    second. Call it in the main thread: signals to this process are passed on to the program. Raises
    CommandError for a program that cannot be started, RequestError for options with which llama.cpp
    maps no model, and what `Supervisor` raises.
    """
    executable = find_executable(command[0])
    check_executable(executable)
    if (option := find_reading_option(command, os.environ)) is not None:
        raise RequestError(
            f"with {option} the program reads the whole model into memory",
            hint="leave it out, or use --load-mode mmap: experts are read when they are selected",
        )
    library = preloaded_library()
    with open_supervisor(pack, options, command, failed, trace, learner) as supervisor:

        def write_and_tick() -> None:
            tick(supervisor)
            write_selections(supervisor, trace, learner)

        arguments = fill_in(command, supervisor.model_path)
        environment = program_environment(supervisor, library, variables)
        begun(supervisor)
        kills = kill_count()
        with in_foreground(executable, arguments, environment) as process:
            supervisor.serve(process.descriptor, write_and_tick)
            returncode = process.wait()
        write_selections(supervisor, trace, learner, is_last=True)
        assert returncode is not None
        is_killed = is_out_of_memory(returncode, kills)
        return ProgramEnd(returncode, supervisor.final_usage, supervisor.has_served, is_killed)


def open_supervisor(
    pack: Pack,
    options: StreamingOptions,
    command: Sequence[str],
    failed: Callable[[MoepackError], None],
    trace: TraceWriter | None = None,
    learner: Learner | None = None,
    records: bool = False,
) -> Supervisor:
    """Return a supervisor for a command of llama.cpp, its micro-batch and its number of experts.

    It records for `trace` and `learner`, and warms up from earlier runs.
    """
    options = options._replace(
        micro_batch=micro_batch(command),
        experts_used=experts_used(command, pack.manifest.source.architecture),
    )
    if learner is not None:
        options = options._replace(most_used=learner.most_used)
    records, counts = records or trace is not None, learner is not None
    return Supervisor(pack, options, failed, records=records, counts=counts)


def write_selections(
    supervisor: Supervisor,
    trace: TraceWriter | None,
    learner: Learner | None,
    *,
    is_last: bool = False,
) -> None:
    """Write the selections since the last time to `trace` and `learner`."""
    if trace is not None:
        # Each context's last call may go on.
        trace.write(supervisor.pop_calls(with_open=is_last), supervisor.experts_used)
        trace.lost_count = supervisor.lost_count
    if learner is not None:
        for selection in supervisor.pop_selections():
            learner.add(selection.layer, selection.token_count, selection.experts)
        learner.write(is_last=is_last)


@contextmanager
def serving(supervisor: Supervisor, tick: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Serve programs in another thread until the block ends; call `tick` each second."""
    ending = os.eventfd(0, os.EFD_CLOEXEC)

    thread = threading.Thread(
        target=supervisor.serve, args=(ending, tick), name="supervisor", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        os.eventfd_write(ending, 1)
        thread.join()
        os.close(ending)


def program_environment(
    supervisor: Supervisor, library: Path, variables: Mapping[str, str] = {}
) -> dict[str, str]:
    """Return the environment of a program that `supervisor` serves: this one's, and `variables`."""
    preloaded = ":".join(filter(None, [str(library), os.environ.get("LD_PRELOAD")]))
    ours = {**supervisor.environment, "LD_PRELOAD": preloaded}
    return {**os.environ, **waiting_variables(), **variables, **ours}


def preloaded_library() -> Path:
    """Return the library that programs get; raise MachineError if it cannot be compiled."""
    return find_library("seam")
