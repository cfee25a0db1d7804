"""How models are run: fetched first, as programs of one's own, or by the server behind `run`."""

from __future__ import annotations

import secrets
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import moepack
from moepack.cli.shared.argument_names import as_typed
from moepack.cli.shared.progress import ProgressLines, progress, watched_progress
from moepack.cli.shared.terminal import (
    complain,
    is_json,
    is_json_log,
    is_quiet,
    is_verbose,
    lay_out,
    log_event,
    say,
)
from moepack.common.errors import MoepackError, RequestError
from moepack.common.paths import is_remote, path_texts
from moepack.common.sizes import Size, size_text

if TYPE_CHECKING:
    from moepack.host.processors import OtherWork
    from moepack.pack.reading.pack import Pack
    from moepack.packing.fetched import FetchPlan
    from moepack.running.programs.learned import Learner
    from moepack.running.programs.runner import ProgramEnd
    from moepack.running.programs.trace_writer import TraceWriter
    from moepack.running.serving.model_server import ModelServer
    from moepack.running.serving.served_model import ServedModel
    from moepack.running.serving.server_options import ServerPlan
    from moepack.running.streaming.control import ExpertUsage
    from moepack.running.streaming.supervisor import Supervisor

LLAMA_SERVER = "llama-server"
_SECONDS_BETWEEN = 5.0


def require_engine(model: Sequence[str], server_program: str | None) -> None:
    """Raise MachineError if extras are missing that running a model takes, before it is fetched.

    Where `server_program` is a llama-server, llama.cpp need not be there.
    """
    from moepack.common.extras import LLAMA_CPP, require

    needless = () if server_program is None else LLAMA_CPP[:1]
    require("run", *["remote"] * any(map(is_remote, model)), needless=needless)


def fetch(model: Sequence[str]) -> Sequence[str]:
    """Return the paths of a model on this machine; one that is elsewhere is fetched, with a bar."""
    if not any(map(is_remote, model)):
        return model
    from moepack.report import pack_text
    from moepack.report.facts import printable

    def announce(plan: FetchPlan) -> None:
        if not is_quiet() and not is_json() and not is_json_log():
            lay_out(pack_text.fetching(printable(plan)), err=True)

    with progress("fetching the model") as advance:
        notice = None if is_quiet() else partial(complain, "note")
        path = moepack.fetch_model(model, planned=announce, notice=notice, progress=advance)
    return path_texts(path)


@contextmanager
def trace_to(
    path: str | None, pack: Pack, *, has_requests: bool = False
) -> Iterator[TraceWriter | None]:
    """Yield a writer for a trace, None without a path; a trace that stays empty is noted."""
    from moepack.running.programs.trace_writer import TraceWriter

    if path is None:
        yield None
        return
    with TraceWriter(path, pack, has_requests=has_requests) as trace:
        yield trace
    if trace.is_empty:
        complain("note", "no router has selected an expert: no trace was written")


def learner_of(pack: Pack, no_learn: bool) -> Learner | None:
    """Return the learner of a run, None if nothing is learned; its problems become notes."""
    from moepack.running.programs.learned import make_learner

    return make_learner(pack, learn=not no_learn, notice=partial(complain, "note"))


def say_memory(supervisor: Supervisor) -> None:
    """Print the memory for experts, and a note if this machine has less."""
    from moepack.host.memory_limits import limit_text, read_memory
    from moepack.report import measure_text

    lay_out(measure_text.expert_memory(supervisor), err=True)
    length = supervisor.parts.total or min(supervisor.budget, supervisor.whole_length)
    excess = length - read_memory()
    if excess > 0:
        complain("note", f"that is {size_text(excess)} too much: {limit_text()}")
    elif supervisor.is_short:
        complain("note", f"more than is free, less a margin for other programs: {limit_text()}")


def note(text: str) -> None:
    """Print a note, unless the command is quiet."""
    if not is_quiet():
        complain("note", text)


def find_server(program: str | None) -> Path | None:
    """Return the path of an installed llama-server; None without one: then it is moepack's own.

    None is started unasked: it may be of any version, and its GPU may compute other answers, or be
    a slow one. So it is only noted. Raises CommandError.
    """
    from moepack.host.gpus import has_gpu
    from moepack.running.programs.executable import CommandError, find_executable

    if program is not None:
        return find_executable(program)
    with suppress(CommandError):
        path = find_executable(LLAMA_SERVER)
        if has_gpu():
            note(
                f"moepack's own server does not use this machine's GPU; --server {LLAMA_SERVER}, "
                f"which is {path}, may"
            )
    return None


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
    total_memory: Size | None,
    pin: Size | None,
    no_learn: bool,
    server_program: str | None,
    **supervisor: Any,
) -> ModelServer:
    """Return a server for this process alone, which has the only key, when its model is loaded.

    `options` are llama-server's; `other_work` has watched other programs for a while.
    """
    from moepack.running.serving.model_server import ModelServer
    from moepack.running.serving.server_memory import MemoryLimits
    from moepack.running.serving.server_options import checked_context, single_text_server
    from moepack.running.streaming.supervisor import StreamingOptions

    context = None if context is None else checked_context(pack, context, note)
    threads = _usual_threads(options) if threads is None else threads
    sizes: Any = {"context": context, "threads": threads, "micro_batch": micro_batch}
    limits = MemoryLimits(memory, total_memory, pin or 0)
    words, memory, beside = single_text_server(pack, options, limits, **sizes)
    began = time.monotonic()
    server = ModelServer(
        pack,
        StreamingOptions(memory, pinned=pin, beside=beside, **supervisor),
        options=words,
        api_key=secrets.token_urlsafe(),
        trace=trace,
        learner=learner_of(pack, no_learn),
        program=find_server(server_program),
    )
    if is_json() or is_quiet():
        return server
    try:
        say_memory(server.supervisor)
        with _loading(server.supervisor):
            _ = server.url
    except BaseException:
        server.close()
        raise
    _note_other_work(other_work.processor_count(server.processor_seconds()), threads)
    if is_verbose():
        say(f"loaded in {time.monotonic() - began:.1f} s", err=True)
        say(f"experts are read by {server.supervisor.backend}", err=True)
        say(f"options of llama-server: {shlex.join(words)}", err=True)
    return server


def _loading(supervisor: Supervisor) -> AbstractContextManager[None]:
    """Show the seconds in which a model is loaded, or the experts that are read meanwhile."""
    if not supervisor.warm_up_length:
        return watched_progress("loading the model", "s")
    return watched_progress("loading", "B", lambda: supervisor.warm_up_progress)


def _usual_threads(options: Sequence[str]) -> int | None:
    """Return the threads by llama-server's options or variables, or else by this process' limits.

    None if neither says it.
    """
    from moepack.host.processors import limited_threads
    from moepack.running.programs.command import THREADS

    if THREADS.is_set(options):
        return THREADS.number(options)
    return limited_threads()


def _note_other_work(busy: float | None, threads: int | None) -> None:
    """Print a note if other programs keep so many processors `busy` that threads wait."""
    from moepack.host.processors import fewer_threads

    if busy is not None and (fewer := fewer_threads(threads, busy)) is not None:
        note(f"other programs keep {busy:.1f} processors busy: -t {fewer} may be faster")


def run_program_command(
    source_or_pack: Sequence[str],
    command: Sequence[str],
    *,
    stats: bool,
    served_name: str | None = None,
    model_words: Callable[[Pack], Sequence[str]] = lambda pack: (),
    **options: Any,
) -> None:
    """Run a program with the experts of a model, and end as it ends.

    `options` are of memory. Our own server has a `served_name` for the model, and a `log_format`.
    `model_words` returns words for the end of the command, by the model.
    """
    from moepack.pack.opening.open_model import open_model
    from moepack.running.programs.command import find_misled_program, llama_variables
    from moepack.running.programs.process import end_like
    from moepack.running.programs.runner import run_program
    from moepack.running.serving.prompt_cache import prompt_cache_variables
    from moepack.running.serving.served_model import Watched
    from moepack.running.serving.server_options import served_model
    from moepack.running.streaming.supervisor import StreamingOptions

    if not command:
        raise RequestError("no program is named", hint="moepack run MODEL -- PROGRAM ARGUMENTS")
    with open_model(fetch(source_or_pack)) as pack, trace_to(options["trace_path"], pack) as trace:
        pack.require_files()
        command = [*command, *model_words(pack)]
        streaming = StreamingOptions(
            options["memory"],
            options["policy"],
            options["pin"],
            options["backend"],
            options["check"],
            prefetch=options["prefetch"],
        )
        if served_name is None:
            variables, model, kept = llama_variables(command), None, {}
        else:
            plan = _plan_server(pack, command, options)
            command = plan.words
            streaming = streaming._replace(memory=plan.memory, beside=plan.beside)
            model = served_model(pack, served_name, plan.beside.token_count, command)
            variables = Watched(None if is_quiet() else options["log_format"], model).variables
            kept = prompt_cache_variables(pack, options["prompt_cache"])
        if program := find_misled_program(command, pack.file_paths):
            problem = f"no word of this command is the model's path: give {program} -m {{}}"
            complain("note", f'{problem}, or in the text of a shell -m "$MOEPACK_MODEL"')
        watcher = _Watcher(stats, command, variables, model)
        end = run_program(
            pack,
            command,
            streaming,
            variables={**variables, **kept},
            trace=trace,
            learner=learner_of(pack, options["no_learn"]),
            begun=watcher.begun,
            failed=watcher.failed,
            tick=watcher.tick,
        )
    _report_end(end, is_ours=served_name is not None)
    click.get_current_context().exit(end_like(end.returncode))


def _plan_server(pack: Pack, command: Sequence[str], options: Mapping[str, Any]) -> ServerPlan:
    """Return the command of our own server with all options; note what texts have of a context."""
    from moepack.running.serving.server_memory import MemoryLimits, divided_text
    from moepack.running.serving.server_options import server_options

    limits = MemoryLimits(options["memory"], options["total_memory"], options["pin"] or 0)
    plan = server_options(pack, command, limits, options["wanted_context"])
    if (text := divided_text(plan.words)) is not None:
        note(text)
    return plan


def _report_end(end: ProgramEnd, is_ours: bool) -> None:
    """Print what a program needed, and why it was killed or never mapped the model."""
    from moepack.host.memory_limits import limit_text
    from moepack.report import measure_text

    if end.has_mapped and is_json_log():
        log_event("end", end.usage)
    elif end.has_mapped and not is_quiet():
        say(measure_text.expert_usage(end.usage), err=True)
    if end.is_out_of_memory:
        experts = size_text(end.usage.resident_length)
        reason = f"out of memory: {limit_text()}; experts: {experts}"
        complain("error", f"the program was killed, {reason}")
        in_all = " (for all together: --total-memory SIZE)" if is_ours else ""
        complain(
            "hint",
            f"less for experts: --memory SIZE{in_all}; less beside them: a shorter context (-c), "
            "fewer tokens at once (-ub), fewer earlier texts (--cache-ram)",
        )
    elif not end.has_mapped and not is_ours:
        complain(
            "note",
            "the program has ended and never mapped the model: give it the path {}, and have it "
            "map the file, not read it (use_mmap in llama.cpp's interfaces)",
        )


class _Watcher:
    """Prints the progress of a program, and now and then its statistics.

    `served` is the model of our own server.
    """

    def __init__(
        self,
        stats: bool,
        command: Sequence[str],
        variables: Mapping[str, str],
        served: ServedModel | None,
    ) -> None:
        self._stats, self._command, self._served = stats, command, served
        self._variables = {} if served is not None else variables
        self._next = time.monotonic() + _SECONDS_BETWEEN
        self._last: ExpertUsage | None = None
        self._first_reads = ProgressLines("pinned and most used experts", "B")
        self._first_length = 0

    def begun(self, supervisor: Supervisor) -> None:
        from moepack.report import serving_text

        if is_quiet():
            return
        if is_json_log():
            parts = supervisor.parts
            memory = {**parts._asdict(), "total": parts.total, "floor": supervisor.floor}
            facts = {"version": moepack.__version__, "model": self._served, "memory": memory}
            log_event("start", facts)
            return
        if self._served is not None:
            lay_out(serving_text.served_model(self._served), err=True)
        say_memory(supervisor)
        if self._served is not None and is_verbose():
            say(f"options of llama-server: {shlex.join(self._command[5:])}", err=True)
        if self._variables:
            words = ", ".join(f"{name}={value}" for name, value in self._variables.items())
            say(f"set for the program: {words}", err=True)

    def tick(self, supervisor: Supervisor) -> None:
        is_shown = not is_quiet() and not is_json_log()
        if (first := supervisor.warm_up_progress) is not None and is_shown:
            length, whole = first
            self._first_reads(length - self._first_length, whole)
            self._first_length = length
        if not self._stats or time.monotonic() < self._next:
            return
        from moepack.report import measure_text

        self._next = time.monotonic() + _SECONDS_BETWEEN
        if (usage := supervisor.usage) != self._last:
            self._last = usage
            if is_json_log():
                log_event("experts", usage)
            else:
                say(measure_text.program_usage(supervisor), err=True)

    def failed(self, error: MoepackError) -> None:
        complain("error", str(error))
        if error.hint:
            complain("hint", as_typed(error.hint, click.get_current_context().command))
