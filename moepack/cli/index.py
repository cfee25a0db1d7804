"""The command `index`."""

from typing import Any

import click

import moepack
from moepack.cli.shared.options import (
    folder_option,
    hotness_option,
    progress_options,
    threads_option,
)
from moepack.cli.shared.parameters import ModelName
from moepack.cli.shared.progress import progress
from moepack.cli.shared.terminal import next_line, sum_up


@click.command()
@click.argument("source", nargs=-1, required=True, type=ModelName(), metavar="SOURCE...")
@folder_option("Folder of the new index.")
@hotness_option
@click.option(
    "--digests", is_flag=True, help="Read the shards for digests, so that reads are checked."
)
@threads_option
@progress_options
def index(source: tuple[str, ...], target: str, **options: Any) -> None:
    """Index the experts in the shards of SOURCE, without a copy.

    Readers, bench and engines use DIR like a pack; it has links to the shards.

    Example: moepack index model-00001-of-00004.gguf -o model.index
    """
    from moepack.report import pack_text

    with progress(None, "indexing") as advance:
        summary = moepack.index_model(source, target, progress=advance, **options)
    sum_up(summary, pack_text.indexed, next_line("run", target))
