"""The command `export gguf`."""

from typing import Any

import click

import moepack
from moepack.cli.shared.options import (
    force_option,
    pack_argument,
    progress_options,
    resume_option,
    size_option,
    threads_option,
)
from moepack.cli.shared.parameters import ResumableFile
from moepack.cli.shared.progress import progress
from moepack.cli.shared.terminal import sum_up
from moepack.common.escaping import shell_words


@click.command("gguf")
@pack_argument
@click.option(
    "-o",
    "--output",
    "target",
    required=True,
    type=ResumableFile(),
    metavar="FILE",
    help="GGUF to write.",
)
@size_option("--alignment", least=0, default="4KiB", help="Alignment of all tensors.")
@resume_option
@force_option
@threads_option
@progress_options
def export_gguf(pack_path: str, target: str, **options: Any) -> None:
    """Write a whole pack as one stock GGUF: dense tensors first, experts last by layer.

    Example: moepack export gguf model.moepack -o model.gguf
    """
    from moepack.report import pack_text

    with progress(None, "exporting") as advance:
        summary = moepack.export_gguf(pack_path, target, progress=advance, **options)
    sum_up(summary, pack_text.exported, shell_words(("llama-server", "-m", summary.path)))
