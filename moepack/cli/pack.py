"""The commands `pack`, `restore` and `verify`."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

import moepack
from moepack.cli.shared import options
from moepack.cli.shared.argument_names import typed_name
from moepack.cli.shared.exit_codes import ExitCode
from moepack.cli.shared.options import Option, flag_option, size_option
from moepack.cli.shared.parameters import ModelName, PathName
from moepack.cli.shared.progress import progress
from moepack.cli.shared.terminal import (
    announce,
    complain,
    confirm,
    is_json,
    is_quiet,
    is_verbose,
    next_line,
    show,
    sum_up,
)
from moepack.common.errors import RequestError
from moepack.common.escaping import one_line, shell_word
from moepack.common.paths import is_remote

if TYPE_CHECKING:
    from collections.abc import Callable

    from moepack.common.phases import Progress
    from moepack.pack.verifying.report import Report
    from moepack.packing.plan.pack_summary import PackSummary


def _part_option(files: str) -> Option[Any]:
    """Return the option for a share of some files."""
    help_text = f"Share of the {files} to do, such as 3/16: one of 16 about equal ones."
    return click.option("--part", metavar="N/COUNT", help=help_text)


@click.command()
@click.argument("source", nargs=-1, type=ModelName(), metavar="SOURCE...")
@options.folder_option("Folder of the new pack.")
@options.layout_option
@size_option("--alignment", least=0, help="Alignment of blobs, weights and tensors, such as 16KiB.")
@options.hotness_option
@flag_option("--experts-only", help="Leave out the dense part.")
@options.layers_option
@flag_option("--no-mtp", help="Leave out multi-token-prediction layers.")
@flag_option("--sha256", help="Record the SHA-256 of each shard, for restore.")
@flag_option("--strong", help="Add a SHA-256 of each part, tensor and header.")
@flag_option("--in-place", help="Turn the shards themselves into the pack.")
@flag_option("--yes-delete-source", "is_confirmed", help="Pack in place without asking.")
@_part_option("data files")
@flag_option("--commit", help="Make a pack of the parts, once all are written.")
@options.dry_run_option
@options.resume_option
@options.recover_option
@options.threads_option
@options.progress_options
def pack(
    source: tuple[str, ...],
    target: str,
    no_mtp: bool,
    in_place: bool,
    is_confirmed: bool,
    dry_run: bool,
    resume: bool,
    recover: bool,
    **options: Any,
) -> None:
    """Turn SOURCE into the new pack DIR: the whole model, one aligned blob per expert.

    With --in-place --resume, leave SOURCE out: all of it is in DIR. SOURCE and DIR may be
    addresses (hf://, https://, s3://); many machines can each write a --part.

    Example: moepack pack model.gguf --hotness hot.csv -o model.moepack
    """
    from moepack.report import pack_text
    from moepack.report.facts import printable

    recovers = in_place and resume
    if recover and not recovers:
        raise click.UsageError("--recover needs --in-place --resume.")
    if not source and not recovers:
        raise click.UsageError("SOURCE is missing")

    options |= {"resume": resume}
    if in_place:
        call = _in_place_call(source, target, no_mtp, recover=recover, **options)
        if not (is_confirmed or dry_run or resume):
            summary = call(dry_run=True)
            if summary.in_place is not None and not summary.in_place.refusals:
                confirm(pack_text.what_is_given_up(printable(summary)), "--yes-delete-source")
    else:
        call = partial(_pack, source, target, mtp=not no_mtp, **options)
    with progress("packing") as advance:
        announced = partial(announce, render=pack_text.plan)
        summary = call(dry_run=dry_run, planned=announced, progress=advance)
    next_step = None
    if summary.written_length is not None and summary.missing_file_count is None:
        sources = [] if in_place else [word for path in source for word in ("--source", path)]
        next_step = next_line("verify", summary.path, *sources)
    sum_up(summary, pack_text.packed, next_step)
    if dry_run and summary.in_place and summary.in_place.refusals:
        raise RequestError("it would be refused", hint="see above")


def _pack(
    source: tuple[str, ...],
    target: str,
    *,
    resume: bool,
    part: str | None,
    commit: bool,
    **options: Any,
) -> PackSummary:
    """Pack alone, or together with others."""
    if part is not None and commit:
        raise RequestError("`part` writes data files, and `commit` none: use one of them")
    if part is None and not commit:
        return moepack.pack_model(source, target, resume=resume, **options)
    shared = moepack.SharedPack(source, target, **options)
    return shared.commit() if part is None else shared.write_part(part)


def _in_place_call(
    source: tuple[str, ...],
    target: str,
    no_mtp: bool,
    **options: Any,
) -> Callable[..., PackSummary]:
    """Return the call that packs in place; refuse options that do not go together with it."""
    if options.pop("strong"):
        problem = "strong digests are not written in place"
        raise RequestError(problem, hint="pack without one of them")
    if options.pop("experts_only") or options.pop("layers") is not None or no_mtp:
        problem = "`in_place` packs the whole model: anything left out would be lost"
        hint = "leave out `experts_only`, `layers` and `mtp=False`, or `in_place`"
        raise RequestError(problem, hint=hint)
    if options.pop("part") is not None or options.pop("commit"):
        raise RequestError("shards are turned into a pack by one process", argument="in_place")
    return partial(moepack.pack_in_place, source, target, **options)


@click.command()
@options.pack_argument
@options.folder_option("Folder for the shards.", required=False)
@flag_option("--in-place", help="Turn the pack itself into the shards.")
@flag_option("--yes-delete-pack", "is_confirmed", help="Restore in place without asking.")
@options.resume_option
@options.recover_option
@options.force_option
@_part_option("shards")
@options.threads_option
@options.progress_options
def restore(
    pack_path: str,
    target: str | None,
    in_place: bool,
    is_confirmed: bool,
    **options: Any,
) -> None:
    """Write the shards of a whole pack again, bit for bit.

    An unfinished pack made in place is turned back into its shards, at their old paths or in DIR.

    Example: moepack restore model.moepack -o shards
    """
    from moepack.report import pack_text

    if in_place and not is_confirmed:
        deletion = "will be turned back into its shards, and be gone"
        confirm(f"{one_line(pack_path)} {deletion}", "--yes-delete-pack")
    with progress("restoring") as advance:
        options |= {"in_place": in_place, "progress": advance}
        summary = moepack.restore(pack_path, target, **options)
    sum_up(summary, pack_text.restored)


@click.command()
@click.argument("path", type=PathName(), metavar="PACK_OR_EXPORT")
@options.source_option
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
@options.layers_option
@flag_option("--sha256", help="Also compare the SHA-256 of the shards.")
@flag_option("--with-gguf-py", help="Also compare with the source as read by gguf-py.")
@_part_option("bytes")
@options.threads_option
@options.progress_options
def verify(
    path: str,
    source_paths: tuple[str, ...],
    engine: str | None,
    pack: str | None,
    **options: Any,
) -> None:
    """Verify a pack: its structure, padding and digests, and every byte against the source.

    With --as, verify an export: every byte against the pack or the source.

    Example: moepack verify model.moepack --source model-00001-of-00004.gguf
    """
    from moepack.report import verification_text

    with progress("verifying") as advance:
        if engine is None and pack is None:
            report = moepack.verify(path, source_paths or None, progress=advance, **options)
        else:
            report = _verify_export(engine, path, pack, source_paths, advance, **options)
    next_step = None
    if not report.findings and engine is None:
        with moepack.open(report.path) as opened:
            next_step = next_line("run", report.path) if opened.manifest.is_whole else None
    if is_json() or report.findings or not is_quiet():
        shown = None if is_verbose() else verification_text.SHOWN_FINDINGS
        show(report, partial(verification_text.report, shown=shown), next_step)
    if report.findings:
        kinds = {finding.kind for finding in report.findings}
        if engine is None and kinds & _REPAIRABLE and not (is_quiet() or is_remote(path)):
            command = f"moepack repair {shell_word(path)} --from SOURCE_OR_PACK"
            complain("hint", f"write back what is damaged, from its shards or a copy: {command}")
        raise SystemExit(ExitCode.DIFFERENCES)


_REPAIRABLE = {"digest", "padding", "file", "index", "manifest"}
"""Kinds of findings that are damage, which a copy can mend."""


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
        engine, path, pack=pack, source=source_paths or None, threads=threads, progress=advance
    )
