"""What `run` and `serve` ask alike: how a model is held in memory and computed."""

from collections.abc import Callable
from typing import Any

import click

from moepack.cli.parameters import ResumableFile
from moepack.llama_cpp.bounds import MAX_CONTEXT, MAX_THREADS

_OPTIONS = (
    click.option(
        "--memory", metavar="SIZE", help="For all of the model: 8GiB, or floor for the least."
    ),
    click.option(
        "--policy",
        type=click.Choice(["lru", "lfu", "layer-lru", "layer-lfu"]),
        default="lru",
        show_default=True,
        help="Which experts are given up.",
    ),
    click.option("--pin", metavar="SIZE", default="0", help="Keep the hottest experts: 2GiB."),
    click.option(
        "-c",
        "--context",
        type=click.IntRange(1, MAX_CONTEXT),
        default=4096,
        show_default=True,
        help="Tokens that the model looks back on.",
    ),
    click.option(
        "-t", "--threads", type=click.IntRange(1, MAX_THREADS), help="Threads that compute."
    ),
    click.option(
        "--backend",
        type=click.Choice(["auto", "uring", "direct", "buffered"]),
        default="auto",
        show_default=True,
        help="How experts are read.",
    ),
    click.option(
        "--check",
        type=click.Choice(["always", "first", "never"]),
        default="first",
        show_default=True,
        help="When what was read is compared with its digest.",
    ),
    click.option(
        "--trace", type=ResumableFile(), metavar="FILE", help="Record which experts it chose."
    ),
)


def engine_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options to a command; they are arguments of `moepack.Model` of the same names."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command
