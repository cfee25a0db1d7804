"""The command `machine`: what is known of this computer, for forecasts."""

import contextlib
import os

import click

import moepack
from moepack.cli import next_steps
from moepack.cli.files import force_option, output_file
from moepack.cli.parameters import STANDARD_STREAM, OutputFile, OutputFolder, PathName
from moepack.cli.progress import progress
from moepack.cli.terminal import (
    complain,
    is_quiet,
    json_option,
    quiet_option,
    show,
    sum_up,
    verbose_option,
)
from moepack.storage.atomic import write_whole
from moepack.storage.regular_file import is_stream

model_argument = click.argument("model", nargs=-1, type=PathName(), metavar="[SOURCE_OR_PACK]")
seconds_option = click.option(
    "--seconds",
    type=click.FloatRange(0, 3600),
    default=20,
    show_default=True,
    help="Time for measuring; more makes it surer.",
)


@click.command()
@model_argument
@click.option(
    "-o",
    "--output",
    type=OutputFile(),
    metavar="FILE",
    help="The machine.toml to write; by default it is printed.",
)
@click.option(
    "--directory",
    type=OutputFolder(),
    metavar="DIR",
    help="Write the file to read from here, where no model is named.",
)
@seconds_option
@force_option
@quiet_option
@verbose_option
@json_option
def machine(
    model: tuple[str, ...],
    output: str | None,
    directory: str | None,
    seconds: float,
    force: bool,
    as_json: bool,
) -> None:
    """Measure memory and drive, read memory and GPUs, and write machine.toml for forecasts.

    The drive is read as SOURCE_OR_PACK is, which has to lie on it. Without a model a file of 1 GiB
    is written there, and removed.

    Example: moepack machine model.moepack -o machine.toml
    """
    from moepack.machine.file import toml_text
    from moepack.report import machine_text
    from moepack.report.page import Page, Verbatim

    is_file = output not in (None, STANDARD_STREAM) and not is_stream(output or "")
    if directory is None and not model and is_file:
        directory = os.path.dirname(os.path.abspath(output or ""))
    with contextlib.ExitStack() as outputs:
        if output is not None:
            target = outputs.enter_context(output_file(output, force=force))
        with progress(None, "measuring", "ms") as advance:
            measured = moepack.measure_machine(
                model or None, directory=directory, seconds=seconds, progress=advance
            )
        if output is not None:
            write_whole(target, toml_text(measured.machine).encode())
    if not as_json and not is_quiet():
        for note in measured.notes:
            complain("note", note)
    if output is None:
        show(measured, as_json, lambda found: Page(Verbatim(toml_text(found.machine).rstrip("\n"))))
    else:
        next_step = next_steps.after_machine(model, output)
        sum_up(measured, as_json, machine_text.text, next_step)
