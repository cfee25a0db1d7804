"""Arguments of the library as they are typed: what its messages name becomes an option here."""

import re
from collections.abc import Iterable

import click

_NAMED = re.compile(r"(?<![^\s(])`([a-z][a-z0-9_]*)(?:=([^`]+))?`(?![\w/])", re.ASCII)
_QUOTED = r"""(?<!\w)'[^']*'(?:"'"'[^']*')*"""
"""A word as it is quoted for a shell: a name of the user's, and no text of ours."""
_OTHER_NAMES = {"target": "output", "cache_types": "cache_type"}


def as_typed(text: str, command: click.Command, names: Iterable[object] = ()) -> str:
    """Write the arguments that a text names in backquotes as the options of `command`.

    `resume=True` becomes `--resume`, `mtp=False` `--no-mtp`, `context=8192` `--context 8192`. What
    is no argument of the command stays as it is, and so do `names`, such as paths, and what is
    quoted for a shell.
    """
    others = [re.escape(name) for name in names if isinstance(name, str) and "`" in name]
    pieces = re.split(f"({'|'.join([*others, _QUOTED])})", text)
    pieces[::2] = (_NAMED.sub(lambda match: _typed(match, command), one) for one in pieces[::2])
    return "".join(pieces)


def option_name(argument: str, command: click.Command) -> str:
    """Return what an argument of the library is called where `command` is typed."""
    parameter = _parameter(argument, command)
    return argument if parameter is None else _name(parameter)


def _typed(match: re.Match[str], command: click.Command) -> str:
    argument, value = match.groups()
    is_off = value == "False"
    parameter = _parameter(f"no_{argument}" if is_off else argument, command)
    if parameter is None:
        return match[0]
    is_flag = isinstance(parameter, click.Option) and parameter.is_flag
    return _name(parameter) if is_flag or value is None else f"{_name(parameter)} {value}"


def _parameter(argument: str, command: click.Command) -> click.Parameter | None:
    """Find a parameter: by its name here, by its option, and by what else it is called."""
    names = (argument, f"{argument}_path", f"{argument}_paths", _OTHER_NAMES.get(argument))
    option = f"--{argument.replace('_', '-')}"
    by_name = {parameter.name: parameter for parameter in command.params}
    by_option = {name: one for one in command.params for name in one.opts}
    return (
        by_name.get(argument)
        or by_option.get(option)
        or next((by_name[name] for name in names if name in by_name), None)
    )


def _name(parameter: click.Parameter) -> str:
    if isinstance(parameter, click.Argument):
        return (parameter.metavar or str(parameter.name).upper()).rstrip(".")
    return max(parameter.opts, key=len)
