"""Arguments of the library as options: the library's messages name them in backquotes."""

import re
from collections.abc import Iterable

import click

_NAMED = re.compile(r"(?<![^\s(])`([a-z][a-z0-9_]*)(?:=([^`]+))?`(?![\w/])", re.ASCII)
_QUOTED = r"""(?<!\w)'[^']*'(?:"'"'[^']*')*"""
"""A word as it is quoted for a shell: a name of the user's, and no text of ours."""
_QUOTED_WORD = re.compile(f"({_QUOTED})")  # here, since a report on a lack of memory needs it too
_OTHER_NAMES = {"target": "output", "cache_types": "cache_type", "pack_in_place": "in_place"}


def as_typed(text: str, command: click.Command, names: Iterable[object] = ()) -> str:
    """Return a text with the arguments that it names in backquotes as options of `command`.

    `resume=True` becomes `--resume`, `mtp=False` `--no-mtp`, `context=8192` `--context 8192`. Names
    that are no arguments of the command stay, and so do `names`, such as paths, and words quoted
    for a shell.
    """
    others = [re.escape(name) for name in names if isinstance(name, str) and "`" in name]
    names_of_users = re.compile(f"({'|'.join([*others, _QUOTED])})") if others else _QUOTED_WORD
    pieces = names_of_users.split(text)
    pieces[::2] = (_NAMED.sub(lambda match: _typed(match, command), one) for one in pieces[::2])
    return "".join(pieces)


def option_name(argument: str, command: click.Command) -> str:
    """Return the name under which an argument of the library is typed for `command`."""
    parameter = _parameter(argument, command)
    return argument if parameter is None else typed_name(parameter)


def typed_name(parameter: click.Parameter) -> str:
    """Return the first long name of an option, or the placeholder of an argument."""
    if isinstance(parameter, click.Argument):
        return (parameter.metavar or str(parameter.name).upper()).rstrip(".")
    return next((name for name in parameter.opts if name[:2] == "--"), parameter.opts[0])


def _typed(match: re.Match[str], command: click.Command) -> str:
    argument, value = match.groups()
    parameter = _parameter(f"no_{argument}" if value == "False" else argument, command)
    if parameter is None:
        return match[0]
    name = typed_name(parameter)
    is_flag = isinstance(parameter, click.Option) and parameter.is_flag
    return name if is_flag or value is None else f"{name} {value}"


def _parameter(argument: str, command: click.Command) -> click.Parameter | None:
    """Return the parameter of an argument, by its name, its option, or another name for it."""
    by_name = {parameter.name: parameter for parameter in command.params}
    by_option = {name: one for one in command.params for name in one.opts}
    option = f"--{argument.replace('_', '-')}"
    names = (argument, f"{argument}_path", f"{argument}_paths", _OTHER_NAMES.get(argument))
    others = (by_name[name] for name in names if name in by_name)
    return by_name.get(argument) or by_option.get(option) or next(others, None)
