"""What all commands print: results, summaries, how much of them, and in which colours.

Here alone text goes to the streams. Names come from files, so that nothing that a terminal would
obey is printed, but for what moepack draws itself.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import click

from moepack import escaping
from moepack.cli.argument_names import as_typed
from moepack.cli.parameters import InputFile, PathName, output_is_taken

if TYPE_CHECKING:
    from moepack.report.page import Page

Facts = TypeVar("Facts")

_VERBOSITY = "moepack.verbosity"

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")

threads_option = click.option(
    "--threads",
    type=click.IntRange(1, 256),
    default=4,
    show_default=True,
    help="How many threads read and write.",
)

source_or_pack_argument = click.argument(
    "source_or_pack", nargs=-1, required=True, type=PathName(), metavar="SOURCE_OR_PACK"
)

machine_option = click.option(
    "--machine",
    "machine_path",
    type=InputFile(),
    metavar="FILE",
    help="What runs it: see `moepack machine`.",
)

source_option = click.option(
    "--source",
    "source_paths",
    type=PathName(),
    multiple=True,
    metavar="SOURCE",
    help="The model that the pack was made from, to compare with; may be repeated.",
)


def _set_verbosity(level: int) -> Callable[[click.Context, click.Parameter, bool], None]:
    def remember(context: click.Context, _parameter: click.Parameter, is_given: bool) -> None:
        if is_given and context.meta.setdefault(_VERBOSITY, level) != level:
            raise click.UsageError("-q and -v at once")

    return remember


quiet_option = click.option(
    "-q",
    "--quiet",
    is_flag=True,
    expose_value=False,
    callback=_set_verbosity(-1),
    help="Print errors alone, and JSON.",
)

verbose_option = click.option(
    "-v",
    "--verbose",
    is_flag=True,
    expose_value=False,
    callback=_set_verbosity(1),
    help="Print more, such as the time that it took.",
)


def is_quiet() -> bool:
    """Say whether only errors are to be printed."""
    return _verbosity() < 0


def is_verbose() -> bool:
    """Say whether more than usual is to be printed."""
    return _verbosity() > 0


def _verbosity() -> int:
    context: Any = click.get_current_context(silent=True)
    return 0 if context is None else int(context.meta.get(_VERBOSITY, 0))


def say(text: str = "", *, err: bool = False) -> None:
    """Print lines for people, with control characters escaped."""
    click.echo(escaping.lines(text), err=err)


def pass_on(texts: Iterable[str]) -> None:
    """Print texts that others wrote, such as a model, or that are for programs.

    For a terminal control characters are escaped; pipes and files get the texts as they are.
    """
    sys.stdout.writelines(map(escaping.lines, texts) if sys.stdout.isatty() else texts)


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
    names = [*_texts(context.params.values())]
    laid_out = page if isinstance(page, Page) else Page(page)
    typed = laid_out.with_texts(lambda text: as_typed(text, context.command, names))
    say(typed.text(columns(err=err)), err=err)


def _texts(values: Iterable[object]) -> Iterator[str]:
    """Yield the texts among values, and those of values that are several."""
    for value in values:
        if isinstance(value, str):
            yield value
        elif isinstance(value, tuple):
            yield from _texts(value)


def show(
    facts: Facts,
    as_json: bool,
    render: Callable[[Facts], Page | str],
    next_step: str | None = None,
) -> None:
    """Print what was asked for: as one JSON object, or as `render` writes it for people.

    Where standard output is for a file, it goes to standard error. People on a terminal are told
    the `next_step`, a command line to paste; programs that read the answer are not.
    """
    from moepack.report.json_text import json_text
    from moepack.report.printable import printable

    err = output_is_taken()
    if as_json:
        say(json_text(facts), err=err)
        return
    lay_out(render(printable(facts)), err=err)
    if columns(err=err) is not None:
        suggest(next_step)


def sum_up(
    facts: Facts,
    as_json: bool,
    render: Callable[[Facts], Page | str],
    next_step: str | None = None,
) -> None:
    """Print, as `show` does, what a command has done; quiet ones print it only as JSON.

    The `next_step` is told wherever that is, as in the log of a job.
    """
    if as_json or not is_quiet():
        show(facts, as_json, render)
    if not as_json:
        suggest(next_step)


def suggest(command_line: str | None) -> None:
    """Print a command line to paste, `next: …`, if there is one; quiet commands do not."""
    if command_line is not None and not is_quiet():
        say(f"next: {command_line}", err=output_is_taken())


def complain(word: str, text: str) -> None:
    """Print `error: …`, `hint: …` or `note: …` to standard error, in colour where wanted.

    It is one line, whatever is in it; a terminal gets it in lines that it does not break, but for
    hints, which have commands to paste.
    """
    line = f"{word}: {escaping.one_line(text)}"
    if word != "hint" and (width := columns(err=True)) is not None:
        from moepack.report.widths import wrapped

        line = "\n".join(wrapped(line, width))
    if _has_colours():
        label = click.style(f"{word}:", fg="red" if word == "error" else "cyan", bold=True)
        line = label + line.removeprefix(f"{word}:")
    click.echo(line, err=True)


def _has_colours() -> bool:
    """Say whether standard error is a terminal with colours; NO_COLOR (no-color.org) says no."""
    is_plain = os.environ.get("NO_COLOR") or os.environ.get("TERM", "dumb") == "dumb"
    return not is_plain and sys.stderr.isatty()
