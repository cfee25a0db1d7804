"""The command `mirror`."""

import click

import moepack
from moepack.cli.shared.options import hottest_option, pack_argument, progress_options
from moepack.cli.shared.parameters import OutputFolder
from moepack.cli.shared.progress import progress
from moepack.cli.shared.terminal import next_line, show, sum_up
from moepack.common.sizes import Size


@click.command()
@pack_argument
@click.argument("target", required=False, type=OutputFolder(), metavar="[TARGET]")
@hottest_option("experts")
@click.option("--remove", is_flag=True, help="Remove the mirror of PACK.")
@progress_options
def mirror(pack_path: str, target: str | None, hottest: Size | None, remove: bool) -> None:
    """Copy experts of PACK into the folder TARGET on another drive, to read from both.

    Each copy is read back and compared. An interrupted command continues if it is run again.
    Without TARGET, show the mirror of PACK.

    Example: moepack mirror model.moepack /mnt/second --hottest 64GiB
    """
    from moepack.inspection import describe
    from moepack.inspection.facts import PackMirrorFacts
    from moepack.report import mirror_text

    if target is None and hottest is not None:
        raise click.UsageError("--hottest needs a TARGET.")
    if remove and target is not None:
        raise click.UsageError("--remove takes no TARGET.")
    if remove:
        sum_up(moepack.remove_mirror(pack_path), mirror_text.removed)
    elif target is None:
        with moepack.open(pack_path) as opened:
            facts = PackMirrorFacts(pack_path, describe.describe_mirror(opened))
        show(facts, mirror_text.shown)
    else:
        with progress(None, "mirroring") as advance:
            summary = moepack.mirror_pack(pack_path, target, hottest=hottest, progress=advance)
        sum_up(summary, mirror_text.made, next_line("run", pack_path))
