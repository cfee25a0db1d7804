"""The command `simulate`."""

from typing import Any

import click

import moepack
from moepack.cli.shared.files import picture_file
from moepack.cli.shared.options import (
    format_option,
    lenient_option,
    number_option,
    plot_options,
    read_options,
    summary_options,
)
from moepack.cli.shared.parameters import InputPath, ModelName, Numbers
from moepack.cli.shared.progress import progress
from moepack.cli.shared.terminal import next_line, show
from moepack.common.sizes import divide_up

_MIB = 1 << 20


@click.command()
@click.argument("paths", nargs=-1, required=True, type=InputPath(), metavar="TRACE...")
@click.option(
    "--model",
    "model_path",
    type=ModelName(),
    metavar="SOURCE_OR_PACK",
    help="Model that was traced, for the lengths of its experts, if the trace lacks them.",
)
@click.option(
    "--budgets",
    metavar="LIST",
    help="Memory for experts: 500MiB,2GiB,25%.  [default: a dozen budgets]",
)
@click.option(
    "--slots",
    type=Numbers(),
    default=[],
    metavar="LIST",
    help="LRU caches with this number of experts per layer: 32,64,96.",
)
@click.option("--policies", metavar="LIST", help="Cache policies: lru,lfu,…  [default: all]")
@number_option("--batch", "batch_count", least=1, help="Prompt tokens computed at once.")
@number_option(
    "--sessions", least=1, default=1, help="Number of requests that run at a time, in turns."
)
@number_option(
    "--prefetch",
    least=1,
    help="Number of experts to prefetch per layer, the most recently used ones.",
)
@plot_options("hit rates by budget")
@format_option
@lenient_option
@summary_options
def simulate(
    paths: tuple[str, ...],
    model_path: str | None,
    budgets: str | None,
    policies: str | None,
    plot_path: str | None,
    force: bool,
    form: str | None,
    lenient: bool,
    **options: Any,
) -> None:
    """Simulate the hit rates and reads of expert caches on traces, by budget and policy.

    Example: moepack simulate chat.moetrace --model model.moepack
    """
    from moepack.report import chart, trace_text

    with (
        picture_file(plot_path, force=force, inputs=paths) as picture,
        progress(None, "simulating", "replays") as advance,
    ):
        facts = moepack.simulate(
            paths,
            budgets=_list(budgets),
            policies=_list(policies) or None,
            options=read_options(form=form, lenient=lenient, model_path=model_path),
            progress=advance,
            **options,
        )
        if picture:
            chart.hit_rates(facts, ", ".join(paths), picture)
    next_step = None
    if facts.enough_length is not None and model_path is not None:
        memory = f"{divide_up(facts.enough_length, _MIB)}MiB"
        next_step = next_line("run", model_path, "--memory", memory)
    show(facts, trace_text.simulation, next_step)


def _list(text: str | None) -> list[str]:
    return [] if text is None else [item.strip() for item in text.split(",")]
