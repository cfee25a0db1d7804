"""Sizes as they are typed: units, shares of memory or experts, and mistakes."""

import click
import pytest

from moepack.cli import main
from moepack.host.memory_limits import read_memory


@pytest.mark.parametrize("command", ["run", "serve", "bench"])
def test_half_of_memory_is_half_of_what_programs_may_have(command: str) -> None:
    (length,) = (one.type for one in main.cli.commands[command].params if one.name == "memory")
    context = click.Context(main.cli.commands[command])
    assert length.convert("50%", None, context) == read_memory() // 2
    assert length.convert("8g", None, context) == length.convert("8 GiB", None, context) == 8 << 30
