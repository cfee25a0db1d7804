"""The command `forecast`: how fast a model will decode on a machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

import moepack
from moepack.cli.files import force_option, picture_file
from moepack.cli.model_options import prompt_options
from moepack.cli.parameters import InputFile, Length, OutputFile, PathName
from moepack.cli.terminal import json_option, machine_option, quiet_option, show, suggest
from moepack.errors import RequestError

if TYPE_CHECKING:
    from moepack.forecasting.misses import WorkingSet

_FORMULA = (
    *("ram_bytes", "memory_bw_bytes_per_sec", "ssd_bw_bytes_per_sec_raw", "ssds_in_raid"),
    *("dense_gpu_latency_per_token", "bytes_per_expert", "num_layers", "experts_per_layer"),
    *("active_per_layer", "average_active_per_batch", "average_expert_turnover_per_batch"),
    "batch_size",
)
"""The options of estimate_speed.py, under their own names."""


def _formula_options(command: Callable[..., None]) -> Callable[..., None]:
    for name in reversed(_FORMULA):
        command = click.option(f"--{name}", name, type=float, hidden=True)(command)
    return command


@click.command()
@click.argument("source_or_pack", nargs=-1, type=PathName(), metavar="SOURCE_OR_PACK")
@machine_option
@click.option(
    "--n-cpu-moe",
    "cpu_layer_count",
    type=click.IntRange(0),
    metavar="N",
    help="Layers, the first of all, whose experts are in memory; VRAM has the rest.",
)
@click.option(
    "--budget",
    type=Length(share_of="experts"),
    metavar="SIZE",
    help="Memory for a cache of experts that come from the drive: 8GiB, 25% of them.",
)
@click.option(
    "--vram-cache",
    type=Length(),
    metavar="SIZE",
    help="VRAM for a cache of experts that come from memory (--moe-cache-mib).",
)
@click.option(
    "--all", "sweep", is_flag=True, help="Every N with a GPU, without one a dozen budgets."
)
@click.option(
    "--dense-in-memory",
    is_flag=True,
    help="Nothing in VRAM beside such a cache, as `moepack run` has it.",
)
@click.option(
    "--trace",
    "traces",
    multiple=True,
    type=InputFile(),
    metavar="FILE",
    help="Routing trace, which says what caches miss and what prompts use.",
)
@click.option(
    "--working-set", metavar="U,D", help="Experts used in 128 tokens, and new ones, instead."
)
@prompt_options
@click.option(
    "--receipt",
    "receipts",
    multiple=True,
    type=InputFile(),
    metavar="FILE",
    help="JSON of llama-bench or `moepack run` there.",
)
@click.option(
    "--context", type=click.IntRange(1), default=4096, show_default=True, help="Room for tokens."
)
@click.option(
    "--depth", type=click.IntRange(0), default=0, help="Tokens of it that are there already."
)
@click.option(
    "--formula",
    type=click.Choice(["published"]),
    help="That of estimate_speed.py, whose options there are then too.",
)
@_formula_options
@click.option(
    "--plot", "plot_path", type=OutputFile(), metavar="FILE", help="Draw speeds: SVG or PNG."
)
@force_option
@quiet_option
@json_option
def forecast(
    source_or_pack: tuple[str, ...],
    machine_path: str | None,
    working_set: str | None,
    formula: str | None,
    plot_path: str | None,
    force: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Forecast how fast a model decodes on a machine, how long a prompt takes, how sure that is.

    Example: moepack forecast model.gguf --machine machine.toml --all
    """
    from moepack.report import chart, forecast_text

    given = {name: value for name in _FORMULA if (value := options.pop(name)) is not None}
    if formula is not None:
        if source_or_pack or machine_path is not None:
            raise click.UsageError("--formula published knows no model and no machine")
        _show_formula(given, as_json)
        return
    if given:
        raise click.UsageError(f"--{next(iter(given))} goes with --formula published")
    if not source_or_pack or machine_path is None:
        raise click.UsageError("a model and --machine are needed")
    options["working_set"] = _working_set(working_set)
    with picture_file(plot_path, force=force, inputs=source_or_pack) as picture:
        facts = moepack.forecast(source_or_pack, machine_path, **options)
        if picture:
            chart.speeds(facts, picture)
    show(facts, as_json, forecast_text.text)
    if not as_json:
        suggest(facts.next_receipt)


def _show_formula(given: dict[str, float], as_json: bool) -> None:
    from moepack.report import forecast_text

    facts = moepack.published_formula(**given)
    show(facts, as_json, forecast_text.published)


def _working_set(text: str | None) -> WorkingSet | None:
    from moepack.forecasting.misses import WorkingSet

    if text is None:
        return None
    try:
        used, new = (float(number) for number in text.split(","))
        if not 0 <= new <= used < 1e9:
            raise ValueError
    except ValueError:
        raise RequestError(
            "not a working set",
            place="--working-set",
            expected="two numbers of experts: U,D",
            found=text[:40],
        ) from None
    return WorkingSet(used, new)
