"""The command `locate`."""

import click

from moepack.cli.shared.options import expert_options, json_option, opened_argument
from moepack.cli.shared.terminal import show


@click.command()
@opened_argument
@expert_options
@json_option
def locate(pack_path: str, layer: int, expert: int, family: str | None) -> None:
    """Show the file and the offset of an expert's blob and of each of its parts.

    Example: moepack locate model.moepack --layer 3 --expert 17
    """
    from moepack.inspection import describe
    from moepack.pack.opening.open_model import open_model
    from moepack.report import text

    with open_model(pack_path) as opened:
        facts = describe.describe_blob(opened, layer, expert, family=family)
    show(facts, text.blob)
