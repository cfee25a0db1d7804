"""The command `verify`."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

import moepack
from moepack.cli.shared.argument_names import typed_name
from moepack.cli.shared.executors import executor_option, opened_executor, part_option
from moepack.cli.shared.exit_codes import ExitCode
from moepack.cli.shared.files import output_file
from moepack.cli.shared.options import (
    force_option,
    layers_option,
    progress_options,
    source_option,
    threads_option,
)
from moepack.cli.shared.parameters import OutputFile, PathName
from moepack.cli.shared.progress import progress
from moepack.cli.shared.terminal import is_json, is_quiet, is_verbose, next_line, show
from moepack.storage.atomic import write_whole

if TYPE_CHECKING:
    from moepack.common.phases import Progress
    from moepack.pack.verifying.report import Report


@click.command()
@click.argument("path", type=PathName(), metavar="PACK_OR_EXPORT")
@source_option
@click.option(
    "--as",
    "engine",
    metavar="FORMAT",
    help="Verify an export of this format instead of a pack: see `moepack export`.",
)
@click.option(
    "--pack",
    type=PathName(),
    metavar="PACK",
    help="Pack that was exported, for comparison; or its source as --source.",
)
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
@part_option("data files")
@executor_option
@threads_option
@progress_options
def verify(
    path: str,
    source_paths: tuple[str, ...],
    engine: str | None,
    pack: str | None,
    junit_path: str | None,
    force: bool,
    executor: str | None,
    **options: Any,
) -> None:
    """Verify a pack: its structure, padding and digests, and every byte against the source.

    With --as, verify an export: every byte against the pack or the source.

    Example: moepack verify model.moepack --source model-00001-of-00004.gguf
    """
    from moepack.report import verification_text

    with contextlib.ExitStack() as outputs:
        if junit_path:
            junit_file = outputs.enter_context(output_file(junit_path, force=force))
        with progress(None, "verifying") as advance:
            if engine is None and pack is None:
                with opened_executor(executor) as workers:
                    options |= {"executor": workers, "progress": advance}
                    report = moepack.verify(path, source_paths or None, **options)
            else:
                options["executor"] = executor
                report = _verify_export(engine, path, pack, source_paths, advance, **options)
        if junit_path:
            write_whole(junit_file, verification_text.junit(report))
    next_step = None
    if not report.findings and engine is None:
        with moepack.open(report.path) as opened:
            next_step = next_line("run", report.path) if opened.manifest.is_whole else None
    if is_json() or report.findings or not is_quiet():
        shown = None if is_verbose() else verification_text.SHOWN_FINDINGS
        show(report, partial(verification_text.report, shown=shown), next_step)
    if report.findings:
        raise SystemExit(ExitCode.DIFFERENCES)


def _verify_export(
    engine: str | None,
    path: str,
    pack: str | None,
    source_paths: tuple[str, ...],
    advance: Progress | None,
    threads: int,
    **others: Any,
) -> Report:
    """Verify an export; raise UsageError for options that are for packs alone."""
    if engine is None:
        raise click.UsageError("--pack is for exports: name their format with --as")
    context = click.get_current_context()
    for name in others:
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            option = next(one for one in context.command.params if one.name == name)
            raise click.UsageError(f"{typed_name(option)} is for packs, not for exports")
    return moepack.verify_export(
        engine,
        path,
        pack=pack,
        source=source_paths or None,
        threads=threads,
        progress=advance,
    )
