"""The command `place`."""

from __future__ import annotations

from typing import Any

import click

import moepack
from moepack.cli.shared.options import (
    file_option,
    forecast_prompt_options,
    machine_option,
    number_option,
    size_option,
    source_or_pack_argument,
    summary_options,
    traces_option,
)
from moepack.cli.shared.terminal import show
from moepack.common.errors import RequestError


@click.command()
@source_or_pack_argument
@machine_option
@size_option(
    "--vram", multiple=True, help="VRAM of a GPU, in place of the machine's; may be repeated."
)
@size_option("--ram", "memory", help="Memory, in place of the machine's.")
@click.option(
    "--engine",
    type=click.Choice(["llama.cpp", "ik_llama.cpp", "pack"]),
    help="Engine: pack (`moepack run`) by default for a pack, else llama.cpp.",
)
@number_option(
    "--context",
    least=1,
    help="Context length in tokens; by default 32,768, or the trained length if that is less.",
)
@click.option(
    "--cache-type",
    default="f16",
    metavar="TYPE",
    help="Type of the KV cache; K,V if keys and values differ.",
)
@size_option("--margin", default="1GiB", help="Space left free in each memory.")
@traces_option
@file_option(
    "--hotness", help="Hotness file, in place of --trace, to judge whether to pin experts."
)
@forecast_prompt_options
@summary_options
def place(
    source_or_pack: tuple[str, ...], machine_path: str | None, cache_type: str, **options: Any
) -> None:
    """Plan which weights go into VRAM and memory, and print the command line to paste.

    Example: moepack place model.gguf --vram 24GiB --ram 64GiB
    """
    from moepack.report import plan_text

    keys, comma, values = cache_type.partition(",")
    if comma and not values:
        expected = "a type, or two with a comma"
        raise RequestError(
            "not a type", place="--cache-type", expected=expected, found=cache_type[:40]
        )
    options["cache_types"] = (keys, values or keys)
    show(moepack.place(source_or_pack, machine_path, **options), plan_text.placement)
