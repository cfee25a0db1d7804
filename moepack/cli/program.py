"""The command `run MODEL -- PROGRAM`: any llama.cpp program, with its experts brought to it."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from moepack.cli.terminal import complain, is_quiet, say
from moepack.errors import MoepackError, RequestError

if TYPE_CHECKING:
    from moepack.pager.pager import Pager

_PAGERS = {"source_or_pack", "memory", "policy", "pin", "backend", "check", "stats"}
"""The parameters of `run` that are not the program's own matter."""
_SECONDS_BETWEEN = 5.0


def run_in_program(
    context: click.Context,
    source_or_pack: Sequence[str],
    command: Sequence[str],
    stats: bool,
    options: Mapping[str, Any],
) -> None:
    """Run a command with the experts of a model, and end as it ends."""
    from moepack.pager.pager import PagerOptions
    from moepack.programs.command import micro_batch
    from moepack.programs.process import end_like
    from moepack.programs.runner import Listener, run_program
    from moepack.report import program_text
    from moepack.running.model import open_model

    if not command:
        raise RequestError("no program is named", hint="moepack run MODEL -- PROGRAM ARGUMENTS")
    _check_options(context)
    memory = options["memory"]
    with open_model(source_or_pack) as pack:
        pager_options = PagerOptions(
            memory=memory,
            policy=options["policy"],
            pinned=options["pin"],
            backend=options["backend"],
            check=options["check"],
            micro_batch=micro_batch(command[1:], os.environ),
        )
        watcher = _Watcher(stats)
        listener = Listener(watcher.begun, _say_failed, watcher.tick)
        end = run_program(pack, command, pager_options, listener)
    if not end.has_mapped:
        complain("note", "the program has ended and never mapped the model: give it the path {}")
    elif not is_quiet():
        say(program_text.usage(end.usage), err=True)
    context.exit(end_like(end.returncode))


class _Watcher:
    """Prints what is done, and now and then what was needed."""

    def __init__(self, stats: bool) -> None:
        self._stats = stats
        self._next = time.monotonic() + _SECONDS_BETWEEN
        self._last = ""

    def begun(self, pager: Pager, variables: Mapping[str, str]) -> None:
        if is_quiet():
            return
        from moepack.report import program_text

        say(program_text.beginning(pager.budget, pager.floor), err=True)
        if variables:
            words = ", ".join(f"{name}={value}" for name, value in variables.items())
            say(f"set for the program: {words}", err=True)

    def tick(self, pager: Pager) -> None:
        if not self._stats or time.monotonic() < self._next:
            return
        from moepack.report import program_text

        self._next = time.monotonic() + _SECONDS_BETWEEN
        if (line := program_text.usage(pager.usage)) != self._last:
            say(line, err=True)
            self._last = line


def _check_options(context: click.Context) -> None:
    """Raise RequestError for options that are the program's matter."""
    for parameter in context.command.params:
        name = parameter.name or ""
        is_given = context.get_parameter_source(name) is ParameterSource.COMMANDLINE
        if is_given and name not in _PAGERS and parameter.expose_value:
            option = max(parameter.opts, key=len)
            raise RequestError(
                f"{option} does not go with a program of one's own",
                hint="give the program an option of its own, behind its name",
            )


def _say_failed(error: MoepackError) -> None:
    complain("error", str(error))
