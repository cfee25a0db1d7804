"""The command `ps`: the servers that run."""

import click

from moepack.cli.shared.options import json_option
from moepack.cli.shared.terminal import show


@click.command()
@json_option
def ps() -> None:
    """List the servers of `moepack serve` that this user runs.

    Speed is that of the last answer, hits those since the start. --json has all figures.

    Example: moepack ps
    """
    from moepack.report import serving_text
    from moepack.running.serving.running_servers import read_servers

    show({"servers": read_servers()}, lambda facts: serving_text.servers(facts["servers"]))
