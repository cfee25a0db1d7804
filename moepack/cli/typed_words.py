"""The words of a command line as they were typed: options, their values, and arguments."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import click

from moepack.escaping import shell_word

Kind = Literal["option", "value", "argument"]

HELP_OPTIONS = ("-h", "--help")
"""What shows the help of every command."""

MODEL_OPTIONS = ("-m", "--model")
"""How llama.cpp's programs are given their model, which is an argument here."""

_DASHES = "-\u2010\u2011\u2012\u2013\u2014\u2212"
"""What may stand for a hyphen in text that was copied from a page."""


UNITS = frozenset(("b", "kb", "mb", "gb", "tb", "kib", "mib", "gib", "tib", "k", "m", "g", "t"))
"""Units of sizes, in lower case; a size is one word."""


class Word(NamedTuple):
    """A word; `option` is the parameter that it is, or the value of, None where none is known."""

    text: str
    kind: Kind
    option: click.Option | None = None

    @property
    def name(self) -> str:
        """The word up to its `=`."""
        return self.text.partition("=")[0]


class Typed(NamedTuple):
    """A command as it was typed: what is typed for it, and the words behind."""

    path: str
    command: click.Command
    words: list[str]

    @property
    def help(self) -> str:
        """The command line that shows its help."""
        return command_line(self.path, ["--help"])


def typed(root: click.Group, arguments: Sequence[str]) -> Typed:
    """Return the command that the arguments of the program name, as far as they name one."""
    command: click.Command = root
    path: list[str] = []
    words = list(arguments)
    while isinstance(command, click.Group) and words and words[0] in command.commands:
        path.append(words.pop(0))
        command = command.commands[path[-1]]
    return Typed(" ".join(path), command, words)


def options_of(command: click.Command) -> dict[str, click.Option]:
    """Return the options of a command by all of their names; hidden ones too."""
    context = click.Context(command, **command.context_settings)
    options = (one for one in command.get_params(context) if isinstance(one, click.Option))
    return {name: one for one in options for name in (*one.opts, *one.secondary_opts)}


def read_words(command: click.Command, words: Sequence[str]) -> list[Word]:
    """Tell options, values and arguments apart, up to `--`, as the command will read them."""
    return list(_read(options_of(command), words))


def _read(options: Mapping[str, click.Option], words: Sequence[str]) -> Iterator[Word]:
    waiting: click.Option | None = None
    for text in words:
        if waiting is not None:
            yield Word(text, "value", waiting)
            waiting = None
        elif text == "--":
            return
        elif is_option(text):
            option = _find(options, text)
            yield Word(text, "option", option)
            if option is not None and _waits(option, text, options):
                waiting = option
        else:
            yield Word(text, "argument")


def is_option(text: str) -> bool:
    """Return whether a word is written as an option, with whatever dash; numbers are none."""
    body = text.lstrip(_DASHES)
    return text[:1] in _DASHES and body[:1].isalpha() if text else False


def plain_dashes(text: str) -> str:
    """Return an option with hyphens for the dashes of a page: two before a name of letters."""
    body = text.lstrip(_DASHES)
    count = len(text) - len(body)
    if text[:count] == "-" * count:
        return text
    return ("-" if len(body.partition("=")[0]) == 1 else "--") + body


def _find(options: Mapping[str, click.Option], text: str) -> click.Option | None:
    name = text.partition("=")[0]
    if name in options:
        return options[name]
    return None if text.startswith("--") else _short(options, text)


def _short(options: Mapping[str, click.Option], text: str) -> click.Option | None:
    """Return the last of short options in one word (`-qv`), the one that may take a value.

    None where it reads as none, or its letters are the name of a longer option.
    """
    if f"-{text}".partition("=")[0] in options:
        return None
    for place in range(1, len(text)):
        option = options.get(f"-{text[place]}")
        if option is None or _takes_value(option):
            return option
    return option


def _waits(option: click.Option, text: str, options: Mapping[str, click.Option]) -> bool:
    """Return whether the value of an option is the next word."""
    if not _takes_value(option) or "=" in text:
        return False
    return text in options or (not text.startswith("--") and f"-{text[-1]}" in option.opts)


def _takes_value(option: click.Option) -> bool:
    return not (option.is_flag or option.count)


def is_doubtful(command: click.Command, words: Sequence[str]) -> bool:
    """Return whether words may be mistyped: options that are not the command's, a split size."""
    options = options_of(command)
    return any(
        is_unknown(word, options) or (word.kind == "argument" and word.text.lower() in UNITS)
        for word in read_words(command, words)
    )


def is_unknown(word: Word, options: Mapping[str, click.Option]) -> bool:
    """Return whether an option is not written as one of a command's; it may be several short."""
    return word.kind == "option" and word.name not in options


def arguments_in(words: Sequence[Word]) -> list[str]:
    """Return the words that are neither options nor their values."""
    return [word.text for word in words if word.kind == "argument"]


def without_model_option(words: Sequence[str]) -> list[str]:
    """Return words with `-m MODEL` as llama.cpp's programs have it turned into an argument."""
    end = words.index("--") if "--" in words else len(words)
    for place, word in enumerate(words[: max(0, end - 1)]):
        if word in MODEL_OPTIONS:
            return [words[place + 1], *words[:place], *words[place + 2 :]]
    return list(words)


def replaced(words: Sequence[str], old: str, *new: str) -> list[str]:
    """Return the words with one of them replaced where it stands first."""
    return replaced_at(words, list(words).index(old), *new)


def replaced_at(words: Sequence[str], place: int, *new: str) -> list[str]:
    """Return the words with the one at a place replaced."""
    return [*words[:place], *new, *words[place + 1 :]]


def command_line(path: str, words: Sequence[str]) -> str:
    """Return what to type for a command, to be pasted into a shell."""
    return " ".join(
        word if word == "{}" else shell_word(word) for word in ["moepack", *path.split(), *words]
    )


def commands_below(group: click.Group, path: str = "") -> Iterator[tuple[str, click.Command]]:
    """Yield all commands, those within groups too, with what is typed for them."""
    for name, command in group.commands.items():
        below: Any = command
        if isinstance(command, click.Group):
            yield from commands_below(below, f"{path}{name} ")
        else:
            yield f"{path}{name}", command
