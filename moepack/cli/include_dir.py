"""The command `include-dir`."""

import click

from moepack.cli.shared.terminal import pass_on
from moepack.common import installed


@click.command("include-dir")
def include_dir() -> None:
    """Print the folder that holds moepack.h, the reader for C and C++.

    Example: moepack include-dir
    """
    pass_on([f"{installed.folder('include')}\n"])
