"""The command `inspect`."""

import click

import moepack
from moepack.cli.shared.options import json_option, source_or_pack_argument
from moepack.cli.shared.terminal import next_line, show


@click.command()
@source_or_pack_argument
@json_option
def inspect(source_or_pack: tuple[str, ...]) -> None:
    """Describe a model or a pack: its layers, experts, tensors and lengths.

    Example: moepack inspect model-00001-of-00004.gguf
    """
    from moepack.inspection.facts import PackFacts
    from moepack.report import text

    facts = moepack.inspect(source_or_pack)
    can_run = facts.is_whole if isinstance(facts, PackFacts) else bool(facts.families)
    show(facts, text.inspected, next_line("run", *source_or_pack) if can_run else None)
