"""Printing of results, summaries, errors and hints, in colour and as long as is wanted.

The only module that writes text to the streams. Names come from files: control characters in them
are escaped, so that a terminal obeys only the sequences that moepack draws itself.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from moepack.cli.shared.argument_names import as_typed
from moepack.cli.shared.parameters import output_is_taken
from moepack.common import escaping
from moepack.common.errors import RequestError

if TYPE_CHECKING:
    from moepack.report.page import Page

Facts = TypeVar("Facts")

_JSON = "json"


def remember(
    setting: str, value: object = None
) -> Callable[[click.Context, click.Parameter, Any], Any]:
    """Return the callback of an option that sets how the command prints.

    `setting` is `form`, `verbosity`, `log` or `progress`. If `value` is not None the option is a
    flag for it, else the typed text is the value. Raises UsageError for two options that differ.
    """

    def callback(context: click.Context, parameter: click.Parameter, typed: Any) -> Any:
        option = (typed if value is None else value, parameter.opts[0])
        if typed:
            _, other = first = context.meta.setdefault(f"moepack.{setting}", option)
            if first != option:
                raise click.UsageError(f"{parameter.opts[0]} and {other} at once")
        return typed

    return callback


def _setting(name: str) -> Any:
    context = click.get_current_context(silent=True)
    value, _ = (None, "") if context is None else context.meta.get(f"moepack.{name}", (None, ""))
    return value


def is_json_progress() -> bool:
    """Return whether progress is printed as a JSON object for each state."""
    return bool(_setting("progress") == _JSON)


def is_json_log() -> bool:
    """Return whether the command prints a JSON object for each event and nothing else."""
    return bool(_setting("log") == _JSON)


def is_json() -> bool:
    """Return whether the command prints one JSON object and nothing else."""
    return bool(_setting("form") == _JSON)


def is_csv() -> bool:
    """Return whether the command prints CSV and nothing else."""
    return _is_for_programs() and not is_json()


def _is_for_programs() -> bool:
    return _setting("form") is not None


def is_quiet() -> bool:
    """Return whether only errors are to be printed."""
    return bool(_setting("verbosity") == "quiet")


def is_verbose() -> bool:
    """Return whether more than usual is to be printed."""
    return bool(_setting("verbosity") == "verbose")


def say(text: str = "", *, err: bool = False) -> None:
    """Print lines for people, with control characters escaped."""
    click.echo(escaping.lines(text), err=err)


def pass_on(text: str, *, err: bool = False) -> None:
    """Print text of a model, or for programs: escaped on a terminal, elsewhere as it is."""
    stream = sys.stderr if err else sys.stdout
    stream.write(escaping.lines(text) if stream.isatty() else text)


def log_event(event: str, facts: object) -> None:
    """Print an event of a command with `is_json_log`; `facts` is a mapping or a record."""
    from moepack.report.facts import to_json
    from moepack.running.serving.server_log import event_line

    fields: Any = to_json(facts)
    click.echo(event_line(event, fields), err=True)


def draw(text: str) -> None:
    """Write control sequences of our own to standard error."""
    click.echo(text, nl=False, err=True)


def columns(*, err: bool = False) -> int | None:
    """Return the columns of the terminal that is printed to; None for pipes and files."""
    stream = sys.stderr if err else sys.stdout
    return shutil.get_terminal_size().columns if stream.isatty() else None


def lay_out(page: Page | str, *, err: bool = False) -> None:
    """Print a page in lines that a terminal does not break, with arguments as they are typed."""
    from moepack.report.page import Page

    context = click.get_current_context()
    values = context.params.values()
    names = [name for value in values for name in (value if isinstance(value, tuple) else (value,))]
    laid_out = page if isinstance(page, Page) else Page(page)
    width = columns(err=err)
    say(laid_out.text(width, lambda text: as_typed(text, context.command, names)), err=err)


def announce(facts: Facts, render: Callable[[Facts], Page | str]) -> None:
    """Print the plan of some work before it begins, except in JSON, in CSV and if quiet."""
    from moepack.report.facts import printable

    if not _is_for_programs() and not is_quiet():
        lay_out(render(printable(facts)))


def show(facts: Facts, render: Callable[[Facts], Page | str], next_step: str | None = None) -> None:
    """Print facts: as one JSON object, their rows as CSV, or as `render` writes them for people.

    If standard output is taken by a file, they go to standard error. On a terminal the `next_step`
    follows, a command line to paste; programs that read the answer do not get it.
    """
    from moepack.report.facts import json_text, printable, rows_csv

    err = output_is_taken()
    if is_json():
        say(json_text(facts), err=err)
        return
    if is_csv():
        pass_on(rows_csv(facts, _setting("form")), err=err)
        return
    lay_out(render(printable(facts)), err=err)
    if columns(err=err) is not None:
        suggest(next_step)


def sum_up(
    facts: Facts, render: Callable[[Facts], Page | str], next_step: str | None = None
) -> None:
    """Print, as `show` does, a summary of the work done; if quiet, only as JSON or CSV.

    The `next_step` is printed everywhere, as in the log of a job.
    """
    if _is_for_programs() or not is_quiet():
        show(facts, render)
    suggest(next_step)


def suggest(command_line: str | None) -> None:
    """Print `next:` and a command line to paste, except in JSON, in CSV and if quiet."""
    if command_line is not None and not is_quiet() and not _is_for_programs():
        say(f"next: {command_line}", err=output_is_taken())


def next_line(*words: str) -> str:
    """Return a command line of moepack, to be suggested."""
    return escaping.shell_words(("moepack", *words))


def complain(word: str, text: str) -> None:
    """Print `error: …`, `hint: …` or `note: …` to standard error, on terminals in colour.

    It is one line, whatever the text. On a terminal it is broken at words, except for hints, which
    have commands to paste.
    """
    if is_json_log():
        log_event(word, {"text": text})
        return
    line = f"{word}: {escaping.one_line(text)}"
    if word != "hint" and (width := columns(err=True)) is not None:
        from moepack.report.page import wrapped

        line = "\n".join(wrapped(line, width))
    is_plain = os.environ.get("NO_COLOR") or os.environ.get("TERM", "dumb") == "dumb"
    if sys.stderr.isatty() and not is_plain:  # as no-color.org has it
        label = click.style(f"{word}:", fg="red" if word == "error" else "cyan", bold=True)
        line = label + line.removeprefix(f"{word}:")
    click.echo(line, err=True)


def confirm(deletion: str, option: str) -> None:
    """Ask on the terminal for the word that deletes; raise RequestError for anything else."""
    if not sys.stdin.isatty():
        hint = f"this needs a terminal to confirm it on, or {option}"
        raise RequestError(f"not confirmed: {deletion}", hint=hint)
    say(deletion, err=True)
    word = click.prompt("Type delete to continue", default="", show_default=False, err=True)
    if word != "delete":
        raise RequestError("not confirmed: nothing was touched")
