"""Commands that understand options of llama.cpp beside their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import click

from moepack.cli.llama_spellings import Spelling, translate
from moepack.cli.program import CommandWithRest
from moepack.errors import RequestError


class LlamaCommand(CommandWithRest):
    """A command line in which `spellings` mean what they do; `passed_on` is for the server."""

    def __init__(self, *arguments: Any, spellings: Mapping[str, Spelling], **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._spellings = spellings

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        """Parse what stands before `--`, once llama.cpp's options in it are translated."""
        end = args.index("--") if "--" in args else len(args)
        words, passed_on = args[:end], list[str]()
        if not context.resilient_parsing:
            words, passed_on = translate(self, words, self._spellings)
        left = super().parse_args(context, [*words, *args[end:]])
        context.params["passed_on"] = passed_on
        return left


def check_passed_on(words: Sequence[str]) -> None:
    """Raise RequestError for options of llama.cpp that stand before a program of one's own."""
    if words:
        problem = f"{words[0]} does not go with a program of one's own"
        raise RequestError(problem, hint="give it to the program, behind its name")
