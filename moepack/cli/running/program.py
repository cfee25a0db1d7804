"""Programs with the experts of a model: `run MODEL -- PROGRAM`, and `serve`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import click

from moepack.cli.running.starting import fetch, learner_of, say_memory, trace_to
from moepack.cli.shared.argument_names import as_typed
from moepack.cli.shared.progress import ProgressLines, progress
from moepack.cli.shared.terminal import complain, is_quiet, say
from moepack.common.errors import MoepackError, RequestError
from moepack.common.sizes import size_text

if TYPE_CHECKING:
    from moepack.pack.reading.pack import Pack
    from moepack.running.pager.pager import Pager
    from moepack.running.programs.runner import ProgramEnd

_SECONDS_BETWEEN = 5.0


def run_program_command(
    source_or_pack: Sequence[str],
    command: Sequence[str],
    *,
    stats: bool,
    is_ours: bool = False,
    model_words: Callable[[Pack], Sequence[str]] = lambda pack: (),
    **options: Any,
) -> None:
    """Run a program with the experts of a model, and end as it ends.

    `options` are the pager's. `is_ours`: it is our own server. `model_words` returns words for the
    end of the command, by the model.
    """
    from moepack.pack.opening.open_model import open_model
    from moepack.running.pager.pager import PagerOptions
    from moepack.running.programs.command import find_misled_program, llama_variables
    from moepack.running.programs.process import end_like
    from moepack.running.programs.runner import run_program
    from moepack.running.programs.server_options import server_options

    if not command:
        raise RequestError("no program is named", hint="moepack run MODEL -- PROGRAM ARGUMENTS")
    trace_path = options["trace_path"]
    with open_model(fetch(source_or_pack)) as pack, trace_to(trace_path, pack) as trace:
        pack.require_files()
        command = [*command, *model_words(pack)]
        memory, pin, beside = options["memory"], options["pin"], 0
        if is_ours:
            command, beside = server_options(pack, command, memory, pin or 0)
        ways = options["policy"], pin, options["backend"], options["check"]
        variables = {} if is_ours else llama_variables(command)
        if program := find_misled_program(command, pack.file_paths):
            note = f"no word of this command is the model's path: give {program} -m {{}}"
            complain("note", f'{note}, or in the text of a shell -m "$MOEPACK_MODEL"')
        watcher = _Watcher(stats, variables)
        end = run_program(
            pack,
            command,
            PagerOptions(memory, *ways, beside=beside),
            variables=variables,
            trace=trace,
            learner=learner_of(pack, options["no_learn"]),
            begun=watcher.begun,
            failed=watcher.failed,
            tick=watcher.tick,
            pinning=watcher.pinning,
        )
    _report_end(end, is_ours)
    click.get_current_context().exit(end_like(end.returncode))


def _report_end(end: ProgramEnd, is_ours: bool) -> None:
    """Print what a program needed, and why it was killed or never mapped the model."""
    from moepack.host.memory_limits import limit_text
    from moepack.report import measure_text

    if end.has_mapped and not is_quiet():
        say(measure_text.pager_usage(end.usage), err=True)
    if end.is_out_of_memory:
        experts = size_text(end.usage.resident_length)
        reason = f"out of memory: {limit_text()}; experts: {experts}"
        complain("error", f"the program was killed, {reason}")
        complain(
            "hint",
            "less for experts: --memory SIZE; less beside them: a shorter context (-c), fewer "
            "tokens at once (-ub), fewer earlier texts (--cache-ram)",
        )
    elif not end.has_mapped and not is_ours:
        complain(
            "note",
            "the program has ended and never mapped the model: give it the path {}, and have it "
            "map the file, not read it (use_mmap in llama.cpp's interfaces)",
        )


class _Watcher:
    """Prints the progress of a program, and now and then its statistics."""

    def __init__(self, stats: bool, variables: Mapping[str, str]) -> None:
        self._stats, self._variables = stats, variables
        self._next = time.monotonic() + _SECONDS_BETWEEN
        self._last = ""
        self._pinning: ProgressLines | None = None
        self._stack = ExitStack()

    def pinning(self, length: int, total: int) -> None:
        if self._pinning is None and not is_quiet():
            self._pinning = self._stack.enter_context(progress("pinning experts"))
        if self._pinning is not None:
            self._pinning(length, total)

    def begun(self, pager: Pager) -> None:
        self._stack.close()
        if is_quiet():
            return
        say_memory(pager)
        if self._variables:
            words = ", ".join(f"{name}={value}" for name, value in self._variables.items())
            say(f"set for the program: {words}", err=True)

    def tick(self, pager: Pager) -> None:
        if not self._stats or time.monotonic() < self._next:
            return
        from moepack.report import measure_text

        self._next = time.monotonic() + _SECONDS_BETWEEN
        if (line := measure_text.pager_usage(pager.usage)) != self._last:
            say(line, err=True)
            self._last = line

    def failed(self, error: MoepackError) -> None:
        complain("error", str(error))
        if error.hint:
            complain("hint", as_typed(error.hint, click.get_current_context().command))
