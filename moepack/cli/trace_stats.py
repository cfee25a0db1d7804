"""The command `trace stats`."""

from typing import Any

import click

import moepack
from moepack.cli.shared.options import (
    json_option,
    number_option,
    traced_model_options,
    traced_pack_option,
    traces_argument,
)
from moepack.cli.shared.terminal import show
from moepack.cli.shared.traces import read_options


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
