"""The commands `doctor`, `machine`, `place` and `forecast`."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import click

import moepack
from moepack.cli.shared import options
from moepack.cli.shared.files import output_file, picture_file
from moepack.cli.shared.options import file_option, flag_option, number_option, size_option
from moepack.cli.shared.parameters import STANDARD_STREAM
from moepack.cli.shared.progress import progress
from moepack.cli.shared.terminal import (
    complain,
    is_json,
    is_quiet,
    next_line,
    show,
    suggest,
    sum_up,
)
from moepack.common.errors import RequestError
from moepack.storage.atomic import write_whole
from moepack.storage.regular_file import is_stream


@click.command()
@options.measured_model_argument
@options.directory_option(
    "Folder on the drive to measure, if no model is named.  [default: the current one]"
)
@options.seconds_option
@options.prompt_tokens_option
@options.other_machine_option
@options.progress_options
def doctor(model: tuple[str, ...], **settings: Any) -> None:
    """Find the bottlenecks of this machine when it runs models, with remedies.

    It tries the features of the system, and measures drive, memory and processors. For
    SOURCE_OR_PACK it also forecasts that model, with the memory that is free now, and names the
    single upgrade that would help most. Without a model, a file of 1 GiB is written, and removed.
    With --as it does so for another machine, by its figures.

    Example: moepack doctor model.moepack
    """
    from moepack.report import plan_text

    with progress("measuring", "ms") as advance:
        facts = moepack.doctor(model or None, progress=advance, **settings)
    is_here = settings["machine"] is None
    can_run = is_here and facts.prognosis is not None and facts.prognosis.forecast is not None
    show(facts, plan_text.doctor, next_line("run", *model) if can_run else None)


@click.command()
@options.measured_model_argument
@options.output_option(
    required=False, help="File to write, such as machine.toml; printed by default."
)
@options.directory_option("Folder on the drive to measure, if no model is named.")
@options.seconds_option
@options.force_option
@flag_option("--presets", help="List machines that are sold, by their names for --machine.")
@options.progress_options
def machine(
    model: tuple[str, ...],
    output: str | None,
    directory: str | None,
    seconds: float,
    force: bool,
    presets: bool,
) -> None:
    """Measure memory and drive, read memory and GPUs, and write machine.toml for forecasts.

    The drive is measured with the reads of SOURCE_OR_PACK, which must be on it. Without a model, a
    file of 1 GiB is written there, and removed.

    Example: moepack machine model.moepack -o machine.toml
    """
    from moepack.planning.machine.file import toml_text
    from moepack.report import measure_text
    from moepack.report.page import Page, Verbatim

    if presets:
        show(moepack.presets(), measure_text.presets)
        return
    is_file = output not in (None, STANDARD_STREAM) and not is_stream(output or "")
    if directory is None and not model and is_file:
        directory = os.path.dirname(os.path.abspath(output or ""))
    with contextlib.ExitStack() as outputs:
        if output is not None:
            target = outputs.enter_context(output_file(output, force=force))
        with progress("measuring", "ms") as advance:
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


@click.command()
@options.source_or_pack_argument
@options.machine_option
@options.figure_options
@click.option(
    "--engine",
    type=click.Choice(["llama.cpp", "ik_llama.cpp", "pack"]),
    help="Engine: pack (`moepack run`) by default for a pack, else llama.cpp.",
)
@number_option(
    "--context",
    least=1,
    help="Context length in tokens; by default 32,768, or the trained length if that is less.",
)
@click.option(
    "--cache-type",
    default="f16",
    metavar="TYPE",
    help="Type of the KV cache; K,V if keys and values differ.",
)
@size_option("--margin", default="1GiB", help="Space left free in each memory.")
@options.traces_option
@file_option(
    "--hotness", help="Hotness file, in place of --trace, to judge whether to pin experts."
)
@options.forecast_prompt_options
@options.summary_options
def place(
    source_or_pack: tuple[str, ...], machine_path: str | None, cache_type: str, **settings: Any
) -> None:
    """Plan which weights go into VRAM and memory, and print the command line to paste.

    Example: moepack place model.gguf --vram 24GiB --ram 64GiB
    """
    from moepack.report import plan_text

    keys, comma, values = cache_type.partition(",")
    if comma and not values:
        expected = "a type, or two with a comma"
        raise RequestError(
            "not a type", place="--cache-type", expected=expected, found=cache_type[:40]
        )
    settings["cache_types"] = (keys, values or keys)
    paths = [] if machine_path is None else [machine_path]
    (box,) = options.described_machines(paths, settings)
    show(moepack.place(source_or_pack, box, **settings), plan_text.placement)


@click.command()
@options.source_or_pack_argument
@options.machines_option
@options.figure_options
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
@flag_option(
    "--all", "sweep", help="Forecast for every N with a GPU, or for a dozen budgets without one."
)
@flag_option(
    "--dense-in-memory",
    help="Keep all weights out of VRAM with such a cache, as `moepack run` does.",
)
@options.traces_option
@options.forecast_prompt_options
@file_option(
    "--receipt",
    "receipts",
    multiple=True,
    help="Measured run on that machine, as JSON of llama-bench or `moepack run`; may be repeated.",
)
@number_option("--context", least=1, default=4096, help="Context length in tokens.")
@number_option("--depth", least=0, default=0, help="Number of tokens already in the context.")
@number_option("--texts", least=1, default=1, help="Number of texts that are decoded at once.")
@options.plot_options("speeds")
@options.csv_option("forecasts", "machines")
@options.summary_options
def forecast(
    source_or_pack: tuple[str, ...],
    machine_paths: tuple[str, ...],
    plot_path: str | None,
    force: bool,
    **settings: Any,
) -> None:
    """Forecast the decoding speed of a model on a machine, and the time of a prompt, with ranges.

    Several machines are compared in a table.

    Example: moepack forecast model.gguf --machine machine.toml --all

    Example: moepack forecast model.gguf --machine preset:dgx-spark --machine preset:rtx-4090-64
    """
    from moepack.report import chart, plan_text

    machines = options.described_machines(machine_paths, settings)
    if len(machines) > 1:
        typed = settings | {"plot": plot_path}
        for name, option in (("sweep", "--all"), ("receipts", "--receipt"), ("plot", "--plot")):
            if typed[name]:
                raise click.UsageError(f"{option} is for one machine")
        show(moepack.compare_machines(source_or_pack, machines, **settings), plan_text.comparison)
        return
    with picture_file(plot_path, force=force, inputs=source_or_pack) as picture:
        facts = moepack.forecast(source_or_pack, machines[0], **settings)
        if picture:
            chart.speeds(facts, picture)
    show(facts, plan_text.forecast)
    suggest(facts.next_receipt)
