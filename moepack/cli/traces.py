"""The group `trace`, and the commands `hotness` and `simulate`."""

import os
import re
from dataclasses import replace
from typing import Any, Literal

import click

import moepack
from moepack.cli.shared import options
from moepack.cli.shared.files import output_file, picture_file
from moepack.cli.shared.options import (
    file_option,
    flag_option,
    float_option,
    model_option,
    number_option,
    read_options,
    size_option,
)
from moepack.cli.shared.parameters import STANDARD_STREAM, InputPath
from moepack.cli.shared.progress import progress
from moepack.cli.shared.terminal import next_line, show, sum_up
from moepack.cli.words.front import Commands
from moepack.common.sizes import divide_up
from moepack.pack.reading.directory import named_pack
from moepack.running.serving.sampling import MAX_CONTEXT, MAX_THREADS


@click.group(cls=Commands)
def trace() -> None:
    """Record, import and analyse routing traces: the experts that each token used."""


@trace.command("record")
@model_option("--model", required=True, help="Model to run.")
@file_option("--prompts", required=True, help="Prompts, one per line: text, or JSON.")
@options.output_option()
@flag_option("--resume", help="Record only the prompts that are missing.")
@options.force_option
@number_option("--tokens", least=0, default=128, help="Number of tokens to generate per prompt.")
@number_option(
    "--context", least=1, most=MAX_CONTEXT, default=4096, help="Context length in tokens."
)
@float_option("--temperature", most=10, default=0.8, help="Sampling temperature; 0 is greedy.")
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
@options.progress_options
def trace_record(
    model: str, prompts: str, output: str, resume: bool, force: bool, **options: Any
) -> None:
    """Run llama.cpp on prompts, and record the experts that its routers select.

    Experts are read on demand, as by `run`: the model may be bigger than memory. If it is
    interrupted, finished prompts are kept, and --resume records the others.

    Example: moepack trace record --model m.gguf --prompts p.txt -o m.moetrace
    """
    from moepack.report import trace_text

    with (
        output_file(output, force=force, resume=resume, inputs=(model, prompts)) as target,
        progress("recording", "tokens") as advance,
    ):
        summary = moepack.record_trace(
            model, prompts, target, resume=resume, force=force, progress=advance, **options
        )
    sum_up(replace(summary, path=output), trace_text.imported, _count_line(output))


@trace.command("import")
@options.traces_argument
@options.output_option()
@options.force_option
@options.traced_model_options
@options.summary_options
def trace_import(paths: tuple[str, ...], output: str, force: bool, **reading: Any) -> None:
    """Convert traces of any format into one trace file.

    Example: moepack trace import server.log -o chat.moetrace
    """
    from moepack.report import trace_text

    options = read_options(**reading)
    with output_file(output, force=force, inputs=paths) as target:
        summary = moepack.import_trace(paths, target, force=force, options=options)
    sum_up(replace(summary, path=output), trace_text.imported, _count_line(output))


@trace.command("stats")
@options.traces_argument
@number_option("--window", least=1, default=128, help="Length of a window in tokens.")
@options.traced_model_options
@options.csv_option("working_set")
@options.json_option
def trace_stats(paths: tuple[str, ...], window: int, **reading: Any) -> None:
    """Print the working set of traces: experts per window of tokens (U), and new ones (D).

    Example: moepack trace stats chat.moetrace --model model.moepack
    """
    from moepack.report import trace_text

    facts = moepack.trace_statistics(paths, window=window, options=read_options(**reading))
    show(facts, trace_text.stats)


@trace.command("concentration")
@options.traces_argument
@options.plot_options("heat and coverage")
@options.traced_model_options
@options.csv_option("layers")
@options.json_option
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
            chart.heat(*sample.heat_table(), sample.curves(), chart.title_of(paths), picture)
    is_static = facts.verdict == "static" and len(paths) == 1
    show(facts, trace_text.concentration, _count_line(paths[0]) if is_static else None)


def _count_line(trace: str) -> str | None:
    """Return the command line that counts the selections of a trace; None if it is no file."""
    if trace == STANDARD_STREAM:
        return None
    stem = os.path.splitext(trace)[0]
    counts = f"{stem}-hotness.csv" if os.path.exists(f"{stem}.csv") else f"{stem}.csv"
    return next_line("hotness", trace, "-o", counts)


_SHARD = re.compile(r"(-\d{5}-of-\d{5})?\.gguf\Z")


@click.command()
@click.argument("paths", nargs=-1, type=InputPath(), metavar="FILE...")
@options.output_option(required=False)
@options.force_option
@click.option(
    "--phases",
    type=click.Choice(["all", "decode"]),
    default="all",
    help="Tokens to count: all, or only decoded ones.",
)
@options.traced_model_options
@model_option(
    "--learned",
    "learned_path",
    help="Show the counts from recent runs of this model, and write them with -o.",
)
@options.summary_options
def hotness(
    paths: tuple[str, ...],
    output: str | None,
    force: bool,
    phases: Literal["all", "decode"],
    learned_path: str | None,
    **reading: Any,
) -> None:
    """Count how often each expert was used, in traces, imatrices and hotness files together.

    With --learned, show the counts that run and serve keep, or write them with -o.

    Example: moepack hotness chat.moetrace imatrix.gguf -o hot.csv

    Example: moepack hotness --learned model.gguf
    """
    from moepack.report import trace_text
    from moepack.traces.hotness.file import save

    if learned_path is not None:
        if paths:
            raise click.UsageError("--learned takes no FILE")
        _show_learned(learned_path, output, force)
        return
    if not paths or output is None:
        raise click.UsageError(f"{'--output' if paths else 'FILE'} is missing")
    with output_file(output, force=force, inputs=paths) as target:
        options = read_options(**reading)
        measured = moepack.measure_hotness(paths, phases=phases, options=options)
        save(measured.hotness, target)
    sum_up(measured.facts(output), trace_text.hotness, _next_step(output, reading["model_path"]))


def _show_learned(path: str, output: str | None, force: bool) -> None:
    """Show or write the counts of a model's recent runs."""
    from moepack.report import trace_text
    from moepack.traces.hotness.file import save

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


_MIB = 1 << 20


@click.command()
@click.argument("paths", nargs=-1, required=True, type=InputPath(), metavar="TRACE...")
@model_option(
    "--model",
    "model_path",
    help="Model that was traced, for the lengths of its experts, if the trace lacks them.",
)
@click.option(
    "--budgets",
    metavar="LIST",
    help="Memory for experts: 500MiB,2GiB,25%.  [default: a dozen budgets]",
)
@click.option("--policies", metavar="LIST", help="Cache policies: lrfu,lru,…  [default: all]")
@number_option("--batch", "batch_count", least=1, help="Prompt tokens computed at once.")
@options.plot_options("hit rates by budget")
@options.format_option
@options.lenient_option
@options.csv_option("results")
@options.summary_options
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
        progress("simulating", "replays") as advance,
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
            chart.hit_rates(facts, chart.title_of(paths), picture)
    next_step = None
    if facts.enough_length is not None and model_path is not None:
        memory = f"{divide_up(facts.enough_length, _MIB)}MiB"
        next_step = next_line("run", model_path, "--memory", memory)
    show(facts, trace_text.simulation, next_step)


def _list(text: str | None) -> list[str]:
    return [] if text is None else [item.strip() for item in text.split(",")]
