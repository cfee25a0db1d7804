"""The command `hotness`."""

import os
import re
from typing import Any, Literal

import click

import moepack
from moepack.cli.shared.files import output_file
from moepack.cli.shared.options import (
    force_option,
    output_option,
    read_options,
    summary_options,
    traced_model_options,
    traced_pack_option,
)
from moepack.cli.shared.parameters import STANDARD_STREAM, InputPath, ModelName, Numbers
from moepack.cli.shared.terminal import is_json, is_quiet, next_line, say, sum_up
from moepack.pack.reading.directory import named_pack

_SHARD = re.compile(r"(-\d{5}-of-\d{5})?\.gguf\Z")


@click.command()
@click.argument("paths", nargs=-1, type=InputPath(), metavar="FILE...")
@output_option(required=False)
@force_option
@click.option(
    "--weights",
    type=Numbers(float, "2,1,0.5"),
    metavar="LIST",
    help="Weight of each file's counts: 2,1,0.5.",
)
@click.option(
    "--phases",
    type=click.Choice(["all", "decode"]),
    default="all",
    help="Tokens to count: all, or only decoded ones.",
)
@traced_model_options
@traced_pack_option
@click.option(
    "--learned",
    "learned_path",
    type=ModelName(),
    metavar="SOURCE_OR_PACK",
    help="Show the counts from recent runs of this model, and write them with -o.",
)
@click.option("--forget", is_flag=True, help="Remove the counts of --learned.")
@summary_options
def hotness(
    paths: tuple[str, ...],
    output: str | None,
    force: bool,
    weights: list[float] | None,
    phases: Literal["all", "decode"],
    learned_path: str | None,
    forget: bool,
    **reading: Any,
) -> None:
    """Count how often each expert was used, in traces, imatrices and hotness files together.

    With --learned, show the counts that run and serve keep, or write them with -o.

    Example: moepack hotness chat.moetrace imatrix.gguf --weights 3,1 -o hot.csv

    Example: moepack hotness --learned model.gguf
    """
    from moepack.report import trace_text
    from moepack.traces.hotness.file import save

    if learned_path is not None:
        if paths or (forget and output is not None):
            raise click.UsageError("--learned takes no FILE, and -o or --forget, but not both")
        _show_learned(learned_path, output, force, forget)
        return
    if forget:
        raise click.UsageError("--forget needs --learned")
    if not paths or output is None:
        raise click.UsageError(f"{'--output' if paths else 'FILE'} is missing")
    with output_file(output, force=force, inputs=paths) as target:
        options = read_options(**reading)
        measured = moepack.measure_hotness(paths, weights=weights, phases=phases, options=options)
        save(measured.hotness, target)
    model = reading["model_path"] or reading["pack_path"]
    sum_up(measured.facts(output), trace_text.hotness, _next_step(output, model))


def _show_learned(path: str, output: str | None, force: bool, forget: bool) -> None:
    """Show, write or remove the counts of a model's recent runs."""
    from moepack.report import trace_text
    from moepack.traces.hotness.file import save

    if forget:
        was_there = moepack.forget_learned(path)
        if not is_json():
            if not is_quiet():
                say("forgotten" if was_there else "nothing was learned about this model yet")
            return
    if output is not None:
        with output_file(output, force=force) as target:
            save(moepack.learned_hotness(path), target)
    next_step = None if output is None else _next_step(output, path)
    sum_up(moepack.learned_facts(path), trace_text.learned, next_step)


def _next_step(output: str, model: str | None) -> str | None:
    """Return the line that packs the model by its hotness, or ranks the pack anew."""
    if output == STANDARD_STREAM or model is None:
        return None
    if named_pack(model) is not None:
        return next_line("rank", model, "--hotness", output)
    name = _SHARD.sub("", os.path.basename(model.rstrip("/")))
    return next_line("pack", model, "--hotness", output, "-o", f"{name}.moepack")
