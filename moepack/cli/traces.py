"""The commands of `trace`."""

import os
from dataclasses import replace
from typing import Any

import click

import moepack
from moepack.cli.shared.files import output_file, picture_file
from moepack.cli.shared.options import (
    append_option,
    file_option,
    force_option,
    json_option,
    number_option,
    output_option,
    plot_options,
    progress_options,
    read_options,
    size_option,
    summary_options,
    traced_model_options,
    traced_pack_option,
    traces_argument,
)
from moepack.cli.shared.parameters import STANDARD_STREAM, ModelName
from moepack.cli.shared.progress import progress
from moepack.cli.shared.terminal import next_line, show, sum_up
from moepack.running.programs.sampling import MAX_CONTEXT, MAX_THREADS


@click.command("record")
@click.option(
    "--model", required=True, type=ModelName(), metavar="SOURCE_OR_PACK", help="Model to run."
)
@file_option("--prompts", required=True, help="Prompts, one per line: text, or JSON.")
@output_option()
@append_option
@click.option("--resume", is_flag=True, help="Record only the prompts that are missing.")
@force_option
@number_option("--tokens", least=0, default=128, help="Number of tokens to generate per prompt.")
@number_option(
    "--context", least=1, most=MAX_CONTEXT, default=4096, help="Context length in tokens."
)
@click.option(
    "--temperature",
    type=click.FloatRange(0, 10),
    default=0.8,
    help="Sampling temperature; 0 is greedy.",
)
@number_option("--seed", least=0, default=0, help="Random seed.")
@number_option(
    "--threads",
    least=1,
    most=MAX_THREADS,
    help="Number of computing threads; by default one per CPU.",
)
@size_option(
    "--memory",
    word="floor",
    share_of="memory",
    help="Memory for experts: 8GiB, 50% of memory, or floor, the minimum; by default what is free.",
)
@progress_options
def trace_record(
    model: str,
    prompts: str,
    output: str,
    append: bool,
    resume: bool,
    force: bool,
    **options: Any,
) -> None:
    """Run llama.cpp on prompts, and record the experts that its routers select.

    Experts are read on demand, as by `run`: the model may be bigger than memory. If it is
    interrupted, finished prompts are kept, and --resume records the others.

    Example: moepack trace record --model m.gguf --prompts p.txt -o m.moetrace
    """
    from moepack.report import trace_text

    writing: dict[str, Any] = {"append": append, "resume": resume, "force": force}
    appends = append or resume
    with (
        output_file(output, force=force, append=appends, inputs=(model, prompts)) as target,
        progress(None, "recording", "tokens") as advance,
    ):
        summary = moepack.record_trace(
            model, prompts, target, progress=advance, **writing, **options
        )
    sum_up(replace(summary, path=output), trace_text.imported, _count_line(output))


@click.command("import")
@traces_argument
@output_option()
@append_option
@force_option
@traced_model_options
@summary_options
def trace_import(
    paths: tuple[str, ...], output: str, append: bool, force: bool, **reading: Any
) -> None:
    """Convert traces of any format into one trace file.

    Example: moepack trace import server.log -o chat.moetrace
    """
    from moepack.report import trace_text

    options = read_options(**reading)
    with output_file(output, force=force, append=append, inputs=paths) as target:
        summary = moepack.import_trace(paths, target, append=append, force=force, options=options)
    sum_up(replace(summary, path=output), trace_text.imported, _count_line(output))


@click.command("stats")
@traces_argument
@number_option(
    "--window",
    least=1,
    help="Length of a window in tokens; by default 128, or less for short traces.",
)
@traced_model_options
@traced_pack_option
@json_option
def trace_stats(paths: tuple[str, ...], window: int | None, **reading: Any) -> None:
    """Print the working set of traces: experts per window of tokens (U), and new ones (D).

    Example: moepack trace stats chat.moetrace --pack model.moepack
    """
    from moepack.report import trace_text

    facts = moepack.trace_statistics(paths, window=window, options=read_options(**reading))
    show(facts, trace_text.stats)


@click.command("concentration")
@traces_argument
@plot_options("heat and coverage")
@traced_model_options
@traced_pack_option
@json_option
def trace_concentration(
    paths: tuple[str, ...], plot_path: str | None, force: bool, **reading: Any
) -> None:
    """Judge whether the most used experts are worth pinning.

    Example: moepack trace concentration chat.moetrace
    """
    from moepack.report import chart, trace_text
    from moepack.traces.analysis.concentration import read_sample

    with picture_file(plot_path, force=force, inputs=paths) as picture:
        sample = read_sample(paths, read_options(**reading))
        facts = sample.concentration()
        if picture:
            chart.heat(*sample.heat_table(), sample.curves(), ", ".join(paths), picture)
    is_static = facts.verdict == "static" and len(paths) == 1
    show(facts, trace_text.concentration, _count_line(paths[0]) if is_static else None)


def _count_line(trace: str) -> str | None:
    """Return the command line that counts the selections of a trace; None if it is no file."""
    if trace == STANDARD_STREAM:
        return None
    stem = os.path.splitext(trace)[0]
    counts = f"{stem}-hotness.csv" if os.path.exists(f"{stem}.csv") else f"{stem}.csv"
    return next_line("hotness", trace, "-o", counts)
