"""The command `restore`."""

from pathlib import Path
from typing import Any

import click

import moepack
from moepack.cli.shared.confirmation import check_confirmation, confirm
from moepack.cli.shared.executors import executor_option, opened_executor, part_option
from moepack.cli.shared.options import (
    folder_option,
    force_option,
    pack_argument,
    progress_options,
    recover_option,
    resume_option,
    threads_option,
)
from moepack.cli.shared.progress import progress
from moepack.cli.shared.terminal import sum_up
from moepack.common.errors import RequestError
from moepack.common.escaping import one_line


@click.command()
@pack_argument
@folder_option("Folder for the shards.", required=False)
@click.option("--in-place", is_flag=True, help="Turn the pack itself into the shards.")
@click.option(
    "--yes-delete-pack", "is_confirmed", is_flag=True, help="Restore in place without asking."
)
@resume_option
@recover_option
@force_option
@part_option("shards")
@executor_option
@threads_option
@progress_options
def restore(
    pack_path: str,
    target: str | None,
    in_place: bool,
    is_confirmed: bool,
    executor: str | None,
    **options: Any,
) -> None:
    """Write the shards of a whole pack again, bit for bit.

    An unfinished pack made in place is turned back into its shards, at their old paths or in DIR.

    Example: moepack restore model.moepack -o shards
    """
    from moepack.report import pack_text

    check_confirmation("--yes-delete-pack", is_confirmed, in_place)
    if in_place and not is_confirmed:
        _check_restorable(pack_path, target)
        deletion = "will be turned back into its shards, and be gone"
        confirm(f"{one_line(pack_path)} {deletion}", "--yes-delete-pack")
    with progress(None, "restoring") as advance, opened_executor(executor) as workers:
        options |= {"in_place": in_place, "executor": workers, "progress": advance}
        summary = moepack.restore(pack_path, target, **options)
    sum_up(summary, pack_text.restored)


def _check_restorable(pack_path: str, target: str | None) -> None:
    """Raise the errors with which `restore --in-place` would end even if it is confirmed."""
    from moepack.pack.reading.shard_map import check_whole
    from moepack.packing.in_place.unfinished import is_unfinished

    if is_unfinished(Path(pack_path)):
        return
    with moepack.Pack(pack_path) as pack:
        check_whole(pack)
    if target is None:
        raise RequestError("no folder was given for the shards", hint="name one with --output")
