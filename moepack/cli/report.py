"""The command `report`."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import click

import moepack
from moepack.cli.shared.files import output_file
from moepack.cli.shared.options import (
    file_option,
    force_option,
    format_option,
    lenient_option,
    machine_option,
    output_option,
    progress_options,
    size_option,
    source_option,
    source_or_pack_argument,
)
from moepack.cli.shared.parameters import STANDARD_STREAM
from moepack.cli.shared.progress import progress
from moepack.cli.shared.terminal import complain, sum_up
from moepack.common.errors import RequestError


@click.command()
@source_or_pack_argument
@file_option(
    "--trace", "traces", multiple=True, help="Routing trace, for heat, coverage and caches."
)
@machine_option
@file_option(
    "--run",
    "runs",
    multiple=True,
    help="Measurement, as JSON of `moepack bench`, `moepack run` or llama-bench.",
)
@size_option(
    "--budget",
    share_of="experts",
    help="Memory for experts to mark: 8GiB, 25% of all experts.",
)
@click.option("--verify", is_flag=True, help="Also verify the pack, which reads all of it.")
@source_option
@output_option(help="Page to write, in HTML; - is standard output.")
@click.option("--open", "opens", is_flag=True, help="Open the page in a browser.")
@force_option
@format_option
@lenient_option
@progress_options
def report(
    source_or_pack: tuple[str, ...],
    output: str,
    opens: bool,
    force: bool,
    form: str | None,
    lenient: bool,
    verify: bool,
    source_paths: tuple[str, ...],
    machine_path: str | None,
    **settings: Any,
) -> None:
    """Make a page about a model for a browser: one file, with pictures and tables.

    Each section needs its input: a trace for heat, coverage and caches, a machine for placement and
    forecast, measurements, or the verification of a pack.

    Example: moepack report model.gguf --trace chat.moetrace -o report.html
    """
    from moepack.report.html.report import summary_text
    from moepack.traces.formats.registry import ReadOptions

    if opens and output == STANDARD_STREAM:
        raise RequestError("--open needs a file", hint="name one with -o")
    if source_paths and not verify:
        raise RequestError("--source is for --verify", hint="add --verify, or leave --source out")
    inputs = [*settings["traces"], *settings["runs"]]
    with output_file(output, force=force, inputs=inputs, suffix=".html") as path:
        if verify:
            with progress(None, "verifying") as advance:
                settings["verification"] = moepack.verify(
                    source_or_pack[0], source_paths or None, progress=advance
                )
        with progress(None, "reading", "steps") as advance:
            page = moepack.make_report(
                source_or_pack,
                path,
                machine=machine_path,
                options=ReadOptions(form, lenient=lenient),
                progress=advance,
                **settings,
            )
    sum_up(replace(page.summary, path=output), summary_text)
    if opens and click.launch(os.path.abspath(output)):
        complain("note", "no browser could be started: open the page by hand")
