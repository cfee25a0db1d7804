"""The commands of `export`: one for each format that the registry lists."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

import click

import moepack
from moepack.cli.shared.options import (
    dry_run_option,
    file_option,
    force_option,
    pack_argument,
    progress_options,
    resume_option,
    size_option,
    threads_option,
)
from moepack.cli.shared.parameters import OutputFolder, ResumableFile
from moepack.cli.shared.progress import progress
from moepack.cli.shared.terminal import show, sum_up
from moepack.cli.words.front import Commands, with_help

if TYPE_CHECKING:
    from moepack.pack.engines.contract import Engine, ExportOption


class Formats(Commands):
    """The commands of all formats that the library lists; its help shows what each is."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        del self.commands  # until they are asked for: most commands do without the formats

    @cached_property
    def commands(self) -> dict[str, click.Command]:  # type: ignore[override]
        """The commands by name."""
        return {engine.name: with_help(_command(engine)) for engine in moepack.export_formats()}

    def format_options(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """Write what each format is, and the options."""
        from moepack.report import pack_text

        for engine in moepack.export_formats():
            with formatter.section(f"{engine.name}, for {engine.title}"):
                formatter.write_dl(pack_text.format_facts(engine), col_max=10, col_spacing=2)
        click.Command.format_options(self, context, formatter)


@click.group(cls=Formats)
def export() -> None:
    """Write a pack in the format of another engine."""


def _command(engine: Engine) -> click.Command:
    """Return the command that exports to a format, with its options."""
    target = _target(engine)
    suffix = "" if engine.default_name else f" -o {'experts' if engine.is_folder else 'model.'}"
    if suffix.endswith("."):
        suffix += engine.name
    example = f"moepack export {engine.name} model.moepack{suffix}"

    def run(pack_path: str, target: str | None, **options: Any) -> None:
        from moepack.report import pack_text

        with progress(None, "exporting") as advance:
            summary = moepack.export(engine.name, pack_path, target, progress=advance, **options)
        if summary.dry_run:
            show(summary, pack_text.export_plan)
        else:
            sum_up(summary, pack_text.exported, summary.command)

    command: Any = run
    for option in (
        progress_options,
        threads_option,
        force_option,
        resume_option,
        dry_run_option,
        *map(_option, reversed(engine.options)),
        target,
        pack_argument,
    ):
        command = option(command)
    text = f"{engine.summary}\n\nExample: {example}"
    return click.command(engine.name, help=text)(command)


def _target(engine: Engine) -> Any:
    kind = OutputFolder() if engine.is_folder else ResumableFile()
    metavar = "DIR" if engine.is_folder else "FILE"
    what = "Folder" if engine.is_folder else "File"
    return click.option(
        "-o",
        "--output",
        "target",
        required=engine.default_name is None,
        type=kind,
        metavar=metavar,
        help=f"{what} to write." + ("  [default: in the pack]" if engine.default_name else ""),
    )


def _option(option: ExportOption) -> Any:
    name = f"--{option.name}"
    if option.kind == "size":
        return size_option(name, least=0, default=option.default, help=option.help)
    if option.kind == "file":
        return file_option(name, help=option.help)
    choices = click.Choice(option.choices)
    return click.option(name, type=choices, default=option.default, help=option.help)
