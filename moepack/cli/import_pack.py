"""The command `import`."""

from __future__ import annotations

from functools import partial
from typing import Any

import click

import moepack
from moepack.cli.shared.exit_codes import ExitCode
from moepack.cli.shared.options import (
    folder_option,
    hotness_option,
    layout_option,
    progress_options,
    resume_option,
    threads_option,
)
from moepack.cli.shared.parameters import PathName
from moepack.cli.shared.progress import progress
from moepack.cli.shared.terminal import is_verbose, next_line, show, sum_up
from moepack.cli.words.typed_words import HELP_OPTIONS, command_line
from moepack.common.errors import RequestError


class Import(click.Command):
    """The command, whose first word is a format; any file is rather a trace."""

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        """Parse the words; raise RequestError if none of them is a format."""
        names = [word for word in args if not word.startswith("-")]
        if names and not set(HELP_OPTIONS) & set(args):
            formats = [engine.name for engine in moepack.export_formats()]
            if not set(formats) & set(names):
                is_file = bool({".", "/"} & set(names[0]))
                hint = command_line("trace import", args) if is_file else "moepack import --help"
                problem = f"no such format: {names[0]}"
                raise RequestError(problem, expected=", ".join(formats), hint=hint)
        return super().parse_args(context, args)


@click.command("import", cls=Import)
@click.argument("engine", metavar="FORMAT")
@click.argument("path", type=PathName(), metavar="FILES")
@click.option(
    "--source",
    "source_paths",
    type=PathName(),
    multiple=True,
    metavar="SOURCE",
    help="Model that FILES were made of; may be repeated.  [default: the one that they name]",
)
@folder_option("Folder of the new pack.")
@layout_option
@hotness_option
@resume_option
@threads_option
@progress_options
def import_pack(
    engine: str, path: str, source_paths: tuple[str, ...], target: str, **options: Any
) -> None:
    """Make a pack of the GGUF of another engine's experts, and compare these with it.

    FILES are the engine's file or folder, in a FORMAT that `moepack export` lists.

    Example: moepack import sglang experts --source model.gguf -o model.moepack
    """
    from moepack.report import import_text, verification_text

    with progress(None, "importing") as advance:
        summary = moepack.import_pack(
            engine, path, source_paths or None, target, progress=advance, **options
        )
    report = summary.report
    if report.findings:
        shown = None if is_verbose() else verification_text.SHOWN_FINDINGS
        show(summary, partial(import_text.imported, shown=shown))
        raise SystemExit(ExitCode.DIFFERENCES)
    sum_up(summary, import_text.imported, next_line("run", summary.pack.path))
