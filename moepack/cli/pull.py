"""The command `pull`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import click

import moepack
from moepack.cli.shared.options import (
    folder_option,
    hottest_option,
    layers_option,
    number_option,
    progress_options,
    resume_option,
)
from moepack.cli.shared.parameters import PathName
from moepack.cli.shared.progress import progress
from moepack.cli.shared.terminal import is_json, is_quiet, lay_out, next_line, sum_up
from moepack.common.errors import RequestError
from moepack.common.path_hints import missing_model_hint
from moepack.common.remote_path import is_remote

if TYPE_CHECKING:
    from moepack.packing.copies.pull_summary import PullSummary


@click.command()
@click.argument("pack", required=False, type=PathName(), metavar="PACK")
@folder_option("Folder of the pack on this machine.", required=False)
@layers_option
@hottest_option("experts")
@resume_option
@click.option(
    "--check",
    is_flag=True,
    help="Comparison of all that is there, and repair.",
)
@number_option("--threads", least=1, most=256, default=16, help="Number of ranges in flight.")
@progress_options
def pull(pack: str | None, target: str | None, resume: bool, **options: Any) -> None:
    """Bring PACK from a store or a web server into DIR: all of it, some layers, or the hottest.

    A part of a pack is used like the pack: experts that are not in DIR are read from where it came.
    The same command goes on after an interruption, and adds to DIR; with --resume, leave PACK out.

    Example: moepack pull s3://models/q.moepack -o q.moepack --hottest 40GiB
    """
    from moepack.report import pull_text
    from moepack.report.printable import printable

    if pack is not None and not is_remote(pack) and not os.path.lexists(pack):
        raise RequestError("not the address of a pack", path=pack, hint=missing_model_hint(pack))
    if target is None or (pack is None and not resume):
        raise click.UsageError(f"{'-o DIR' if target is None else 'PACK'} is missing")

    def print_plan(summary: PullSummary) -> None:
        if not is_json() and not is_quiet():
            lay_out(pull_text.plan(printable(summary)))

    with progress(None, "pulling") as advance:
        summary = moepack.pull(
            pack, target, resume=resume, planned=print_plan, progress=advance, **options
        )
    sum_up(summary, pull_text.pulled, next_line("run", summary.path))
