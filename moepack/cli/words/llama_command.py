"""Commands that run llama.cpp: they take its options, and words for a program behind `--`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import click

from moepack.cli.words.front import check_repeated, command_line
from moepack.cli.words.llama_spellings import MODEL_OPTIONS, Spelling, Translation
from moepack.common.errors import RequestError
from moepack.common.escaping import shell_word

_PROGRAMS = {
    *("llama-cli", "llama-server", "llama-bench", "llama-completion", "llama-perplexity"),
    *("llama-imatrix", "llama-run", "llama-simple", "llama-mtmd-cli", "llama-speculative"),
}


class LlamaCommand(click.Command):
    """A command that takes options of llama.cpp, and may end with `--` and words for a program.

    These words are its argument `rest`, None without `--`; `rest_metavar` stands for them in the
    usage line. Options for llama.cpp's server are its argument `passed_on`.
    """

    def __init__(
        self, *arguments: Any, spellings: Mapping[str, Spelling], rest_metavar: str, **options: Any
    ) -> None:
        super().__init__(*arguments, **options)
        self._spellings, self._rest_metavar = spellings, rest_metavar

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        """Parse the words before `--`. Raises RequestError for options that are answered."""
        end = args.index("--") if "--" in args else len(args)
        rest = tuple(args[end + 1 :]) if "--" in args else None
        if context.resilient_parsing:
            return super().parse_args(context, args[:end])
        if rest is None:
            _refuse_program(args)
        translation = Translation(self, args[:end], self._spellings)
        check_repeated(self, translation.words)
        try:
            left = super().parse_args(context, translation.words)
        except click.MissingParameter:
            if translation.answers:
                raise translation.answers[0]("MODEL") from None
            raise
        model, *others = context.params["source_or_pack"]
        if translation.answers:
            raise translation.answers[0](shell_word(model))
        if translation.model is not None and any(not is_prompt(other) for other in others):
            problem = f"the model is named twice: {others[0]}, and -m {translation.model}"
            raise RequestError(problem, hint="name it once")
        context.params.update(rest=rest, passed_on=translation.passed_on)
        return left

    def collect_usage_pieces(self, context: click.Context) -> list[str]:
        """Return the pieces of the usage line."""
        return [*super().collect_usage_pieces(context), f"[-- {self._rest_metavar}]"]


def _refuse_program(words: Sequence[str]) -> None:
    """Raise RequestError for a program of llama.cpp without `--` before it."""
    names = [os.path.basename(word) for word in words]
    index = next((n for n, name in enumerate(names) if name in _PROGRAMS), None)
    if index is None:
        return
    before, program = list(words[:index]), list(words[index:])
    option = next((n for n, word in enumerate(program[:-1]) if word in MODEL_OPTIONS), None)
    if not before and option is not None:
        before = [program[option + 1]]
        program[option + 1] = "{}"
    line = command_line("run", [*(before or ["MODEL.gguf"]), "--", *program])
    raise RequestError(f"a program comes after --: {words[index]}", hint=line)


def is_prompt(text: str) -> bool:
    """Return whether a text has a space and is no path: neither it nor its folder exists."""
    folder = os.path.dirname(os.path.expanduser(text))
    is_path = os.path.lexists(text) or (folder not in ("", "/") and os.path.isdir(folder))
    return " " in text.strip() and not is_path
