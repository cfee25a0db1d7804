"""Options and arguments that several commands have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import click
from click.shell_completion import CompletionItem

import moepack
from moepack.cli.shared.parameters import (
    OUTPUT_FOLDER,
    InputPath,
    Length,
    ModelName,
    OutputFile,
    PathName,
)
from moepack.cli.shared.terminal import remember
from moepack.common.sizes import LEAST_BARE
from moepack.running.serving.sampling import MAX_CONTEXT

if TYPE_CHECKING:
    from moepack.planning.machine.model import Machine
    from moepack.traces.formats.registry import ReadOptions

Command = TypeVar("Command", bound=Callable[..., Any])
Option = Callable[[Command], Command]


def options(*added: Option[Any]) -> Option[Any]:
    """Return a decorator that adds several options, which help lists in their order."""

    def decorate(command: Any) -> Any:
        for option in reversed(added):
            command = option(command)
        return command

    return decorate


def size_option(
    *names: str,
    word: str | None = None,
    share_of: Literal["memory", "experts"] | None = None,
    least: int = LEAST_BARE,
    **settings: Any,
) -> Option[Any]:
    """Return an option for a size, as `Length` reads it."""
    length = Length(word, share_of=share_of, least=least)
    return click.option(*names, type=length, metavar="SIZE", **settings)


def file_option(*names: str, **settings: Any) -> Option[Any]:
    """Return an option for a file to read."""
    return click.option(*names, type=InputPath(), metavar="FILE", **settings)


def flag_option(*names: str, **settings: Any) -> Option[Any]:
    """Return an option without a value."""
    return click.option(*names, is_flag=True, **settings)


def number_option(*names: str, least: int, most: int | None = None, **settings: Any) -> Option[Any]:
    """Return an option for a whole number within bounds."""
    return click.option(*names, type=click.IntRange(least, most), metavar="N", **settings)


def float_option(*names: str, most: float, **settings: Any) -> Option[Any]:
    """Return an option for a number from 0."""
    return click.option(*names, type=click.FloatRange(0, most), **settings)


def model_option(*names: str, metavar: str = "SOURCE_OR_PACK", **settings: Any) -> Option[Any]:
    """Return an option for a model."""
    return click.option(*names, type=ModelName(), metavar=metavar, **settings)


def micro_batch_option(help: str) -> Option[Any]:
    """Return the option for the prompt tokens that are computed at once."""
    names = ("-ub", "--micro-batch", "--ubatch-size")
    return number_option(*names, least=1, most=MAX_CONTEXT, help=help)


pack_argument = click.argument("pack_path", type=PathName(), metavar="PACK")
source_or_pack_argument = click.argument(
    "source_or_pack", nargs=-1, required=True, type=ModelName(), metavar="SOURCE_OR_PACK"
)
opened_argument = click.argument("pack_path", type=ModelName(), metavar="SOURCE_OR_PACK")
measured_model_argument = click.argument(
    "model", nargs=-1, type=ModelName(), metavar="[SOURCE_OR_PACK]"
)


def _printing_option(*names: str, setting: str, value: object, help: str) -> Option[Any]:
    """Return the option of a flag that sets how the command prints, and that none receives."""
    return flag_option(*names, expose_value=False, callback=remember(setting, value), help=help)


def csv_option(*rows: str) -> Option[Any]:
    """Return the option for CSV of the rows in the first of these fields that the facts have."""
    return _printing_option("--csv", setting="form", value=rows, help="Print CSV.")


json_option = _printing_option(
    "--json", setting="form", value="json", help="Print one JSON object."
)
quiet_option = _printing_option(
    "-q", "--quiet", setting="verbosity", value="quiet", help="Print only errors, and JSON."
)
verbose_option = _printing_option(
    "-v",
    "--verbose",
    setting="verbosity",
    value="verbose",
    help="Print more, such as the time taken.",
)
summary_options = options(quiet_option, json_option)
progress_option = click.option(
    "--progress",
    type=click.Choice(["text", "json"]),
    default="text",
    expose_value=False,
    callback=remember("progress"),
    help="Format of the progress on standard error; json for programs.",
)
progress_options = options(quiet_option, verbose_option, progress_option, json_option)

threads_option = number_option(
    "--threads", least=1, most=256, default=4, help="Number of threads that read and write."
)
force_option = flag_option("--force", help="Overwrite an existing file.")
dry_run_option = flag_option("--dry-run", help="Print the plan and write nothing.")
resume_option = flag_option("--resume", help="Continue an interrupted run.")
recover_option = flag_option(
    "--recover", help="Continue in place with a damaged or lost journal, by digests."
)
source_option = model_option(
    "--source",
    "source_paths",
    multiple=True,
    metavar="SOURCE",
    help="Model that the pack was made from, for comparison; may be repeated.",
)
_MACHINE_HELP = "Machine: a file, from `moepack machine`, or preset:NAME."
machine_option = file_option("--machine", "machine_path", help=_MACHINE_HELP)
machines_option = file_option(
    "--machine",
    "machine_paths",
    multiple=True,
    help=f"{_MACHINE_HELP} May be repeated, to compare them.",
)
other_machine_option = file_option(
    "--as", "machine", help=f"{_MACHINE_HELP} Nothing is measured then."
)
figure_options = options(
    size_option("--ram", "memory", help="Memory, in place of the machine's."),
    size_option(
        "--vram", multiple=True, help="VRAM of a GPU, in place of the machine's; may be repeated."
    ),
    *(
        click.option(
            f"--{name}", metavar="SPEED", help=f"{what}, in place of the machine's: {one}."
        )
        for name, what, one in (
            ("memory-bandwidth", "Bandwidth of memory", "89.6GB/s"),
            ("vram-bandwidth", "Bandwidth of VRAM", "936GB/s"),
            ("drive-speed", "Bandwidth of the drive", "7GB/s"),
        )
    ),
)
_FIGURES = ("memory", "vram", "memory_bandwidth", "vram_bandwidth", "drive_speed")


def described_machines(paths: Sequence[str], values: dict[str, Any]) -> list[Machine]:
    """Return the machines of files and presets, with the figures that are typed for all of them.

    Takes those figures out of `values`. Without a path they are a machine by themselves. Raises
    UsageError if there is neither.
    """
    figures = {name: values.pop(name) for name in _FIGURES}
    if not paths and figures["memory"] is None:
        raise click.UsageError(
            "--machine is needed, or --ram: `moepack machine --presets` lists some that are sold"
        )
    from moepack.planning.machine.described import describe_machine

    return [describe_machine(path, **figures) for path in paths or (None,)]


def _complete_layout(_context: object, _option: object, typed: str) -> list[Any]:
    """Offer the layouts that come with moepack, or paths if none fits."""
    from moepack.packing.plan import layout

    names = [name for name in layout.names() if name.startswith(typed)]
    return names or [CompletionItem(typed, type="file")]


def _complete_format(_context: object, _option: object, typed: str) -> list[str]:
    """Offer the known formats of traces."""
    from moepack.traces.formats import registry

    return [name for name in registry.NAMES if name.startswith(typed)]


hotness_option = file_option("--hotness", help="Hotness file, routing trace or imatrix.")
layout_option = click.option(
    "--layout",
    type=InputPath(),
    shell_complete=_complete_layout,
    default="layers",
    metavar="NAME|FILE.toml",
    help="Order of blobs in files: layers, hot-first, natural, or a file of your own.",
)
layers_option = click.option("--layers", metavar="LIST", help="Only these layers, such as 0-3,7.")
seconds_option = float_option(
    "--seconds", most=3600, default=20, help="Time for measuring; more gives narrower ranges."
)
prompt_tokens_option = number_option(
    "--prompt", least=1, most=1 << 24, default=1000, help="Length of the prompt in tokens."
)
forecast_prompt_options = options(
    prompt_tokens_option,
    micro_batch_option("Prompt tokens computed at once.  [default: the fastest]"),
)
traces_option = file_option(
    "--trace",
    "traces",
    multiple=True,
    help="Routing trace, to simulate cache misses with; may be repeated.",
)
traces_argument = click.argument(
    "paths", nargs=-1, required=True, type=InputPath(), metavar="FILE..."
)
format_option = click.option(
    "--format",
    "form",
    metavar="NAME",
    shell_complete=_complete_format,
    help="Format of the traces; detected by default.",
)
lenient_option = flag_option(
    "--lenient", help="Skip and count faulty entries, instead of stopping."
)
traced_model_options = options(
    format_option,
    lenient_option,
    model_option(
        "--model",
        "model_path",
        help="Model that was traced; layers and experts that it lacks are refused.",
    ),
)


def output_option(
    *, required: bool = True, help: str = "File to write; - is standard output."
) -> Option[Any]:
    """Return the option for the file that a command writes."""
    return click.option(
        "-o", "--output", required=required, type=OutputFile(), metavar="FILE", help=help
    )


def folder_option(help: str, *, required: bool = True) -> Option[Any]:
    """Return the option for the folder that a command makes."""
    names = ("-o", "--output", "target")
    return click.option(*names, required=required, type=OUTPUT_FOLDER, metavar="DIR", help=help)


def directory_option(help: str) -> Option[Any]:
    """Return the option for a folder on the drive that is measured."""
    return click.option("--directory", type=OUTPUT_FOLDER, metavar="DIR", help=help)


def plot_options(content: str) -> Option[Any]:
    """Return the options for a picture of `content`."""
    help_text = f"Chart of {content}: SVG or PNG."
    plot = click.option("--plot", "plot_path", type=OutputFile(), metavar="FILE", help=help_text)
    return options(plot, force_option)


def hottest_option(objects: str) -> Option[Any]:
    """Return the option for the hottest of some objects, up to a size."""
    return size_option(
        "--hottest",
        share_of="experts",
        help=f"Only the hottest {objects}, up to this size: 8GiB, or 25% of all experts.",
    )


expert_options = options(
    number_option("--layer", least=0, required=True, help="Number of the layer."),
    number_option("--expert", least=0, required=True, help="Number of the expert."),
    click.option("--family", help="Family of experts, if not the routed ones: ffn_chexps, …"),
)


def read_options(*, form: str | None, lenient: bool, model_path: str | None) -> ReadOptions:
    """Return the options for reading traces."""
    from moepack.traces.formats.registry import ReadOptions

    return ReadOptions(form, moepack.shape_of(model_path) if model_path else None, lenient)
