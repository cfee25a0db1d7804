"""The command `trace concentration`."""

from typing import Any

import click

from moepack.cli.shared.files import picture_file
from moepack.cli.shared.options import (
    json_option,
    plot_options,
    traced_model_options,
    traced_pack_option,
    traces_argument,
)
from moepack.cli.shared.terminal import show
from moepack.cli.shared.traces import count_line, read_options


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
    show(facts, trace_text.concentration, count_line(paths[0]) if is_static else None)
