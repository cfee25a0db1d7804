"""The commands `bench`, `tune` and `report`."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import click

import moepack
from moepack.cli.shared import options
from moepack.cli.shared.files import output_file, picture_file, read_prompt
from moepack.cli.shared.options import (
    file_option,
    flag_option,
    float_option,
    number_option,
    size_option,
)
from moepack.cli.shared.parameters import STANDARD_STREAM, Numbers
from moepack.cli.shared.progress import progress
from moepack.cli.shared.terminal import complain, is_json, is_quiet, show, sum_up
from moepack.common.errors import RequestError
from moepack.pack.reading.directory import named_pack
from moepack.running.serving.sampling import MAX_CONTEXT

_RUN_SETTINGS = (
    *("memory", "read_limit", "prompt_file", "prompt_tokens", "tokens", "micro_batch", "rounds"),
)


@click.command()
@options.opened_argument
@options.source_option
@file_option("--trace", help="Routing trace with the experts to read.")
@file_option("--hotness", help="Counts to draw experts by, in place of --trace.")
@number_option(
    "--experts-used", least=1, most=1024, help="Number of experts to draw per token and layer."
)
@click.option(
    "--backend",
    type=click.Choice(["auto", "direct", "buffered"]),
    default="auto",
    help="Method for reading experts: past the page cache, or through it.",
)
@click.option(
    "--depths",
    type=Numbers(),
    default="1,4,16",
    help="Queue depths to try: numbers of reads in flight.",
)
@float_option("--seconds", most=3600, default=45, help="Time for the comparison.")
@size_option("--length", default="256MiB", help="Bytes of experts to read repeatedly.")
@float_option(
    "--point-seconds",
    most=60,
    default=0.25,
    help="Time for each point of the drive's surface; 0 skips it.",
)
@flag_option(
    "--run", "runs", help="Run the model within a memory limit instead, and measure its speed."
)
@size_option(
    "--memory",
    share_of="memory",
    help="Limit with --run: 8GiB, 50% of this machine's memory; by default half of the model.",
)
@size_option(
    "--read-limit", help="Bytes read per second at most, with --run, as on a slower drive: 500MiB."
)
@file_option("--prompt-file", help="Text of the prompt with --run; by default Python's reference.")
@number_option(
    "--prompt-tokens",
    least=1,
    most=MAX_CONTEXT,
    help="Length of the prompt with --run; by default 1,000 tokens.",
)
@number_option(
    "--tokens",
    least=2,
    most=MAX_CONTEXT,
    help="Number of tokens to generate with --run; by default 60.",
)
@options.micro_batch_option("Prompt tokens computed at once with --run; by default up to 2,048.")
@number_option(
    "--rounds", least=1, most=100, help="Number of turns of each program with --run; by default 3."
)
@options.plot_options("the drive's surface")
@options.progress_options
def bench(
    pack_path: str,
    source_paths: tuple[str, ...],
    point_seconds: float,
    runs: bool,
    plot_path: str | None,
    force: bool,
    **settings: Any,
) -> None:
    """Measure a model's drive, and the gain from a pack on it.

    Experts of a trace, or drawn by hotness, are read from the pack and, with --source, from the
    shards, in paired rounds. With --run, the speed of prompts and of tokens is measured: from the
    pack, from the shards, and under llama.cpp alone.

    Example: moepack bench model.moepack --source model-00001-of-00004.gguf
    """
    from moepack.report import chart, measure_text

    values = {name: settings.pop(name) for name in _RUN_SETTINGS}
    run_settings = {name: value for name, value in values.items() if value is not None}
    if runs:
        _run(pack_path, source_paths, run_settings)
        return
    if run_settings:
        option = f"--{next(iter(run_settings)).replace('_', '-')}"
        raise RequestError(f"{option} is for --run", hint=f"add --run, or leave {option} out")
    if plot_path and not point_seconds:
        raise RequestError("there is no surface to draw", place="--plot", found="--point-seconds 0")
    inputs = [path for path in (settings["trace"], settings["hotness"]) if path]
    with (
        picture_file(plot_path, force=force, inputs=inputs) as picture,
        progress("measuring", "ms") as advance,
    ):
        if not (source_paths or is_json() or is_quiet()) and named_pack(pack_path) is not None:
            complain("note", "without --source there is nothing to compare the pack with")
        report = moepack.bench_pack(
            pack_path,
            source=source_paths or None,
            point_seconds=point_seconds,
            progress=advance,
            **settings,
        )
        if picture and report.surface:
            title = f"{chart.title_of([pack_path])}, {report.backend}"
            chart.surface(report.surface, title, picture)
        elif picture:
            complain("note", "the pack is too small for a surface: nothing is drawn")
    show(report, measure_text.bench)


def _run(pack: str, source: tuple[str, ...], settings: dict[str, Any]) -> None:
    """Measure whole programs that run the model."""
    from moepack.bench.engine_speed import bench_run
    from moepack.common.extras import require
    from moepack.report import measure_text

    require("run")
    path = settings.pop("prompt_file", None)
    prompt = None if path is None else read_prompt(path)
    with progress("running", "runs") as advance:
        speed = bench_run(pack, source=source or None, prompt=prompt, progress=advance, **settings)
    show(speed, measure_text.speed)


@click.command()
@options.source_or_pack_argument
@size_option(
    "--memory", share_of="memory", help="Memory for experts, as of `moepack serve`: 8GiB, 50%."
)
@number_option(
    "--prompt",
    "prompt_tokens",
    least=1,
    most=MAX_CONTEXT,
    default=500,
    help="Length of the prompt in tokens.",
)
@number_option(
    "--tokens", least=2, most=MAX_CONTEXT, default=100, help="Number of tokens to generate."
)
@number_option("--texts", least=1, most=64, default=1, help="Number of texts at once.")
@options.csv_option("tried")
@options.progress_options
def tune(source_or_pack: tuple[str, ...], **settings: Any) -> None:
    """Find the options of `moepack serve` that are fastest for a model on this machine.

    Threads, micro-batches, policies, ways to read and, with --texts, slots are tried in turns, in a
    second round the other way round. What is at least 3 % faster in both rounds and gives the same
    text is kept, and the command line is printed.

    Example: moepack tune model.moepack --memory 8GiB
    """
    from moepack.common.extras import require
    from moepack.report import measure_text

    require("run")
    with progress("running", "runs") as advance:
        facts = moepack.tune(source_or_pack, progress=advance, **settings)
    show(facts, measure_text.tuning)


@click.command()
@options.source_or_pack_argument
@file_option(
    "--trace",
    "traces",
    multiple=True,
    help="Routing trace, for heat, coverage and caches; may be repeated.",
)
@options.machine_option
@file_option(
    "--run",
    "runs",
    multiple=True,
    help="Measurement, as JSON of `moepack bench`, `moepack run` or llama-bench; may be repeated.",
)
@size_option(
    "--budget", share_of="experts", help="Memory for experts to mark: 8GiB, 25% of all experts."
)
@options.output_option(help="Page to write, in HTML; - is standard output.")
@flag_option("--open", "opens", help="Open the page in a browser.")
@options.force_option
@options.format_option
@options.lenient_option
@options.progress_options
def report(
    source_or_pack: tuple[str, ...],
    output: str,
    opens: bool,
    force: bool,
    form: str | None,
    lenient: bool,
    machine_path: str | None,
    **settings: Any,
) -> None:
    """Make a page about a model for a browser: one file, with pictures and tables.

    Each section needs its input: a trace for heat, coverage and caches, a machine for placement and
    forecast, or measurements.

    Example: moepack report model.gguf --trace chat.moetrace -o report.html
    """
    from moepack.report.html.report import summary_text
    from moepack.traces.formats.registry import ReadOptions

    if opens and output == STANDARD_STREAM:
        raise RequestError("--open needs a file", hint="name one with -o")
    inputs = [*settings["traces"], *settings["runs"]]
    with (
        output_file(output, force=force, inputs=inputs, suffix=".html") as path,
        progress("reading", "steps") as advance,
    ):
        page = moepack.make_report(
            source_or_pack,
            path,
            machine=machine_path,
            options=ReadOptions(form, lenient=lenient),
            progress=advance,
            **settings,
        )
    sum_up(replace(page.summary, path=output), summary_text)
    if opens and click.launch(os.path.abspath(output)):
        complain("note", "no browser could be started: open the page by hand")
