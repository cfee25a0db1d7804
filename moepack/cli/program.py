"""Commands that run a program with the experts of a model: `run MODEL -- PROGRAM`, and `serve`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from moepack.cli.progress import Progress, progress
from moepack.cli.terminal import complain, is_quiet, lay_out, say
from moepack.errors import MoepackError, RequestError
from moepack.sizes import size_text

if TYPE_CHECKING:
    from moepack.pager.pager import Pager
    from moepack.programs.learner import Learner
    from moepack.programs.trace_writer import TraceWriter
    from moepack.reading.pack import Pack

_PAGERS = {
    *("source_or_pack", "memory", "policy", "pin", "backend", "check", "trace_path"),
    *("no_learn", "stats"),
}
"""The parameters of `run` that are not the program's own matter."""
_SECONDS_BETWEEN = 5.0

WordsChange = Callable[[click.Context, click.Command, list[str]], list[str]]


class CommandWithRest(click.Command):
    """A command line that may end with `--` and what is for a program; its argument is `rest`.

    Without `--` that is None. `rest` is what usage calls it. `expand` and `settle` return the words
    as the options of the command have them, where people type others: before its options are
    checked, and afterwards.
    """

    def __init__(
        self,
        *arguments: Any,
        rest: str,
        expand: WordsChange | None = None,
        settle: WordsChange | None = None,
        **options: Any,
    ) -> None:
        super().__init__(*arguments, **options)
        self._rest = rest
        self._expand = expand
        self._settle = settle

    def expand_words(self, context: click.Context, words: list[str]) -> list[str]:
        """Return the words with what other programs call options of ours. Raises UsageError."""
        return words if self._expand is None else self._expand(context, self, words)

    def settle_words(self, context: click.Context, words: list[str]) -> list[str]:
        """Return the words, whose options are the command's, as it parses them."""
        return words if self._settle is None else self._settle(context, self, words)

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        """Parse what stands before `--`."""
        before, rest = args, None
        if "--" in args:
            place = args.index("--")
            before, rest = args[:place], tuple(args[place + 1 :])
        left = super().parse_args(context, before)
        context.params["rest"] = rest
        return left

    def collect_usage_pieces(self, context: click.Context) -> list[str]:
        """Return the pieces of the usage line."""
        return [*super().collect_usage_pieces(context), f"[-- {self._rest}]"]


def is_pager_option(command: click.Command, option: click.Option) -> bool:
    """Return whether an option goes with a program behind `--`: all of them but for `run`."""
    return command.name != "run" or option.name in _PAGERS or not option.expose_value


def check_options(context: click.Context) -> None:
    """Raise RequestError for options of `run` that are the program's matter."""
    for parameter in context.command.params:
        name = parameter.name or ""
        is_given = context.get_parameter_source(name) is ParameterSource.COMMANDLINE
        if is_given and name not in _PAGERS and parameter.expose_value:
            option = max(parameter.opts, key=len)
            raise RequestError(
                f"{option} does not go with a program of one's own",
                hint="give the program an option of its own, behind its name",
            )


def run_command(
    context: click.Context,
    source_or_pack: Sequence[str],
    command: Sequence[str],
    /,
    *,
    stats: bool,
    is_ours: bool = False,
    model_words: Callable[[Pack], Sequence[str]] = lambda pack: (),
    **options: Any,
) -> None:
    """Run a command with the experts of a model, and end as it ends.

    `options` are the pager's. Our own server needs to be told less. `model_words` returns what ends
    the command, by the model.
    """
    from moepack.extras import require
    from moepack.packing.opening import open_model
    from moepack.pager.pager import PagerOptions
    from moepack.programs.command import llama_variables, micro_batch
    from moepack.programs.micro_batch import server_options
    from moepack.programs.process import end_like
    from moepack.programs.runner import Listener, run_program
    from moepack.report import program_text

    if not command:
        raise RequestError("no program is named", hint="moepack run MODEL -- PROGRAM ARGUMENTS")
    trace_path = options["trace_path"]
    with open_model(source_or_pack) as pack, trace_to(trace_path, pack) as trace:
        command = [*command, *model_words(pack)]
        if is_ours:
            require("run")
            command = server_options(pack, command, options["memory"], options["pin"] or 0)
        pager_options = PagerOptions(
            memory=options["memory"],
            policy=options["policy"],
            pinned=options["pin"],
            backend=options["backend"],
            check=options["check"],
            micro_batch=micro_batch(command[1:], os.environ),
        )
        variables = {} if is_ours else llama_variables(command, os.environ)
        watcher = _Watcher(stats, variables)
        listener = Listener(watcher.begun, _say_failed, watcher.tick, watcher.pinning)
        learner = learner_of(pack, options["no_learn"])
        end = run_program(pack, command, pager_options, listener, variables, trace, learner)
    if end.has_mapped and not is_quiet():
        say(program_text.usage(end.usage), err=True)
    elif not end.has_mapped and not is_ours:
        complain(
            "note",
            "the program has ended and never mapped the model: give it the path {}, and have it "
            "map the file, not read it (use_mmap in llama.cpp's interfaces)",
        )
    context.exit(end_like(end.returncode))


@contextmanager
def trace_to(
    path: str | None, pack: Pack, *, has_requests: bool = False
) -> Iterator[TraceWriter | None]:
    """Give what writes a trace, None without a path, and say where there is none in the end."""
    from moepack.programs.trace_writer import TraceWriter

    if path is None:
        yield None
        return
    with TraceWriter(path, pack, has_requests=has_requests) as trace:
        yield trace
    if trace.is_empty:
        complain("note", "no router has chosen anything: no trace was written")


def learner_of(pack: Pack, no_learn: bool) -> Learner | None:
    """Return what learns from a run, None where nothing does; it says what goes wrong."""
    from moepack.programs.learner import make_learner

    return make_learner(pack, learn=not no_learn, notice=partial(complain, "note"))


def say_memory(pager: Pager) -> None:
    """Print how much memory experts have, and a note where this machine has less."""
    from moepack.machine.memory_limits import read_memory
    from moepack.report import program_text

    lay_out(program_text.beginning_of(pager), err=True)
    machine = int(read_memory().value)
    if min(pager.budget, pager.whole_length) > machine:
        complain("note", f"that is more than this machine has: {size_text(machine)}")


class _Watcher:
    """Prints what is done, and now and then what was needed."""

    def __init__(self, stats: bool, variables: Mapping[str, str]) -> None:
        self._stats = stats
        self._variables = variables
        self._next = time.monotonic() + _SECONDS_BETWEEN
        self._last = ""
        self._pinning: Progress | None = None
        self._stack = ExitStack()

    def pinning(self, length: int, total: int) -> None:
        if self._pinning is None and not is_quiet():
            self._pinning = self._stack.enter_context(progress(None, "pinning experts"))
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
        from moepack.report import program_text

        self._next = time.monotonic() + _SECONDS_BETWEEN
        if (line := program_text.usage(pager.usage)) != self._last:
            say(line, err=True)
            self._last = line


def _say_failed(error: MoepackError) -> None:
    complain("error", str(error))
