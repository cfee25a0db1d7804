"""The command `doctor`: what limits this machine, and a model on it."""

import click

import moepack
from moepack.cli import next_steps
from moepack.cli.machine import model_argument, seconds_option
from moepack.cli.parameters import OutputFolder
from moepack.cli.progress import progress
from moepack.cli.terminal import json_option, quiet_option, show, verbose_option


@click.command()
@model_argument
@click.option(
    "--directory",
    type=OutputFolder(),
    metavar="DIR",
    help="Folder on the drive to measure, where no model is named.  [default: the current one]",
)
@seconds_option
@click.option(
    "--prompt",
    type=click.IntRange(1, 1 << 24),
    default=1000,
    show_default=True,
    metavar="N",
    help="Number of tokens of a prompt to the model.",
)
@quiet_option
@verbose_option
@json_option
def doctor(
    model: tuple[str, ...], directory: str | None, seconds: float, prompt: int, as_json: bool
) -> None:
    """Report what limits this machine when it runs models, line by line with what to do.

    It tries what the system allows, and measures drive, memory and processors. With SOURCE_OR_PACK
    it also forecasts that model, with the memory that is free now, and names the single change of
    the machine that would help most. Without one a file of 1 GiB is written, and removed.

    Example: moepack doctor model.moepack
    """
    from moepack.report import doctor_text

    with progress(None, "measuring", "ms") as advance:
        facts = moepack.doctor(
            model or None, directory=directory, seconds=seconds, prompt=prompt, progress=advance
        )
    show(facts, as_json, doctor_text.text, next_steps.after_doctor(facts, model))
