"""The command `place`: what of a model goes where, as a command line."""

from __future__ import annotations

from typing import Any

import click

import moepack
from moepack.cli.model_options import prompt_options
from moepack.cli.parameters import InputFile, Length
from moepack.cli.terminal import (
    json_option,
    machine_option,
    quiet_option,
    show,
    source_or_pack_argument,
)
from moepack.errors import RequestError


@click.command()
@source_or_pack_argument
@machine_option
@click.option(
    "--vram",
    type=Length(),
    multiple=True,
    metavar="SIZE",
    help="Of a GPU, instead of the machine's; may be repeated.",
)
@click.option(
    "--ram", "memory", type=Length(), metavar="SIZE", help="Memory, instead of the machine's."
)
@click.option(
    "--engine",
    type=click.Choice(["llama.cpp", "ik_llama.cpp", "pack"]),
    help="What runs it: by default pack (`moepack run`) for a pack, else llama.cpp.",
)
@click.option(
    "--context",
    type=click.IntRange(1),
    help="Tokens of context; by default 32,768, or what the model was trained for if that is less.",
)
@click.option(
    "--cache-type",
    "cache_type",
    default="f16",
    show_default=True,
    metavar="TYPE",
    help="Of keys and values; K,V where they differ.",
)
@click.option(
    "--margin",
    type=Length(),
    default=1 << 30,
    metavar="SIZE",
    help="What is left free of each memory.  [default: 1GiB]",
)
@click.option(
    "--trace",
    "traces",
    multiple=True,
    type=InputFile(),
    metavar="FILE",
    help="Says whether single experts are worth pinning.",
)
@click.option(
    "--hotness", type=InputFile(), metavar="FILE", help="Says the same, without the order in time."
)
@prompt_options
@quiet_option
@json_option
def place(
    source_or_pack: tuple[str, ...],
    machine_path: str | None,
    cache_type: str,
    as_json: bool,
    **options: Any,
) -> None:
    """Say what of a model goes into VRAM and memory, and print the command line to paste.

    Example: moepack place model.gguf --vram 24GiB --ram 64GiB
    """
    from moepack.report import placement_text

    keys, comma, values = cache_type.partition(",")
    if comma and not values:
        expected = "a type, or two with a comma"
        raise RequestError(
            "not a type", place="--cache-type", expected=expected, found=cache_type[:40]
        )
    options["cache_types"] = (keys, values or keys)
    facts = moepack.place(source_or_pack, machine_path, **options)
    show(facts, as_json, placement_text.text)
