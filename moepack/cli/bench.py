"""The command `bench`: what this machine's drive can do, and what a pack is worth on it."""

from typing import TYPE_CHECKING, Any

import click

import moepack
from moepack.cli.files import force_option, picture_file
from moepack.cli.parameters import Counts, InputFile, Length, OutputFile, PathName
from moepack.cli.progress import is_terminal, progress
from moepack.cli.prompt_file import read_prompt
from moepack.cli.terminal import (
    complain,
    draw,
    is_quiet,
    json_option,
    quiet_option,
    show,
    source_option,
    verbose_option,
)
from moepack.errors import RequestError
from moepack.llama_cpp.bounds import MAX_CONTEXT
from moepack.reading.directory import named_pack

if TYPE_CHECKING:
    from moepack.bench.pace import Schedule

_RUN_SETTINGS = (
    *("memory", "read_limit", "prompt_file", "prompt_tokens", "tokens", "micro_batch", "rounds"),
)


@click.command()
@click.argument("pack_path", type=PathName(), metavar="SOURCE_OR_PACK")
@source_option
@click.option(
    "--trace",
    "trace_path",
    type=InputFile(),
    metavar="FILE",
    help="Read the experts that this trace chose.",
)
@click.option(
    "--hotness",
    "hotness_path",
    type=InputFile(),
    metavar="FILE",
    help="Draw experts by these counts instead.",
)
@click.option(
    "--experts-used", type=click.IntRange(1, 1024), help="Experts drawn for each token and layer."
)
@click.option(
    "--backend",
    type=click.Choice(["auto", "uring", "direct", "buffered"]),
    default="auto",
    show_default=True,
    help="How to read.",
)
@click.option(
    "--depths",
    type=Counts(),
    default="1,4,16",
    show_default=True,
    help="Numbers of reads in flight to try.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(0, 3600),
    help="Time for the comparison; by default 45, or what a verdict takes on a slow drive.",
)
@click.option(
    "--length",
    type=Length(),
    default="256MiB",
    show_default=True,
    help="Bytes of experts that are read over and over.",
)
@click.option(
    "--point-seconds",
    type=click.FloatRange(0, 60),
    default=0.25,
    show_default=True,
    help="Time for each point of the drive's surface; 0 leaves it out.",
)
@click.option(
    "--run",
    "runs",
    is_flag=True,
    help="Run the model instead, within a limit of memory: first token, tokens a second.",
)
@click.option(
    "--memory",
    type=Length(share_of="memory"),
    metavar="SIZE",
    help="The limit with --run: 8GiB, 50% of this machine's memory; by default half of the model.",
)
@click.option(
    "--read-limit",
    type=Length(),
    metavar="SIZE",
    help="With --run, bytes read in a second at most, as on a slower drive: 500MiB.",
)
@click.option(
    "--prompt-file",
    type=InputFile(),
    metavar="FILE",
    help="Text of the prompt with --run; by default Python's reference.",
)
@click.option(
    "--prompt-tokens",
    type=click.IntRange(1, MAX_CONTEXT),
    metavar="N",
    help="Tokens of the prompt with --run; by default 1,000.",
)
@click.option(
    "--tokens",
    type=click.IntRange(2, MAX_CONTEXT),
    metavar="N",
    help="Tokens after the prompt with --run; by default 60.",
)
@click.option(
    "-ub",
    "--micro-batch",
    type=click.IntRange(1, MAX_CONTEXT),
    metavar="N",
    help="Tokens of the prompt computed at once with --run; by default up to 2,048.",
)
@click.option(
    "--rounds", type=click.IntRange(1, 100), help="Turns of each program with --run; by default 3."
)
@click.option(
    "--plot",
    "plot_path",
    type=OutputFile(),
    metavar="FILE",
    help="Draw the surface: SVG or PNG.",
)
@force_option
@quiet_option
@verbose_option
@json_option
def bench(
    pack_path: str,
    source_paths: tuple[str, ...],
    trace_path: str | None,
    hotness_path: str | None,
    point_seconds: float,
    runs: bool,
    plot_path: str | None,
    force: bool,
    as_json: bool,
    **settings: Any,
) -> None:
    """Measure the drive that a model lies on, and what a pack of it is worth there.

    Reads experts, those of a trace or drawn by hotness, from the pack and, with --source, from the
    shards: through moepack's reader, with a bare backend and memory-mapped, in paired rounds. With
    --run, how long a prompt takes and how fast tokens come: from the pack, from the shards, and
    under llama.cpp alone.

    Example: moepack bench model.moepack --source model-00001-of-00004.gguf
    """
    from moepack.report import bench_text, chart

    run_settings = {name: settings.pop(name) for name in _RUN_SETTINGS}
    given = {name: value for name, value in run_settings.items() if value is not None}
    if runs:
        _run(pack_path, source_paths, given, as_json)
        return
    if given:
        option = f"--{next(iter(given)).replace('_', '-')}"
        raise RequestError(f"{option} is for --run", hint=f"add --run, or leave {option} out")
    if plot_path and not point_seconds:
        raise RequestError("there is no surface to draw", place="--plot", found="--point-seconds 0")
    inputs = [path for path in (trace_path, hotness_path) if path]
    with (
        picture_file(plot_path, force=force, inputs=inputs) as picture,
        progress(None, "measuring", "ms") as advance,
    ):
        if not (source_paths or as_json or is_quiet()) and named_pack(pack_path) is not None:
            complain("note", "without --source there is nothing to compare the pack with")
        report = moepack.bench_pack(
            pack_path,
            source=source_paths or None,
            trace=trace_path,
            hotness=hotness_path,
            point_seconds=point_seconds,
            progress=advance,
            announce=None if as_json or is_quiet() else _announce,
            **settings,
        )
        if picture and report.surface:
            chart.surface(report.surface, f"{pack_path}, {report.backend}", picture)
        elif picture:
            complain("note", "the pack is too small for a surface: nothing is drawn")
    show(report, as_json, bench_text.text)


def _announce(schedule: "Schedule") -> None:
    from moepack.report import bench_text

    if is_terminal():
        draw("\r\x1b[K")  # the bar is drawn again below
    complain("note", bench_text.announced(schedule))


def _run(pack: str, source: tuple[str, ...], settings: dict[str, Any], as_json: bool) -> None:
    """Measure whole programs that run the model."""
    from moepack.bench.engine_speed import bench_run
    from moepack.extras import require
    from moepack.report import speed_text

    require("run")
    path = settings.pop("prompt_file", None)
    prompt = None if path is None else read_prompt(path)
    with progress(None, "running", "runs") as advance:
        speed = bench_run(pack, source=source or None, prompt=prompt, progress=advance, **settings)
    show(speed, as_json, speed_text.text)
