"""Errors in what was typed: what is wrong, and what to type instead."""

import os
import re
from collections.abc import Iterator, Sequence

import click

from moepack.cli.typed_words import (
    Typed,
    command_line,
    commands_below,
    is_option,
    options_of,
    read_words,
    replaced,
    replaced_at,
)
from moepack.errors import MoepackError
from moepack.format.names import IN_PLACE_NAME, JOURNAL_NAME
from moepack.path_hints import download_folder

_QUOTED = re.compile(r"'(?P<value>.*)' is not a valid ")
_EXTRA = re.compile(r"Got unexpected extra arguments? \((.*)\)\Z")
_SUFFIXES = {"k": 1 << 10, "m": 1 << 20}
_SAMPLES = {"context": 4096, "tokens": 256}
"""Numbers that are usual, where the default is none."""


class Mistyped(click.UsageError):
    """A command line that cannot be meant; `hints` say what to type instead."""

    def __init__(self, problem: str, *hints: str, context: click.Context | None = None) -> None:
        super().__init__(problem, context)
        self.hints = hints


def explain(error: click.UsageError, line: Typed) -> tuple[str, list[str]]:
    """Return the problem, and hints what to type instead, the last of them to be pasted."""
    problem = " ".join(error.format_message().split()).removesuffix(".")
    problem = _EXTRA.sub(r"too many arguments: \1", problem)
    if isinstance(error, Mistyped):
        return problem, [hint for hint in error.hints if hint]
    if isinstance(line.command, click.Group):
        return problem, list(_behind_command(line.command, line.words)) or [line.help]
    if isinstance(error, click.MissingParameter) and error.param is not None:
        parameter = error.param
        name = max(parameter.opts, key=len)
        if isinstance(parameter, click.Argument):
            name = (parameter.metavar or name).rstrip(".")
        return f"{name} is missing", _meant(line) or [line.help]
    if isinstance(error, click.BadOptionUsage):
        return _without_value(error, problem, line)
    if isinstance(error, click.BadParameter) and error.param is not None:
        return _bad_value(error, error.param, line)
    return problem, _meant(line) or [line.help]


def hints_for(error: MoepackError, line: Typed) -> list[str]:
    """Return what to type instead where an error comes of words that are not right.

    An output that is there already gets another name, a word that is none of those expected the
    one most like it, a machine that is not known a command that measures it.
    """
    if isinstance(line.command, click.Group):
        return []
    given = {
        max(word.option.opts, key=len): word.text
        for word in read_words(line.command, line.words)
        if word.option is not None and word.kind == "value"
    }
    output = given.get("--output", "")
    if output and error.path == output and _is_whole(output):
        backwards = replaced(line.words[::-1], output, _free(output))
        return [command_line(line.path, backwards[::-1])]
    if error.path in line.words and not os.path.exists(error.path):
        folder = download_folder(error.path)
        if folder is not None:
            return [command_line(line.path, replaced(line.words, error.path, folder))]
    machine = given.get("--machine", "")
    if error.path and error.path == machine and not error.hint:
        return [command_line("machine", ["-o", _free(machine)])]
    if (meant := _expected_word(error, line.words)) is not None:
        return [command_line(line.path, meant)]
    return _meant(line) if error.place in (None, "byte 0") else []


def _is_whole(output: str) -> bool:
    """Return whether an output exists, and is no pack that is to be continued."""
    if not os.path.isdir(output):
        return os.path.isfile(output)
    return not {JOURNAL_NAME, IN_PLACE_NAME}.intersection(os.listdir(output))


def _free(path: str) -> str:
    """Return a path of nothing that exists, and that is like this one."""
    from moepack.cli.rewriting import free_name

    return free_name(*os.path.splitext(path.rstrip("/")))


def _expected_word(error: MoepackError, words: Sequence[str]) -> list[str] | None:
    """Return the words with the one found replaced by the most like one of those expected."""
    from difflib import get_close_matches

    if not (isinstance(error.expected, str) and isinstance(error.found, str)):
        return None
    found = error.found.strip("'")
    expected = re.split(r", | or ", error.expected)
    near = get_close_matches(found.lower(), expected, 1, 0.6)
    place = next((n for n, word in enumerate(words) if found and found in word), None)
    if not near or place is None:
        return None
    return [*words[:place], words[place].replace(found, near[0]), *words[place + 1 :]]


def _meant(line: Typed) -> list[str]:
    """Return the command line that was probably meant; nothing where none is known."""
    from moepack.cli.rewriting import gguf_already, meant_lines, rewrite

    what = (line.path, line.command, line.words)
    is_meant = gguf_already(*what) is not None or rewrite(*what) is not None
    return meant_lines(*what) if is_meant else []


def _behind_command(group: click.Group, words: Sequence[str]) -> Iterator[str]:
    """Yield the line with options behind the command that they were typed before."""
    from difflib import get_close_matches

    if words and words[0].lower().strip("-") in ("v", "version"):
        yield "moepack --version"
        return
    near = get_close_matches(words[0], ("--version", "--help"), 1) if words else []
    if near:
        yield command_line("", near)
        return
    names = dict(commands_below(group))
    place = next((number for number, word in enumerate(words) if word in names), None)
    if place:
        yield "options of a command come behind its name:"
        yield command_line(words[place], [*words[place + 1 :], *words[:place]])


def _without_value(error: click.BadOptionUsage, problem: str, line: Typed) -> tuple[str, list[str]]:
    """Return that an option has no value, and the line with the name of one."""
    option = options_of(line.command).get(error.option_name)
    if option is None or error.option_name not in line.words or option.is_flag:
        return problem, [line.help]
    value = _sample(option)
    backwards = replaced(line.words[::-1], error.option_name, value, error.option_name)
    return f"{error.option_name} takes a value", [command_line(line.path, backwards[::-1])]


def _sample(option: click.Option) -> str:
    """Return a value that an option may have, a number where it is one, else what it is called."""
    kind = option.type
    if isinstance(kind, click.Choice):
        return str(kind.choices[0])
    if not isinstance(kind, (type(click.INT), type(click.FLOAT))):
        return option.metavar or kind.name.upper()
    usual = option.default if isinstance(option.default, int | float) else 4
    number = _SAMPLES.get(option.name or "", usual)
    least, most = getattr(kind, "min", None), getattr(kind, "max", None)
    number = number if least is None else max(number, least)
    return f"{number if most is None else min(number, most):g}"


def _bad_value(
    error: click.BadParameter, parameter: click.Parameter, line: Typed
) -> tuple[str, list[str]]:
    """Return what is wrong with a value, and the line with one that may be meant."""
    option = max(parameter.opts, key=len)
    quoted = _QUOTED.match(error.message)
    if quoted is not None:
        line = line._replace(words=_renamed(option, line, quoted["value"]))
    place, value = _typed_value(parameter, line)
    message, kind = error.message, parameter.type
    if quoted is not None:
        is_whole = isinstance(kind, type(click.INT))
        message = f"not a {'whole ' if is_whole else ''}number: {quoted['value']}"
    message = re.sub(r"the range (.+)<=x<=(.+?)\.?\Z", r"the range \1 to \2", message)
    message = re.sub(r"is not in the range x>=(.+?)\.?\Z", r"is less than \1", message)
    meant = None if value is None else _nearest(kind, value)
    if value is None or meant is None:
        return f"{option}: {message}", [line.help]
    before = line.words[place].removesuffix(value)
    if not before.startswith("--"):
        before = before.removesuffix("=")  # it would be part of the value of a short option
    words = replaced_at(line.words, place, before + meant)
    return f"{option}: {message}", [command_line(line.path, words)]


def _renamed(option: str, line: Typed, value: str) -> list[str]:
    """Return the words with `option` in place of another program's name for it, by its value."""
    options = options_of(line.command)
    for place, word in enumerate(line.words):
        name, sign, behind = word.partition("=")
        values = [behind] if sign else line.words[place + 1 : place + 2]
        if is_option(word) and name not in options and values == [value]:
            return replaced_at(line.words, place, option + sign + behind)
    return line.words


def _typed_value(parameter: click.Parameter, line: Typed) -> tuple[int, str | None]:
    """Return where the last value of a parameter stands, and the value; None where none does."""
    for place, word in reversed(list(enumerate(read_words(line.command, line.words)))):
        if word.option is parameter and word.kind == "value":
            return place, word.text
        if word.option is parameter and "=" in word.text:
            return place, word.text.partition("=")[2]
    return 0, None


def _nearest(kind: click.ParamType, value: str) -> str | None:  # type: ignore[type-arg]
    """Return the value of a type that is most like what was typed; None where none is."""
    if isinstance(kind, click.Choice):
        from difflib import get_close_matches

        near = get_close_matches(value.lower(), list(map(str, kind.choices)), 1, 0.5)
        return near[0] if near else None
    number = _number(value)
    if number is None:
        return None
    if isinstance(kind, click.IntRange | click.FloatRange):
        number = max(number, number if kind.min is None else kind.min)
        number = min(number, number if kind.max is None else kind.max)
    if isinstance(kind, type(click.INT)):
        return str(int(number)) if number == int(number) else None
    return f"{number:g}" if isinstance(kind, type(click.FLOAT)) else None


def _number(text: str) -> float | None:
    """Return a number as people write it: `1,000`, `8k`, `80%`, `0,8`."""
    plain = text.strip().lower().replace("_", "").replace("'", "")
    is_grouped = re.fullmatch(r"-?\d{1,3}(,\d{3})+", plain)
    plain = plain.replace(",", "" if is_grouped else ".")
    match = re.fullmatch(r"(-?\d{1,12}(?:\.\d{1,12})?)([km%]?)", plain)
    if match is None:
        return None
    number = float(match[1])
    return number / 100 if match[2] == "%" else number * _SUFFIXES.get(match[2], 1)
