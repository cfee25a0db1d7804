"""The options that all commands have that read traces."""

import click

from moepack.cli.parameters import FormatName

format_option = click.option(
    "--format",
    "form",
    type=FormatName(),
    metavar="NAME",
    help="What the files are, whatever their content says.",
)
lenient_option = click.option(
    "--lenient", is_flag=True, help="Leave out and count what is wrong, instead of stopping."
)
