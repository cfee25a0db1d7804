"""The command `simulate`: what caches of experts would have done with a trace."""

import click

import moepack
from moepack.cli import next_steps
from moepack.cli.files import force_option, picture_file
from moepack.cli.parameters import Counts, InputFile, OutputFile, PathName
from moepack.cli.progress import progress
from moepack.cli.terminal import json_option, quiet_option, show
from moepack.cli.trace_options import format_option, lenient_option


@click.command()
@click.argument("paths", nargs=-1, required=True, type=InputFile(), metavar="TRACE...")
@click.option(
    "--model",
    "model_path",
    type=PathName(),
    metavar="SOURCE_OR_PACK",
    help="What was traced: it says how long experts are. Some traces do so themselves.",
)
@click.option(
    "--budgets", metavar="LIST", help="Of memory for experts: 500MiB,2GiB,25%. By default a dozen."
)
@click.option(
    "--slots",
    type=Counts(),
    default=[],
    metavar="LIST",
    help="LRU caches of so many experts a layer: 32,64,96.",
)
@click.option("--policies", metavar="LIST", help="lru,lfu,… By default all.")
@click.option(
    "--batch", "batch_count", type=click.IntRange(1), help="Tokens of a prompt computed at once."
)
@click.option(
    "--sessions",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Requests that run at a time, in turns.",
)
@click.option(
    "--prefetch",
    type=click.IntRange(1),
    help="What reading ahead so many experts a layer is worth: those that it used last.",
)
@click.option(
    "--plot",
    "plot_path",
    type=OutputFile(),
    metavar="FILE",
    help="Draw hit rates by budget: SVG or PNG.",
)
@force_option
@format_option
@lenient_option
@quiet_option
@json_option
def simulate(
    paths: tuple[str, ...],
    model_path: str | None,
    budgets: str | None,
    slots: list[int],
    policies: str | None,
    batch_count: int | None,
    sessions: int,
    prefetch: int | None,
    plot_path: str | None,
    force: bool,
    form: str | None,
    lenient: bool,
    as_json: bool,
) -> None:
    """Say how often caches of experts would have hit, by size and policy, and what they would read.

    Example: moepack simulate chat.moetrace --model model.moepack
    """
    from moepack.report import chart, simulation_text
    from moepack.trace.formats.registry import ReadOptions

    shape = moepack.shape_of(model_path) if model_path else None
    with (
        picture_file(plot_path, force=force, inputs=paths) as picture,
        progress(None, "simulating", "replays") as advance,
    ):
        facts = moepack.simulate(
            paths,
            budgets=_list(budgets),
            slots=slots,
            policies=_list(policies) or None,
            batch_count=batch_count,
            sessions=sessions,
            prefetch=prefetch,
            options=ReadOptions(form, shape, lenient),
            progress=advance,
        )
        if picture:
            chart.hit_rates(facts, ", ".join(paths), picture)
    show(facts, as_json, simulation_text.text, next_steps.after_simulate(facts, model_path))


def _list(text: str | None) -> list[str]:
    return [] if text is None else [item.strip() for item in text.split(",")]
