"""The command `pack`."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import click

import moepack
from moepack.cli.shared.confirmation import check_confirmation, confirm
from moepack.cli.shared.executors import executor_option, opened_executor, part_option
from moepack.cli.shared.options import (
    dry_run_option,
    folder_option,
    hotness_option,
    layers_option,
    layout_option,
    progress_options,
    recover_option,
    resume_option,
    size_option,
    threads_option,
)
from moepack.cli.shared.parameters import ModelName
from moepack.cli.shared.progress import progress
from moepack.cli.shared.terminal import is_json, is_quiet, lay_out, next_line, sum_up
from moepack.common.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Executor

    from moepack.packing.plan.pack_summary import PackSummary


@click.command()
@click.argument("source", nargs=-1, type=ModelName(), metavar="SOURCE...")
@folder_option("Folder of the new pack.")
@layout_option
@size_option("--alignment", least=0, help="Alignment of blobs, weights and tensors, such as 16KiB.")
@hotness_option
@click.option("--experts-only", is_flag=True, help="Leave out the dense part.")
@layers_option
@click.option("--no-mtp", is_flag=True, help="Leave out multi-token-prediction layers.")
@click.option("--sha256", is_flag=True, help="Record the SHA-256 of each shard, for restore.")
@click.option("--strong", is_flag=True, help="Add a SHA-256 of each part, tensor and header.")
@click.option("--in-place", is_flag=True, help="Turn the shards themselves into the pack.")
@click.option(
    "--yes-delete-source", "is_confirmed", is_flag=True, help="Pack in place without asking."
)
@part_option("data files")
@click.option("--commit", is_flag=True, help="Make a pack of the parts, once all are written.")
@executor_option
@dry_run_option
@resume_option
@recover_option
@threads_option
@progress_options
def pack(
    source: tuple[str, ...],
    target: str,
    no_mtp: bool,
    in_place: bool,
    is_confirmed: bool,
    dry_run: bool,
    resume: bool,
    recover: bool,
    executor: str | None,
    **options: Any,
) -> None:
    """Turn SOURCE into the new pack DIR: the whole model, one aligned blob per expert.

    With --in-place --resume, leave SOURCE out: all of it is in DIR. SOURCE and DIR may be
    addresses (hf://, https://, s3://); many machines can each write a --part.

    Example: moepack pack model.gguf --hotness hot.csv -o model.moepack
    """
    from moepack.report import pack_text
    from moepack.report.facts import printable

    if recover and not (in_place and resume):
        raise click.UsageError("--recover needs --in-place --resume.")
    if not source and not (in_place and resume):
        raise click.UsageError("SOURCE is missing")
    check_confirmation("--yes-delete-source", is_confirmed, in_place)

    def print_plan(summary: PackSummary) -> None:
        if not is_json() and not is_quiet():
            lay_out(pack_text.plan(printable(summary)))

    call: Callable[..., PackSummary]
    if in_place:
        _check_in_place(no_mtp, executor, options)
        common = {name: options[name] for name in ("layout", "alignment", "hotness", "sha256")}
        common |= {"threads": options["threads"], "resume": resume, "recover": recover}
        call = partial(moepack.pack_in_place, source, target, **common)
    else:
        call = partial(_pack, source, target, resume=resume, mtp=not no_mtp, **options)
    if in_place and not (is_confirmed or dry_run or resume):
        summary = call(dry_run=True)
        if summary.in_place is not None and not summary.in_place.refusals:
            confirm(pack_text.what_is_given_up(printable(summary)), "--yes-delete-source")
    with progress(None, "packing") as advance, opened_executor(executor) as workers:
        if not in_place:
            call = partial(call, executor=workers)
        summary = call(dry_run=dry_run, planned=print_plan, progress=advance)
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
    executor: Executor | None,
    **options: Any,
) -> PackSummary:
    """Pack alone, or together with others."""
    if (part is not None) + (executor is not None) + commit > 1:
        raise RequestError("at most one of `part`, `commit` and `executor` can be used")
    if part is None and executor is None and not commit:
        return moepack.pack_model(source, target, resume=resume, **options)
    shared = moepack.SharedPack(source, target, **options)
    if executor is not None:
        return shared.write(executor, resume=resume)
    return shared.commit() if part is None else shared.write_part(part)


def _check_in_place(no_mtp: bool, executor: str | None, options: dict[str, Any]) -> None:
    """Refuse options that do not go together with --in-place."""
    if options["strong"]:
        problem = "strong digests are not written in place"
        raise RequestError(problem, hint="pack without one of them")
    if options["experts_only"] or options["layers"] is not None or no_mtp:
        problem = "`in_place` packs the whole model: anything left out would be lost"
        hint = "leave out `experts_only`, `layers` and `mtp=False`, or `in_place`"
        raise RequestError(problem, hint=hint)
    if options["part"] is not None or options["commit"] or executor is not None:
        raise RequestError("shards are turned into a pack by one process", argument="in_place")
