"""The command `rank`."""

import click

import moepack
from moepack.cli.shared.options import hotness_option, json_option, pack_argument
from moepack.cli.shared.terminal import show


@click.command()
@pack_argument
@hotness_option
@click.option("--learned", is_flag=True, help="Counts from recent runs of the pack.")
@json_option
def rank(pack_path: str, hotness: str | None, learned: bool) -> None:
    """Rank the experts of PACK by other counts; blobs do not move.

    The hottest are pinned, loaded and listed first.

    Example: moepack rank model.moepack --hotness new.csv
    """
    from moepack.report import pack_text

    if (hotness is None) != learned:
        raise click.UsageError("Give --hotness FILE, or --learned.")
    counts = moepack.learned_hotness(pack_path) if hotness is None else hotness
    show(moepack.rank_pack(pack_path, counts), pack_text.ranked)
