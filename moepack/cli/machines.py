"""The commands `doctor` and `machine`."""

import contextlib
import os
from typing import Any

import click

import moepack
from moepack.cli.shared.files import output_file
from moepack.cli.shared.options import (
    force_option,
    measured_model_argument,
    output_option,
    progress_options,
    prompt_tokens_option,
    seconds_option,
)
from moepack.cli.shared.parameters import STANDARD_STREAM, OutputFolder
from moepack.cli.shared.progress import progress
from moepack.cli.shared.terminal import complain, is_json, is_quiet, next_line, show, sum_up
from moepack.storage.atomic import write_whole
from moepack.storage.regular_file import is_stream


@click.command()
@measured_model_argument
@click.option(
    "--directory",
    type=OutputFolder(),
    metavar="DIR",
    help="Folder on the drive to measure, if no model is named.  [default: the current one]",
)
@seconds_option
@prompt_tokens_option
@progress_options
def doctor(model: tuple[str, ...], **options: Any) -> None:
    """Find the bottlenecks of this machine when it runs models, with remedies.

    It tries the features of the system, and measures drive, memory and processors. For
    SOURCE_OR_PACK it also forecasts that model, with the memory that is free now, and names the
    single upgrade that would help most. Without a model, a file of 1 GiB is written, and removed.

    Example: moepack doctor model.moepack
    """
    from moepack.report import plan_text

    with progress(None, "measuring", "ms") as advance:
        facts = moepack.doctor(model or None, progress=advance, **options)
    can_run = facts.prognosis is not None and facts.prognosis.forecast is not None
    show(facts, plan_text.doctor, next_line("run", *model) if can_run else None)


@click.command()
@measured_model_argument
@output_option(required=False, help="File to write, such as machine.toml; printed by default.")
@click.option(
    "--directory",
    type=OutputFolder(),
    metavar="DIR",
    help="Folder on the drive to measure, if no model is named.",
)
@seconds_option
@force_option
@progress_options
def machine(
    model: tuple[str, ...], output: str | None, directory: str | None, seconds: float, force: bool
) -> None:
    """Measure memory and drive, read memory and GPUs, and write machine.toml for forecasts.

    The drive is measured with the reads of SOURCE_OR_PACK, which must be on it. Without a model, a
    file of 1 GiB is written there, and removed.

    Example: moepack machine model.moepack -o machine.toml
    """
    from moepack.planning.machine.file import toml_text
    from moepack.report import measure_text
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
    if not is_json() and not is_quiet():
        for note in measured.notes:
            complain("note", note)
    if output is None:
        show(measured, lambda facts: Page(Verbatim(toml_text(facts.machine).rstrip("\n"))))
        return
    has_next = model and output != STANDARD_STREAM
    next_step = next_line("place", *model, "--machine", output) if has_next else None
    sum_up(measured, measure_text.machine, next_step)
