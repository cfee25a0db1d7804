"""Answers to wrong names of commands and options: what to type instead."""

import os
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches

import click

from moepack.cli.foreign_names import ANSWERS, COMMANDS, LLAMA_OPTIONS, OPTIONS
from moepack.cli.program import CommandWithRest, is_pager_option
from moepack.cli.rewriting import meant_lines, model_here, pack_here
from moepack.cli.typed_words import (
    UNITS,
    Word,
    command_line,
    commands_below,
    is_option,
    is_unknown,
    options_of,
    plain_dashes,
    read_words,
    replaced,
    without_model_option,
)
from moepack.cli.usage import Mistyped
from moepack.escaping import shell_word
from moepack.path_hints import download_hint

_LEAST_LIKENESS = 0.75
_NUMBERS = (type(click.INT), type(click.FLOAT))


def unknown_command(group: click.Group, context: click.Context, words: Sequence[str]) -> Mistyped:
    """Return the answer to a word that is no command of a group; `words` begin with it."""
    name, *rest = words
    root = context.find_root().command
    assert isinstance(root, click.Group)
    path = " ".join(context.command_path.split()[1:])
    commands = dict(commands_below(root))
    problem = f"no such command: {name}"
    if path:
        problem = f"no such command of moepack {path}: {name}"
    hints = list(_command_hints(path, name.lower(), name, rest, commands))
    below = [f"moepack {one}" for one in commands if one.startswith(f"{path} ")]
    if not hints and path:
        hints = [f"it has {', '.join(below)}"]
    return Mistyped(problem, *(hints or ["moepack --help lists the commands"]), context=context)


def _command_hints(
    path: str, name: str, typed: str, rest: Sequence[str], commands: Mapping[str, click.Command]
) -> Iterator[str]:
    """Yield what was meant by a name, as people of other programs use it, or by its spelling."""
    below = [one for one in commands if one.startswith(f"{path} ")] if path else []
    ends = {one.rpartition(" ")[2]: one for one in reversed(list(commands))}
    if name in ANSWERS:
        yield from _answer(name, rest)
    elif name in ends or name in COMMANDS:
        meant = ends.get(name) or COMMANDS[name]
        yield from meant_lines(meant, commands[meant], without_model_option(rest))
    elif near := get_close_matches(name, [*ends, *COMMANDS], 1, _LEAST_LIKENESS):
        meant = ends.get(near[0]) or COMMANDS[near[0]]
        yield from meant_lines(meant, commands[meant], rest)
    elif len(below) == 1:
        is_path = os.path.exists(typed) or "." in typed or "/" in typed
        yield from meant_lines(below[0], commands[below[0]], [*[typed] * is_path, *rest])
    elif not path and (typed.endswith((".gguf", ".moepack")) or "/" in typed):
        yield command_line("run", [typed, *rest])


def _answer(name: str, rest: Sequence[str]) -> Iterator[str]:
    """Yield what is done instead of a command that there is none for, with the names typed."""
    explanation, line = ANSWERS[name]
    typed = next((word for word in without_model_option(rest) if not is_option(word)), None)
    download = download_hint(typed) if typed and line.startswith("hf ") else None
    if download is not None:
        yield download
        return
    yield explanation
    model = typed or model_here()
    if model is not None:
        line = line.replace("MODEL.gguf", shell_word(model))
    pack = pack_here() if typed is None or os.path.isfile(typed) else typed
    if pack is not None:
        line = line.replace("MODEL.moepack", shell_word(pack))
    yield line


def check_words(context: click.Context, command: click.Command, words: Sequence[str]) -> None:
    """Raise Mistyped for the first word of a command that cannot be meant.

    It is an option that the command has not, or a size in two words.
    """
    path = " ".join([*context.command_path.split()[1:], command.name or ""])
    options = options_of(command)
    before: Word | None = None
    for place, word in enumerate(read_words(command, words)):
        if word.kind == "argument" and word.text.lower() in UNITS and before is not None:
            _check_unit(path, context, words, before, place)
        if is_unknown(word, options) and _is_mistyped(command, word):
            raise _unknown_option(path, context, command, words, word)
        before = word


def _check_unit(
    path: str, context: click.Context, words: Sequence[str], number: Word, place: int
) -> None:
    if number.kind == "value" and number.text.replace(".", "").isdecimal():
        size = number.text + words[place]
        meant = [*words[: place - 1], size, *words[place + 1 :]]
        problem = f"a size is one word: {size}"
        raise Mistyped(problem, command_line(path, meant), context=context)


def _is_mistyped(command: click.Command, word: Word) -> bool:
    """Return whether an option is none of the command's, nor short ones in one word."""
    if word.option is None or word.text[0] != "-":
        return not os.path.lexists(word.text)
    if isinstance(command, CommandWithRest) and word.name in LLAMA_OPTIONS:
        return True
    names = {name[1:] for name in word.option.opts}
    place = next((n for n, letter in enumerate(word.text) if n and letter in names), 1)
    is_number = isinstance(word.option.type, _NUMBERS)
    return is_number and word.text[place + 1 : place + 2].isalpha()


def _unknown_option(
    path: str,
    context: click.Context,
    command: click.Command,
    words: Sequence[str],
    word: Word,
) -> Mistyped:
    root = context.find_root().command
    assert isinstance(root, click.Group)
    problem = f"no such option of moepack {path}: {word.name}"
    hints = _option_hints(path, command, words, word, root)
    return Mistyped(problem, *(hints or [f"moepack {path} --help"]), context=context)


def _option_hints(
    path: str, command: click.Command, words: Sequence[str], word: Word, root: click.Group
) -> list[str]:
    """Return what to type instead of an option."""
    options = options_of(command)
    name, equals, value = plain_dashes(word.text).partition("=")
    long_name = name if name.startswith("--") else f"-{name}"
    meant = next((one for one in (name, long_name, *_renamed(long_name)) if one in options), None)
    if meant is None and name in ("-m", "--model") and _takes_model(command):
        typed = [f"--model={value}", value] if equals else [word.text]
        return _checked_line(path, command, [*typed[1:], *replaced(words, word.text)], root)
    if meant is None and isinstance(command, CommandWithRest):
        of_llama = next((one for one in (name, name[1:], long_name) if one in LLAMA_OPTIONS), None)
        if of_llama is not None:
            return _for_llama(path, command, replaced(words, word.text, of_llama + equals + value))
    if meant is None:
        visible = [one for one, option in options.items() if not option.hidden]
        meant = next(iter(get_close_matches(long_name, visible, 1, _LEAST_LIKENESS)), None)
    if meant is not None:
        typed = replaced(words, word.text, f"{meant}{equals}{value}")
        return _checked_line(path, command, typed, root)
    others = [one for one, other in commands_below(root) if long_name in options_of(other)]
    return [f"{long_name} is an option of {', '.join(others)}"] if others else []


def _checked_line(
    path: str, command: click.Command, words: Sequence[str], root: click.Group
) -> list[str]:
    """Return the line with `words`, or what is to be typed for the next option that is wrong."""
    options = options_of(command)
    for word in read_words(command, words):
        if is_unknown(word, options) and _is_mistyped(command, word):
            return _option_hints(path, command, words, word, root)
    return [command_line(path, words)]


def _renamed(name: str) -> tuple[str, ...]:
    return OPTIONS.get(name.lower(), ())


def _takes_model(command: click.Command) -> bool:
    return any((one.metavar or "").lstrip("[").startswith("SOURCE") for one in command.params)


def _for_llama(path: str, command: click.Command, words: Sequence[str]) -> list[str]:
    """Return where options of llama.cpp's programs go: behind `--`, those of the pager before."""
    ours, theirs = _divided(command, words)
    if path == "serve":
        hint = "options of llama-server come behind --, and go to it as they are:"
        return [hint, command_line(path, [*ours, "--", *theirs])]
    program = "llama-cli" if {"-p", "--prompt", "-f", "--file"} & set(theirs) else "llama-server"
    hint = "it is an option of llama.cpp's programs, which come behind --:"
    return [hint, command_line(path, [*ours, "--", program, "-m", "{}", *theirs])]


def _divided(command: click.Command, words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Divide words into those of the command and those for a program behind `--`."""
    ours: list[str] = []
    theirs: list[str] = []
    typed = read_words(command, words)
    waits = False
    for word in typed:
        is_value = waits and not (os.path.exists(word.text) or word.text.endswith(".gguf"))
        is_ours = word.kind == "argument" and not is_value
        is_foreign = word.kind == "option" and word.name in LLAMA_OPTIONS
        if word.option is not None and not is_foreign:
            is_ours |= is_pager_option(command, word.option)
        (ours if is_ours else theirs).append(word.text)
        waits = is_foreign and "=" not in word.text
    return ours, [*theirs, *words[len(typed) + 1 :]]
