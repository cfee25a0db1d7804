"""The commands for a pack that is there, and that move none of its bytes."""

import contextlib
import sys
from itertools import chain

import click

import moepack
from moepack.cli import next_steps
from moepack.cli.parameters import InputFile, Length, OutputFolder, PathName
from moepack.cli.progress import progress
from moepack.cli.terminal import (
    columns,
    complain,
    json_option,
    pass_on,
    quiet_option,
    say,
    show,
    suggest,
    sum_up,
    verbose_option,
)
from moepack.errors import MoepackError, RequestError
from moepack.escaping import one_line
from moepack.sizes import Size, size_text


@click.command("list")
@click.argument("pack_path", type=PathName(), metavar="SOURCE_OR_PACK")
@click.option(
    "--hottest",
    type=Length(share_of="experts"),
    metavar="SIZE",
    help="Only the hottest blobs of up to 8GiB, say, or 25% of the experts.",
)
@click.option("--layers", "layer_text", metavar="LIST", help="Only these layers: 0-3,7.")
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV.")
@json_option
def list_(
    pack_path: str, hottest: Size | None, layer_text: str | None, as_csv: bool, as_json: bool
) -> None:
    """List every blob and dense tensor: what it is, where it lies, how hot it is.

    Example: moepack list model.moepack --hottest 8GiB --csv
    """
    from moepack.report import listing_text

    if as_csv and as_json:
        raise RequestError("CSV and JSON at once", hint="give --csv or --json, not both")
    rows = moepack.list_pack(pack_path, hottest=hottest, layers=layer_text)
    first_row = next(rows, None)
    rows = rows if first_row is None else chain([first_row], rows)
    if as_csv:
        lines = listing_text.csv_text(rows)
    elif as_json:
        lines = listing_text.json_text(rows)
    else:
        lines = listing_text.table(rows, columns())
    first = next(lines, "")
    pass_on([first])
    pass_on(lines)
    if not first and hottest is not None:
        fitting = hottest if isinstance(hottest, str) else size_text(hottest)
        complain("note", f"no blob fits into {fitting}")
    if first_row is not None and not (as_csv or as_json) and columns() is not None:
        suggest(next_steps.after_list(pack_path, first_row))


@click.command()
@click.argument("pack_path", type=PathName(), metavar="PACK")
@click.option(
    "--hotness",
    "hotness_path",
    type=InputFile(),
    metavar="FILE",
    help="Counts, a trace, or an imatrix.",
)
@click.option("--learned", is_flag=True, help="What runs of it have chosen lately.")
@json_option
def rank(pack_path: str, hotness_path: str | None, learned: bool, as_json: bool) -> None:
    """Rank the experts of PACK anew, by other hotness; blobs stay where they are.

    What is hottest decides what is pinned, warmed and listed first.

    Example: moepack rank model.moepack --hotness new.csv
    """
    from moepack.report import pack_text

    if (hotness_path is None) != learned:
        raise click.UsageError("Give --hotness FILE, or --learned.")
    hotness = moepack.learned_hotness(pack_path) if hotness_path is None else hotness_path
    show(moepack.rank_pack(pack_path, hotness), as_json, pack_text.ranked)


@click.command()
@click.argument("pack_path", type=PathName(), metavar="PACK")
@click.argument("target", required=False, type=OutputFolder(), metavar="[TARGET]")
@click.option(
    "--hottest",
    type=Length(share_of="experts"),
    metavar="SIZE",
    help="Only the hottest experts of up to 64GiB, say, or 25% of them.",
)
@click.option("--remove", is_flag=True, help="Remove the mirror that PACK has.")
@quiet_option
@verbose_option
@json_option
def mirror(
    pack_path: str, target: str | None, hottest: Size | None, remove: bool, as_json: bool
) -> None:
    """Copy the experts of PACK into the folder TARGET on another drive; then both are read.

    Each copy is read back and compared. The same command goes on where it was interrupted. Without
    TARGET, show the mirror that PACK has.

    Example: moepack mirror model.moepack /mnt/second --hottest 64GiB
    """
    from moepack.report import inspection, mirror_text
    from moepack.report.facts import PackMirrorFacts

    if target is None and hottest is not None:
        raise click.UsageError("--hottest goes with a TARGET.")
    if remove and target is not None:
        raise click.UsageError("--remove takes no TARGET.")
    if remove:
        sum_up(moepack.remove_mirror(pack_path), as_json, mirror_text.removed)
    elif target is None:
        with moepack.open(pack_path) as opened:
            facts = PackMirrorFacts(pack_path, inspection.describe_mirror(opened))
        show(facts, as_json, mirror_text.shown)
    else:
        with progress(None, "mirroring") as advanced:
            summary = moepack.mirror_pack(pack_path, target, hottest=hottest, progress=advanced)
        sum_up(summary, as_json, mirror_text.made, next_steps.run(pack_path))


@click.command()
@click.argument("pack_path", type=PathName(), metavar="PACK")
@click.argument("target", type=OutputFolder(), metavar="DIR")
@json_option
def mount(pack_path: str, target: str, as_json: bool) -> None:
    """Show the shards that a whole pack was made from as files in the empty folder DIR.

    Nothing is stored. It serves them until Ctrl-C, or until DIR is unmounted.

    Example: moepack mount model.moepack shards
    """
    from moepack.mounting.mount import MountFacts
    from moepack.report import pack_text

    context = click.get_current_context()

    def started(facts: MountFacts) -> None:
        # Nobody may read it, but the files are there; and click knows no other thread.
        with contextlib.suppress(OSError), context.scope(cleanup=False):
            show(facts, as_json, pack_text.mounted, next_steps.after_mount(facts))
            sys.stdout.flush()

    def failed(error: MoepackError) -> None:
        complain("error", str(error))

    moepack.mount(pack_path, target, started=started, failed=failed)
    if not as_json:
        say(f"{one_line(target)}: unmounted")
