"""The command `trace import`."""

from dataclasses import replace
from typing import Any

import click

import moepack
from moepack.cli.shared.files import output_file
from moepack.cli.shared.options import (
    append_option,
    force_option,
    output_option,
    summary_options,
    traced_model_options,
    traces_argument,
)
from moepack.cli.shared.terminal import sum_up
from moepack.cli.shared.traces import count_line, read_options


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
    sum_up(replace(summary, path=output), trace_text.imported, count_line(output))
