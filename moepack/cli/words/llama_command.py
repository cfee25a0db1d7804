"""Commands that run llama.cpp: words for a program or its server follow `--`.

The options that people type most are understood before `--` too; all others are answered with the
line to type instead.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from difflib import get_close_matches
from itertools import takewhile
from typing import Any

import click

from moepack.cli.words.front import command_line
from moepack.common.errors import RequestError
from moepack.common.escaping import shell_word
from moepack.common.path_hints import hub_address

_PROGRAMS = {
    *("llama-cli", "llama-server", "llama-bench", "llama-completion", "llama-perplexity"),
    *("llama-imatrix", "llama-run", "llama-simple", "llama-mtmd-cli", "llama-speculative"),
}
_HUB_OPTIONS = ("-hf", "-hfr", "--hf-repo")
_MODEL_OPTIONS = ("-m", "--model", *_HUB_OPTIONS)
"""llama.cpp's options for the model, which is an argument here."""
_SERVER_OPTION = "--server"
"""Ours, before a program's name or path."""
_PASSED_ON = """
    -ctk --cache-type-k -ctv --cache-type-v -n --predict --n-predict -ub --ubatch-size
    --temp --temperature --top-k --top-p --min-p -s --seed
"""
_FLASH = ("-fa", "--flash-attn")
"""Once a flag: its value may be missing."""
_VALUE_COUNTS = {"--jinja": 0, **dict.fromkeys([*_FLASH, *_PASSED_ON.split()], 1)}
"""Options that a command without them passes on to llama.cpp's server, with their values."""
_SWITCHES = {"on", "off", "auto"}
_ON_CPU = "moepack run {model} -- llama-server -m {{}} {option}"
_IN_REQUESTS = "moepack run {model} -- llama-cli -m {{}} {option}"
_ANSWERS = {
    _ON_CPU: """
        -ngl --gpu-layers --n-gpu-layers -ts --tensor-split -sm --split-mode -mg --main-gpu -dev
        --device -ncmoe --n-cpu-moe -cmoe --cpu-moe -ot --override-tensor
    """,
    _IN_REQUESTS: "-j --json-schema -jf --json-schema-file -l --logit-bias",
    "moepack {command} hf://OWNER/NAME/Q4_K_M": "-hff --hf-file -mu --model-url -dr --docker-repo",
    "moepack serve {model} {option}": "--port --host --api-key",
    "moepack run {model} --raw": "-no-cnv --no-conversation",
    "leave it out: clients send it": "-sys --system-prompt -p --prompt",
    "leave it out": """
        -cnv --conversation -i --interactive -if --interactive-first -st --single-turn -co --color
        --simple-io -mli --multiline-input --no-display-prompt --mmap --no-warmup --no-repack
    """,
    "leave it out; --memory says how much of the model may be in memory": """
        --no-mmap --mlock -dio --direct-io -lm --load-mode
    """,
}
_HINTS = {name: hint for hint, names in _ANSWERS.items() for name in names.split()}
"""Hints by the names of options that may not follow the dashes."""
_OPTION = re.compile("-[a-z]{2,}|--[A-Za-z][A-Za-z-]*")
"""The name of an option, but for those of one letter, behind which click takes a value."""
_BEFORE = {name: name for name in ("--host", "--port", "--api-key", *_MODEL_OPTIONS)}
_BEFORE |= {"-a": "--name", "--alias": "--name"}
"""Options of llama-server that `serve` has before the dashes, and their names there."""


def check_rest(models: Sequence[str], words: Sequence[str], *, is_one_text: bool = False) -> None:
    """Raise RequestError for options behind `--` that are for `serve` itself, before it.

    And for one text for those that the server heeds in requests alone.
    """
    for index, word in enumerate(words):
        name, sign, value = word.partition("=")
        if is_one_text and _HINTS.get(name) == _IN_REQUESTS:
            hint = _IN_REQUESTS.format(
                model=shell_word(models[0]), option=shlex.join(words[index:])
            )
            raise RequestError(f"{name} has no effect here", hint=hint)
        if name in _BEFORE:
            value = value if sign else "".join(words[index + 1 : index + 2])
            rest = [*words[:index], *words[index + (1 if sign else 2) :]]
            before = [*models, _BEFORE[name], value]
            if name in _MODEL_OPTIONS:
                before = [_model_of(name, value)]
            line = command_line("serve", [*before, *(["--", *rest] if rest else [])])
            raise RequestError(f"{name} goes before --, not after it", hint=line)


def _model_of(option: str, value: str) -> str:
    """Return the path or the address of a model by an option of llama.cpp."""
    return (hub_address(f"hf:{value}") or value) if option in _HUB_OPTIONS else value


class LlamaCommand(click.Command):
    """A command that may end with `--` and words for a program, or options of llama-server.

    These words are its argument `rest`, None without `--`; `rest_metavar` stands for them in the
    usage line. Options before `--` for llama.cpp's server are its argument `passed_on`.
    """

    def __init__(self, *arguments: Any, rest_metavar: str, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._rest_metavar = rest_metavar

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        """Parse the words before `--`. Raises RequestError for llama.cpp's own options there."""
        end = args.index("--") if "--" in args else len(args)
        rest = tuple(args[end + 1 :]) if "--" in args else None
        if context.resilient_parsing:
            return super().parse_args(context, args[:end])
        if rest is None:
            _refuse_program(args)
        words, passed_on = self._translated(context, args[:end])
        left = super().parse_args(context, words)
        context.params.update(rest=rest, passed_on=passed_on)
        return left

    def collect_usage_pieces(self, context: click.Context) -> list[str]:
        """Return the pieces of the usage line."""
        return [*super().collect_usage_pieces(context), f"[-- {self._rest_metavar}]"]

    def line_with_options(self, model: str, words: Sequence[str]) -> str:
        """Return the hint for options of llama-server: the place where they go."""
        assert self.name is not None
        line = command_line(self.name, [model, "--", *words])
        if words[0] in ("-np", "--parallel"):  # of several texts
            line = command_line("serve", [model, "--", *words])
        return f"an option of llama.cpp follows --: {line}"

    def _translated(
        self, context: click.Context, words: Sequence[str]
    ) -> tuple[list[str], list[str]]:
        """Return words for click, and those for the server; an option's model is an argument."""
        options = [one for one in self.get_params(context) if isinstance(one, click.Option)]
        counts = {name: 0 if one.is_flag else one.nargs for one in options for name in one.opts}
        place = sum(isinstance(one, click.Argument) for one in self.params) - 1
        ours: list[str] = []
        passed_on: list[str] = []
        arguments: list[str] = []
        left = list(words)
        while left:
            word = left.pop(0)
            name, sign, value = word.partition("=")
            if name in _MODEL_OPTIONS:
                if not sign and not left:
                    raise RequestError(f"{name} names no model", hint=f"{name} FILE")
                arguments.append(_model_of(name, value if sign else left.pop(0)))
                ours.insert(place, arguments[-1])
            elif name in counts:
                ours += [word, *_take(left, 0 if sign else counts[name])]
            elif name in _VALUE_COUNTS:
                if name in _FLASH and not sign and not _SWITCHES.issuperset(left[:1] or ["none"]):
                    left.insert(0, "on")
                passed_on += [name, *([value] if sign else _take(left, _VALUE_COUNTS[name]))]
            elif _OPTION.fullmatch(name) or name in _HINTS:
                has_server = _SERVER_OPTION in ours
                raise self._unknown(name, [*counts], arguments[place:], [word, *left], has_server)
            else:
                ours.append(word)
                arguments += [] if word.startswith("-") else [word]
        return ours, passed_on

    def _unknown(
        self,
        name: str,
        names: Sequence[str],
        models: Sequence[str],
        words: Sequence[str],
        has_server: bool,
    ) -> RequestError:
        """Return the error for an option that is not ours, with the line that may be meant."""
        values = list(takewhile(lambda word: not word.startswith("-"), words[1:]))
        if not models and len(values) > 1:
            models = [values.pop()]
        model, option = [*models, "MODEL"][0], [words[0], *values]
        hint = _HINTS.get(name)
        if hint is not None and not (hint == _ON_CPU and has_server):
            problem = f"{name} is no option of moepack {self.name}"
            if hint == _ON_CPU:
                problem = f"{name}: moepack's own llama.cpp computes on the processor"
            texts = {"model": shell_word(model), "option": shlex.join(option)}
            return RequestError(problem, hint=hint.format(command=self.name, **texts))
        near = get_close_matches(name.lower(), [one for one in names if one.startswith("--")])
        problem = click.NoSuchOption(name, possibilities=near).format_message()
        return RequestError(problem.removesuffix("."), hint=self.line_with_options(model, option))


def _take(words: list[str], count: int) -> list[str]:
    """Remove the first words, and return them."""
    first = words[:count]
    del words[:count]
    return first


def _refuse_program(words: Sequence[str]) -> None:
    """Raise RequestError for a program of llama.cpp without `--` before it."""
    names = [
        "" if before == _SERVER_OPTION else os.path.basename(word)
        for before, word in zip(["", *words], words, strict=False)
    ]
    index = next((n for n, name in enumerate(names) if name in _PROGRAMS), None)
    if index is None:
        return
    before, program = list(words[:index]), list(words[index:])
    option = next((n for n, word in enumerate(program[:-1]) if word in _MODEL_OPTIONS), None)
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
