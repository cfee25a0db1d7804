"""The command `trace record`."""

from dataclasses import replace
from typing import Any

import click

import moepack
from moepack.cli.shared.files import output_file
from moepack.cli.shared.options import (
    append_option,
    file_option,
    force_option,
    number_option,
    output_option,
    progress_options,
    size_option,
)
from moepack.cli.shared.parameters import ModelName
from moepack.cli.shared.progress import progress
from moepack.cli.shared.terminal import sum_up
from moepack.cli.shared.traces import count_line
from moepack.running.programs.bounds import MAX_CONTEXT, MAX_THREADS


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
    sum_up(replace(summary, path=output), trace_text.imported, count_line(output))
