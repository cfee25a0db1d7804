"""The command `forecast`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

import moepack
from moepack.cli.shared.files import picture_file
from moepack.cli.shared.options import (
    file_option,
    forecast_prompt_options,
    machine_option,
    number_option,
    options,
    plot_options,
    size_option,
    summary_options,
    traces_option,
)
from moepack.cli.shared.parameters import ModelName, Numbers
from moepack.cli.shared.terminal import show, suggest
from moepack.common.errors import RequestError

if TYPE_CHECKING:
    from moepack.planning.forecasting.misses import WorkingSet

_FORMULA = (
    *("ram_bytes", "memory_bw_bytes_per_sec", "ssd_bw_bytes_per_sec_raw", "ssds_in_raid"),
    *("dense_gpu_latency_per_token", "bytes_per_expert", "num_layers", "experts_per_layer"),
    *("active_per_layer", "average_active_per_batch", "average_expert_turnover_per_batch"),
    "batch_size",
)
"""The options of estimate_speed.py, under their own names."""


@click.command()
@click.argument("source_or_pack", nargs=-1, type=ModelName(), metavar="SOURCE_OR_PACK")
@machine_option
@number_option(
    "--n-cpu-moe",
    "cpu_layer_count",
    least=0,
    help="Number of layers, from the first, with experts in memory; VRAM has the rest.",
)
@size_option(
    "--budget",
    share_of="experts",
    help="Memory for a cache of experts from the drive: 8GiB, 25% of all experts.",
)
@size_option(
    "--vram-cache", help="VRAM for a cache of experts from memory, as in recent llama.cpp."
)
@click.option(
    "--all",
    "sweep",
    is_flag=True,
    help="Forecast for every N with a GPU, or for a dozen budgets without one.",
)
@click.option(
    "--dense-in-memory",
    is_flag=True,
    help="Keep all weights out of VRAM with such a cache, as `moepack run` does.",
)
@traces_option
@click.option(
    "--working-set",
    type=Numbers(float, "120,8"),
    metavar="U,D",
    help="Experts used per 128 tokens, and new ones among them, in place of --trace.",
)
@forecast_prompt_options
@file_option(
    "--receipt",
    "receipts",
    multiple=True,
    help="Measured run on that machine, as JSON of llama-bench or `moepack run`.",
)
@number_option("--context", least=1, default=4096, help="Context length in tokens.")
@number_option("--depth", least=0, default=0, help="Number of tokens already in the context.")
@click.option(
    "--formula",
    type=click.Choice(["published"]),
    help="Formula of estimate_speed.py, which takes the options of that script.",
)
@options(*(click.option(f"--{name}", name, type=float, hidden=True) for name in _FORMULA))
@plot_options("speeds")
@summary_options
def forecast(
    source_or_pack: tuple[str, ...],
    machine_path: str | None,
    working_set: list[float] | None,
    formula: str | None,
    plot_path: str | None,
    force: bool,
    **options: Any,
) -> None:
    """Forecast the decoding speed of a model on a machine, and the time of a prompt, with ranges.

    Example: moepack forecast model.gguf --machine machine.toml --all
    """
    from moepack.report import chart, plan_text

    parameters = {name: value for name in _FORMULA if (value := options.pop(name)) is not None}
    if formula is not None:
        if source_or_pack or machine_path is not None:
            raise click.UsageError("--formula published takes no model and no machine")
        show(moepack.published_formula(**parameters), plan_text.published)
        return
    if parameters:
        raise click.UsageError(f"--{next(iter(parameters))} goes with --formula published")
    if not source_or_pack or machine_path is None:
        raise click.UsageError("a model and --machine are needed")
    options["working_set"] = _working_set(working_set)
    with picture_file(plot_path, force=force, inputs=source_or_pack) as picture:
        facts = moepack.forecast(source_or_pack, machine_path, **options)
        if picture:
            chart.speeds(facts, picture)
    show(facts, plan_text.forecast)
    suggest(facts.next_receipt)


def _working_set(numbers: list[float] | None) -> WorkingSet | None:
    from moepack.planning.forecasting.misses import WorkingSet

    if numbers is None:
        return None
    if len(numbers) != 2 or not 0 <= numbers[1] <= numbers[0] < 1e9:
        expected = "two numbers of experts, U,D, of which D is not more"
        problem = "not a working set"
        raise RequestError(problem, place="--working-set", expected=expected, found=numbers)
    return WorkingSet(numbers[0], numbers[1])
