"""The commands `trace …` and `hotness`: what was measured of routing, and what it says."""

from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import click

import moepack
from moepack.cli import next_steps
from moepack.cli.files import force_option, output_file, output_option, picture_file
from moepack.cli.front import Commands
from moepack.cli.parameters import InputFile, Length, OutputFile, PathName
from moepack.cli.progress import progress
from moepack.cli.terminal import (
    is_quiet,
    json_option,
    quiet_option,
    say,
    show,
    sum_up,
    verbose_option,
)
from moepack.cli.trace_options import format_option, lenient_option
from moepack.errors import RequestError
from moepack.llama_cpp.bounds import MAX_CONTEXT, MAX_THREADS

if TYPE_CHECKING:
    from moepack.trace.formats.registry import ReadOptions

_model_option = click.option(
    "--model",
    "model_path",
    type=PathName(),
    metavar="SOURCE",
    help="Refuse layers and experts that this model lacks.",
)
_pack_option = click.option(
    "--pack", "pack_path", type=PathName(), metavar="PACK", help="The same, of a pack."
)
_append_option = click.option("--append", is_flag=True, help="Add to a trace file that is there.")
_files_argument = click.argument(
    "paths", nargs=-1, required=True, type=InputFile(), metavar="FILE..."
)


_FORGET_WHAT = "--forget goes with --learned"


@click.group(cls=Commands)
def trace() -> None:
    """Read, record and judge traces of which experts a model chose."""


@trace.command("import")
@_files_argument
@output_option
@_append_option
@force_option
@format_option
@lenient_option
@_model_option
@quiet_option
@json_option
def import_(
    paths: tuple[str, ...],
    output: str,
    append: bool,
    force: bool,
    form: str | None,
    lenient: bool,
    model_path: str | None,
    as_json: bool,
) -> None:
    """Turn traces of any format into one trace file.

    Example: moepack trace import server.log -o chat.moetrace
    """
    from moepack.report import trace_text

    options = _options(form, lenient, model_path, None)
    with output_file(output, force=force, append=append, inputs=paths) as target:
        summary = moepack.import_trace(paths, target, append=append, force=force, options=options)
    next_step = next_steps.after_trace(output)
    sum_up(replace(summary, path=output), as_json, trace_text.imported, next_step)


@trace.command()
@_files_argument
@click.option(
    "--window", type=click.IntRange(1), help="Tokens in a window; by default 128, or what fits."
)
@format_option
@lenient_option
@_model_option
@_pack_option
@json_option
def stats(
    paths: tuple[str, ...],
    window: int | None,
    form: str | None,
    lenient: bool,
    model_path: str | None,
    pack_path: str | None,
    as_json: bool,
) -> None:
    """Print the working set of traces: how many experts a window of tokens needs, how many are new.

    Example: moepack trace stats chat.moetrace --pack model.moepack
    """
    from moepack.report import trace_text

    options = _options(form, lenient, model_path, pack_path)
    facts = moepack.trace_statistics(paths, window=window, options=options)
    show(facts, as_json, trace_text.stats)


@trace.command()
@_files_argument
@click.option(
    "--plot",
    "plot_path",
    type=OutputFile(),
    metavar="FILE",
    help="Draw heat and coverage: SVG or PNG.",
)
@force_option
@format_option
@lenient_option
@_model_option
@_pack_option
@json_option
def concentration(
    paths: tuple[str, ...],
    plot_path: str | None,
    force: bool,
    form: str | None,
    lenient: bool,
    model_path: str | None,
    pack_path: str | None,
    as_json: bool,
) -> None:
    """Judge whether some experts are chosen so much more that it is worth pinning them.

    Example: moepack trace concentration chat.moetrace
    """
    from moepack.analysis.concentration import read_sample
    from moepack.report import chart, trace_text

    with picture_file(plot_path, force=force, inputs=paths) as picture:
        sample = read_sample(paths, _options(form, lenient, model_path, pack_path))
        facts = sample.concentration()
        if picture:
            chart.heat(*sample.heat_table(), sample.curves(), ", ".join(paths), picture)
    next_step = next_steps.after_concentration(facts, paths)
    show(facts, as_json, trace_text.concentration, next_step)


@trace.command()
@click.option(
    "--model",
    "model_path",
    required=True,
    type=PathName(),
    metavar="SOURCE_OR_PACK",
    help="A pack, or any shard.",
)
@click.option(
    "--prompts",
    "prompts_path",
    required=True,
    type=InputFile(),
    metavar="FILE",
    help="One a line: text, or JSON.",
)
@output_option
@_append_option
@click.option("--resume", is_flag=True, help="Record the prompts that are missing.")
@force_option
@click.option(
    "--tokens",
    type=click.IntRange(0),
    default=128,
    show_default=True,
    help="To generate for each prompt.",
)
@click.option(
    "--context",
    type=click.IntRange(1, MAX_CONTEXT),
    default=4096,
    show_default=True,
    help="Tokens at most.",
)
@click.option(
    "--temperature", type=click.FloatRange(0, 10), default=0.8, show_default=True, help="0: greedy."
)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
@click.option(
    "--threads", type=click.IntRange(1, MAX_THREADS), help="Of llama.cpp; by default one a CPU."
)
@click.option(
    "--no-repack", is_flag=True, help="Leave weights in the files, in the pages that they have."
)
@click.option(
    "--memory",
    type=Length(word="floor", share_of="memory"),
    metavar="SIZE",
    help="Read experts when they are chosen, and keep so much: 8GiB, 50% of memory, floor.",
)
@quiet_option
@verbose_option
@json_option
def record(
    model_path: str,
    prompts_path: str,
    output: str,
    append: bool,
    resume: bool,
    force: bool,
    tokens: int,
    context: int,
    temperature: float,
    seed: int,
    threads: int | None,
    no_repack: bool,
    memory: int | Literal["floor"] | None,
    as_json: bool,
) -> None:
    """Run llama.cpp on prompts and record what the router chooses.

    Of a pack, and with --memory, experts are read when they are chosen: for models beyond memory.

    Interrupted, it keeps the prompts that were finished; with --resume it goes on with the others.

    Example: moepack trace record --model m.gguf --prompts p.txt -o m.moetrace
    """
    from moepack.report import trace_text

    inputs = (model_path, prompts_path)
    with (
        output_file(output, force=force, append=append or resume, inputs=inputs) as target,
        progress(None, "recording", "tokens") as advanced,
    ):
        summary = moepack.record_trace(
            model_path,
            prompts_path,
            target,
            append=append,
            resume=resume,
            force=force,
            tokens=tokens,
            context=context,
            temperature=temperature,
            seed=seed,
            threads=threads,
            repack=not no_repack,
            memory=memory,
            progress=advanced,
        )
    next_step = next_steps.after_trace(output)
    sum_up(replace(summary, path=output), as_json, trace_text.imported, next_step)


@click.command()
@click.argument("paths", nargs=-1, type=InputFile(), metavar="FILE...")
@click.option(
    "-o",
    "--output",
    type=OutputFile(),
    metavar="FILE",
    help="The file to write; - is standard output.",
)
@force_option
@click.option("--weights", "weight_text", metavar="LIST", help="What each file counts: 2,1,0.5.")
@click.option(
    "--phases",
    type=click.Choice(["all", "decode"]),
    default="all",
    show_default=True,
    help="Count all tokens, or leave prefill out.",
)
@format_option
@lenient_option
@_model_option
@_pack_option
@click.option(
    "--learned",
    "learned_path",
    type=PathName(),
    metavar="SOURCE_OR_PACK",
    help="Show, or write, what runs of this model have chosen lately.",
)
@click.option("--forget", is_flag=True, help="Remove that.")
@quiet_option
@json_option
def hotness(
    paths: tuple[str, ...],
    output: str | None,
    force: bool,
    weight_text: str | None,
    phases: Literal["all", "decode"],
    form: str | None,
    lenient: bool,
    model_path: str | None,
    pack_path: str | None,
    learned_path: str | None,
    forget: bool,
    as_json: bool,
) -> None:
    """Count how often each expert was chosen, in traces, imatrices and hotness files together.

    With --learned it is what run and serve counted: shown, and written where -o is given.

    Example: moepack hotness chat.moetrace imatrix.gguf --weights 3,1 -o hot.csv

    Example: moepack hotness --learned model.gguf
    """
    from moepack.hotness.file import save
    from moepack.report import trace_text

    if learned_path is not None:
        if paths or (forget and output is not None):
            raise click.UsageError("--learned goes with no FILE, and with -o or --forget.")
        _learned(learned_path, output, force, forget, as_json)
        return
    if not paths or output is None or forget:
        missing = "FILE" if not paths else "--output"
        raise click.UsageError(f"{missing} is missing" if not forget else _FORGET_WHAT)
    with output_file(output, force=force, inputs=paths) as target:
        measured = moepack.measure_hotness(
            paths,
            weights=_weights(weight_text),
            phases=phases,
            options=_options(form, lenient, model_path, pack_path),
        )
        save(measured.hotness, target)
    next_step = next_steps.after_hotness(output, model_path or pack_path)
    sum_up(measured.facts(output), as_json, trace_text.hotness, next_step)


def _learned(path: str, output: str | None, force: bool, forget: bool, as_json: bool) -> None:
    """Show, write or remove what was learned of a model."""
    from moepack.hotness.file import save
    from moepack.report import trace_text

    if forget:
        was_there = moepack.forget_learned(path)
        if not as_json:
            if not is_quiet():
                say("forgotten" if was_there else "nothing was learned of this model yet")
            return
    if output is not None:
        with output_file(output, force=force) as target:
            save(moepack.learned_hotness(path), target)
    next_step = None if output is None else next_steps.after_hotness(output, path)
    sum_up(moepack.learned_facts(path), as_json, trace_text.learned, next_step)


def _options(
    form: str | None, lenient: bool, model_path: str | None, pack_path: str | None
) -> "ReadOptions":
    from moepack.trace.formats.registry import ReadOptions

    if model_path and pack_path:
        raise RequestError("a model and a pack at once", hint="give --model or --pack, not both")
    path = model_path or pack_path
    return ReadOptions(form, moepack.shape_of(path) if path else None, lenient)


def _weights(text: str | None) -> list[float] | None:
    if text is None:
        return None
    try:
        return [float(item) for item in text.split(",")]
    except ValueError:
        expected = "numbers above 0, one for each file"
        raise RequestError(
            "not weights", place="--weights", expected=expected, found=text
        ) from None
