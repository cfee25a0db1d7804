"""The command `recipe`."""

import click

import moepack
from moepack.cli.shared.options import folder_option, pack_argument, summary_options
from moepack.cli.shared.terminal import sum_up


@click.command()
@pack_argument
@folder_option("Folder of the new recipe.")
@summary_options
def recipe(pack_path: str, target: str) -> None:
    """Write the recipe of PACK into DIR, a few megabytes: others make the same pack by it.

    They have the GGUF already, or its address: `moepack pack SOURCE --recipe DIR -o NEW_PACK`
    copies each part to its place, and compares it with its digest.

    Example: moepack recipe qwen3.moepack -o qwen3-recipe
    """
    from moepack.report import pull_text

    sum_up(moepack.write_recipe(pack_path, target), pull_text.recipe)
