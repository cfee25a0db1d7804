"""Commands that understand options of llama.cpp beside their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import click

from moepack.cli.llama_spellings import Spelling, translate
from moepack.cli.program import CommandWithRest
from moepack.errors import RequestError

_PASSED_ON = "moepack.passed_on"


class LlamaCommand(CommandWithRest):
    """A command line in which `spellings` mean what they do; `passed_on` is for the server."""

    def __init__(self, *arguments: Any, spellings: Mapping[str, Spelling], **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._spellings = spellings

    def expand_words(self, context: click.Context, words: list[str]) -> list[str]:
        """Return the words with llama.cpp's options translated."""
        words = super().expand_words(context, words)
        end = words.index("--") if "--" in words else len(words)
        before, context.meta[_PASSED_ON] = translate(self, words[:end], self._spellings)
        return [*before, *words[end:]]

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        """Parse what stands before `--`; what was not expanded has options of ours alone."""
        left = super().parse_args(context, args)
        context.params["passed_on"] = context.meta.pop(_PASSED_ON, [])
        return left


def check_passed_on(words: Sequence[str]) -> None:
    """Raise RequestError for options of llama.cpp that stand before a program of one's own."""
    if words:
        problem = f"{words[0]} does not go with a program of one's own"
        raise RequestError(problem, hint="give it to the program, behind its name")
