"""The command `verify`."""

import contextlib
from functools import partial
from typing import Any

import click

import moepack
from moepack.cli.shared.exit_codes import ExitCode
from moepack.cli.shared.files import output_file
from moepack.cli.shared.options import (
    force_option,
    layers_option,
    pack_argument,
    progress_options,
    source_option,
    threads_option,
)
from moepack.cli.shared.parameters import OutputFile
from moepack.cli.shared.progress import progress
from moepack.cli.shared.terminal import is_json, is_quiet, is_verbose, next_line, show
from moepack.storage.atomic import write_whole


@click.command()
@pack_argument
@source_option
@layers_option
@click.option("--sample", metavar="SHARE", help="Share of blobs and tensors to check, such as 10%.")
@click.option("--seed", type=int, default=0, help="Random seed of the sample.")
@click.option("--sha256", is_flag=True, help="Also compare the SHA-256 of the shards.")
@click.option(
    "--with-gguf-py", is_flag=True, help="Also compare with the source as read by gguf-py."
)
@click.option(
    "--junit", "junit_path", type=OutputFile(), metavar="FILE", help="Report in JUnit XML."
)
@force_option
@threads_option
@progress_options
def verify(
    pack_path: str,
    source_paths: tuple[str, ...],
    junit_path: str | None,
    force: bool,
    **options: Any,
) -> None:
    """Verify a pack: its structure, padding and digests, and every byte against the source.

    Example: moepack verify model.moepack --source model-00001-of-00004.gguf
    """
    from moepack.report import junit, verification_text

    with contextlib.ExitStack() as outputs:
        if junit_path:
            junit_file = outputs.enter_context(output_file(junit_path, force=force))
        with progress(None, "verifying") as advance:
            report = moepack.verify(pack_path, source_paths or None, progress=advance, **options)
        if junit_path:
            write_whole(junit_file, junit.encode(report))
    next_step = None
    if not report.findings:
        with moepack.open(report.path) as pack:
            next_step = next_line("run", report.path) if pack.manifest.is_whole else None
    if is_json() or report.findings or not is_quiet():
        shown = None if is_verbose() else verification_text.SHOWN_FINDINGS
        show(report, partial(verification_text.report, shown=shown), next_step)
    if report.findings:
        raise SystemExit(ExitCode.DIFFERENCES)
