"""The command `doctor`."""

from typing import Any

import click

import moepack
from moepack.cli.shared.options import (
    measured_model_argument,
    progress_options,
    prompt_tokens_option,
    seconds_option,
)
from moepack.cli.shared.parameters import OutputFolder
from moepack.cli.shared.progress import progress
from moepack.cli.shared.terminal import next_line, show


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
    from moepack.report import doctor_text

    with progress(None, "measuring", "ms") as advance:
        facts = moepack.doctor(model or None, progress=advance, **options)
    can_run = facts.prognosis is not None and facts.prognosis.forecast is not None
    show(facts, doctor_text.text, next_line("run", *model) if can_run else None)
