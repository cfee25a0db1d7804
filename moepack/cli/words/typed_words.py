"""The words of a command line as they were typed, and lines to type instead."""

import os
from collections.abc import Iterator, Sequence

import click

from moepack.common.escaping import shell_word

HELP_OPTIONS = ("-h", "--help")
"""The options for help, the same for every command."""

MODEL_OPTIONS = ("-m", "--model")
"""llama.cpp's options for the model, which is an argument here."""


def is_prompt(text: str) -> bool:
    """Return whether a text has a space and is no path: neither it nor its folder exists."""
    folder = os.path.dirname(os.path.expanduser(text))
    is_path = os.path.lexists(text) or (folder not in ("", "/") and os.path.isdir(folder))
    return " " in text.strip() and not is_path


def command_line(path: str, words: Sequence[str]) -> str:
    """Return the line for a command, quoted for a shell."""
    return " ".join(
        word if word == "{}" else shell_word(word) for word in ["moepack", *path.split(), *words]
    )


def command_in(root: click.Group, arguments: Sequence[str]) -> tuple[str, click.Command]:
    """Return the name of the command, or the group, that the program's arguments name, and it."""
    path = "moepack"
    command: click.Command = root
    for word in arguments:
        if not isinstance(command, click.Group) or word not in command.commands:
            break
        path, command = f"{path} {word}", command.commands[word]
    return path, command


def commands_below(group: click.Group, path: str = "") -> Iterator[tuple[str, click.Command]]:
    """Yield all commands of a group and of groups within it, with their full names."""
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from commands_below(command, f"{path}{name} ")
        else:
            yield f"{path}{name}", command
