"""The commands that make a pack, and that make other files of one: pack, index, restore, export."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from moepack.cli import next_steps
from moepack.cli.files import force_option
from moepack.cli.front import Commands
from moepack.cli.parameters import (
    InputFile,
    LayoutName,
    Length,
    OutputFolder,
    PathName,
    ResumableFile,
)
from moepack.cli.progress import progress
from moepack.cli.terminal import (
    is_quiet,
    json_option,
    lay_out,
    quiet_option,
    say,
    sum_up,
    threads_option,
    verbose_option,
)
from moepack.errors import RequestError
from moepack.escaping import one_line

if TYPE_CHECKING:
    from moepack.packing.pack_summary import PackSummary

Command = TypeVar("Command", bound=Callable[..., Any])

_resume_option = click.option("--resume", is_flag=True, help="Continue an interrupted run.")
_recover_option = click.option(
    "--recover", is_flag=True, help="Continue in place with a damaged journal: the bytes decide."
)
_source_argument = click.argument(
    "source", nargs=-1, required=True, type=PathName(), metavar="SOURCE..."
)
_pack_argument = click.argument("pack_path", type=PathName(), metavar="PACK")
_hotness_option = click.option(
    "--hotness",
    "hotness_path",
    type=InputFile(),
    metavar="FILE",
    help="Counts, a trace, or an imatrix.",
)


def _directory_option(help_text: str, *, required: bool = True) -> Callable[[Command], Command]:
    return click.option(
        "-o",
        "--output",
        "target",
        required=required,
        type=OutputFolder(),
        metavar="DIR",
        help=help_text,
    )


@click.command()
@click.argument("source", nargs=-1, type=PathName(), metavar="SOURCE...")
@_directory_option("The pack to make.")
@click.option(
    "--layout",
    "layout_name",
    type=LayoutName(),
    default="layers",
    show_default=True,
    metavar="NAME|FILE.toml",
    help="How blobs are grouped and ordered: layers, hot-first, natural, or a file.",
)
@click.option(
    "--alignment",
    type=Length(least=0),
    metavar="SIZE",
    help="Of blobs, weights and tensors: 16KiB.",
)
@click.option("--codec", metavar="zstd[:LEVEL]", help="Compress parts that it shortens by 5 %.")
@_hotness_option
@click.option("--experts-only", is_flag=True, help="Leave out the dense part.")
@click.option("--layers", "layer_text", metavar="LIST", help="Only experts of these layers: 0-3,7.")
@click.option("--no-mtp", is_flag=True, help="Leave out multi-token-prediction layers.")
@click.option("--sha256", is_flag=True, help="Note the SHA-256 of each shard, to restore by.")
@click.option("--strong", is_flag=True, help="Add a SHA-256 of each part, tensor and header.")
@click.option("--in-place", is_flag=True, help="Turn the shards themselves into the pack.")
@click.option("--yes-delete-source", "confirmed", is_flag=True, help="Do not ask before that.")
@click.option("--dry-run", is_flag=True, help="Print the plan and write nothing.")
@_resume_option
@_recover_option
@threads_option
@quiet_option
@verbose_option
@json_option
def pack(
    source: tuple[str, ...],
    target: str,
    layout_name: str,
    alignment: int | None,
    codec: str | None,
    hotness_path: str | None,
    experts_only: bool,
    layer_text: str | None,
    no_mtp: bool,
    sha256: bool,
    strong: bool,
    in_place: bool,
    confirmed: bool,
    dry_run: bool,
    resume: bool,
    recover: bool,
    threads: int,
    as_json: bool,
) -> None:
    """Turn SOURCE into the new pack DIR: all of the model, one aligned blob per expert.

    With --in-place --resume, SOURCE is left out: all that it takes is in DIR.

    Example: moepack pack model.gguf --hotness hot.csv -o model.moepack
    """
    from moepack.packing.pack_model import pack_model
    from moepack.report import pack_text
    from moepack.report.printable import printable

    if recover and not (in_place and resume):
        raise click.UsageError("--recover goes with --in-place --resume.")
    if not source and not (in_place and resume):
        raise click.UsageError("SOURCE is missing")
    _check_confirmation("--yes-delete-source", confirmed, in_place)

    def planned(summary: PackSummary) -> None:
        if not as_json and not is_quiet():
            lay_out(pack_text.plan(printable(summary)))

    call = partial(
        pack_model,
        source,
        target,
        layout=layout_name,
        alignment=alignment,
        codec=codec,
        hotness=hotness_path,
        layers=layer_text,
        mtp=not no_mtp,
        experts_only=experts_only,
        sha256=sha256,
        strong=strong,
        in_place=in_place,
        resume=resume,
        recover=recover,
        threads=threads,
    )
    if in_place and not (confirmed or dry_run or resume):
        _ask_for_shards(call(dry_run=True))
    with progress(None, "packing") as advanced:
        summary = call(dry_run=dry_run, planned=planned, progress=advanced)
    next_step = next_steps.after_pack(summary, source, is_in_place=in_place)
    sum_up(summary, as_json, pack_text.packed, next_step)
    if dry_run and summary.in_place and summary.in_place.refusals:
        raise RequestError("it would be refused", hint="see above")


def _ask_for_shards(summary: PackSummary) -> None:
    """Ask whether the shards may be given up; where it will be refused, that is said first."""
    from moepack.report import pack_text
    from moepack.report.printable import printable

    assert summary.in_place is not None
    if not summary.in_place.refusals:
        _ask(pack_text.what_is_given_up(printable(summary)), "--yes-delete-source")


def _check_confirmation(option: str, confirmed: bool, in_place: bool) -> None:
    if confirmed and not in_place:
        hint = "without --in-place nothing is deleted: leave it out"
        raise RequestError("confirms what was not asked for", place=option, hint=hint)


def _ask(what: str, option: str) -> None:
    """Ask on the terminal for the word that deletes; raise RequestError for anything else."""
    if not sys.stdin.isatty():
        hint = f"this is asked for on a terminal: say it with {option}"
        raise RequestError(f"not confirmed: {what}", hint=hint)
    say(what, err=True)
    if click.prompt("Type delete to go on", default="", show_default=False, err=True) != "delete":
        raise RequestError("not confirmed: nothing was touched")


@click.command()
@_source_argument
@_directory_option("The index to make.")
@_hotness_option
@click.option("--digests", is_flag=True, help="Read the shards, so that reads can be checked.")
@threads_option
@quiet_option
@verbose_option
@json_option
def index(
    source: tuple[str, ...],
    target: str,
    hotness_path: str | None,
    digests: bool,
    threads: int,
    as_json: bool,
) -> None:
    """Lay an index over the shards of SOURCE as they lie; nothing is copied.

    Readers, bench and engines take DIR as a pack; it has links to the shards.

    Example: moepack index model-00001-of-00004.gguf -o model.index
    """
    from moepack.packing.shard_index import index_model
    from moepack.report import pack_text

    with progress(None, "indexing") as advanced:
        summary = index_model(
            source,
            target,
            hotness=hotness_path,
            digests=digests,
            threads=threads,
            progress=advanced,
        )
    sum_up(summary, as_json, pack_text.indexed, next_steps.run(target))


@click.command()
@_pack_argument
@_directory_option("Where they go.", required=False)
@click.option("--in-place", is_flag=True, help="Turn the pack itself into the shards.")
@click.option("--yes-delete-pack", "confirmed", is_flag=True, help="Do not ask before that.")
@_resume_option
@_recover_option
@force_option
@threads_option
@quiet_option
@verbose_option
@json_option
def restore(
    pack_path: str,
    target: str | None,
    in_place: bool,
    confirmed: bool,
    resume: bool,
    recover: bool,
    force: bool,
    threads: int,
    as_json: bool,
) -> None:
    """Write the shards that a whole pack was made from, bit for bit.

    A pack that is made in place, and is not finished, goes back to its shards: where they were, or
    into DIR.

    Example: moepack restore model.moepack -o shards
    """
    from moepack.packing.restore import restore as restore_shards
    from moepack.report import pack_text

    _check_confirmation("--yes-delete-pack", confirmed, in_place)
    if in_place and not confirmed:
        _check_restorable(pack_path, target)
        what = "will be turned into the shards that it was made from, and be gone"
        _ask(f"{one_line(pack_path)} {what}", "--yes-delete-pack")
    with progress(None, "restoring") as advanced:
        summary = restore_shards(
            pack_path,
            target,
            in_place=in_place,
            resume=resume,
            recover=recover,
            force=force,
            threads=threads,
            progress=advanced,
        )
    sum_up(summary, as_json, pack_text.restored)


def _check_restorable(pack_path: str, target: str | None) -> None:
    """Raise what `restore --in-place` would end with however it is confirmed."""
    from moepack.packing.in_place_refusals import check_plain
    from moepack.packing.unfinished import is_unfinished
    from moepack.reading.pack import Pack
    from moepack.reading.shard_map import check_whole

    if is_unfinished(Path(pack_path)):
        return
    with Pack(pack_path) as pack:
        check_whole(pack)
        check_plain(pack)
    if target is None:
        raise RequestError("no folder is given for the shards", hint="name one with --output")


@click.group(cls=Commands)
def export() -> None:
    """Write a pack as what other engines read."""


@export.command()
@_pack_argument
@click.option(
    "-o",
    "--output",
    "target",
    required=True,
    type=ResumableFile(),
    metavar="FILE",
    help="The GGUF to make.",
)
@click.option(
    "--alignment",
    type=Length(least=0),
    default="4KiB",
    show_default=True,
    metavar="SIZE",
    help="Of all tensors.",
)
@_resume_option
@force_option
@threads_option
@quiet_option
@verbose_option
@json_option
def gguf(
    pack_path: str,
    target: str,
    alignment: int,
    resume: bool,
    force: bool,
    threads: int,
    as_json: bool,
) -> None:
    """Write a whole pack as one stock GGUF: dense tensors first, experts last by layer.

    Example: moepack export gguf model.moepack -o model.gguf
    """
    from moepack.engines.stock_gguf import export_gguf
    from moepack.report import pack_text

    with progress(None, "exporting") as advanced:
        summary = export_gguf(
            pack_path,
            target,
            alignment=alignment,
            resume=resume,
            force=force,
            threads=threads,
            progress=advanced,
        )
    sum_up(summary, as_json, pack_text.exported, next_steps.after_export(summary))
