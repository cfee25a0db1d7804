"""Types of options and arguments: files, with `-` for a stream, sizes, lists and names."""

import os
import sys
from collections.abc import Sequence
from typing import Any, Literal

import click
from click.shell_completion import CompletionItem

from moepack.cli.shared.argument_names import typed_name
from moepack.common.errors import RequestError
from moepack.common.path_hints import hub_address
from moepack.common.paths import is_remote
from moepack.common.sizes import LEAST_BARE, is_share, parse_size

STANDARD_STREAM = "-"
STANDARD_INPUT = "/dev/stdin"
_STANDARD_OUTPUT = (STANDARD_STREAM, "/dev/stdout", "/dev/fd/1", "/proc/self/fd/1")
_INPUT_IS_TAKEN = "moepack.input_is_taken"
_OUTPUT_IS_TAKEN = "moepack.output_is_taken"


def output_is_taken() -> bool:
    """Return whether a file goes to standard output, so that nothing else may be printed there."""
    return bool(click.get_current_context().meta.get(_OUTPUT_IS_TAKEN))


class PathName(click.ParamType):  # type: ignore[type-arg]  # click 8.1 has no arguments
    """The path of a source or a pack, which is read in many places: never standard input.

    For others, `problem` and `why` say why none of the names of `streams` will do.
    """

    name = "path"

    def __init__(
        self,
        problem: str = "not read from standard input",
        why: str = "only files read from start to end",
        streams: Sequence[str] = (STANDARD_STREAM,),
    ) -> None:
        self._problem, self._why, self._streams = problem, why, streams

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the path. Raises RequestError for `-`."""
        _check_named(value, param)
        if value in self._streams:
            other = "; ./- has that name" if value == STANDARD_STREAM else ""
            raise RequestError(self._problem, path=value, hint=self._why + other)
        return str(value)

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Leave paths to the shell."""
        return [CompletionItem(incomplete, type="file")]


class ModelName(PathName):
    """The path or address of a model; names that the hub's users type become its addresses."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return a path, or an address. Raises RequestError for `-`."""
        name = super().convert(value, param, ctx)
        if is_remote(name) or os.path.lexists(name):
            return name
        return hub_address(name) or name


OUTPUT_FOLDER = PathName("a folder, not standard output", "name the folder")
"""The path of a folder to write into."""
RESUMABLE_FILE = PathName(
    "cannot be written to standard output", "it is not written from start to end", _STANDARD_OUTPUT
)
"""The path of a file that is written in many places at a time."""


class InputPath(PathName):
    """The path of a file that is read from start to end; `-` is standard input."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the path. Raises RequestError for a second `-`."""
        _check_named(value, param)
        if value != STANDARD_STREAM:
            return str(value)
        if ctx is not None and ctx.meta.setdefault(_INPUT_IS_TAKEN, param) is not param:
            raise RequestError("standard input can be read only once", path=value)
        return STANDARD_INPUT


class OutputFile(PathName):
    """The path of a file to write; `-` is standard output, and all else goes to standard error."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the path, or `-`."""
        _check_named(value, param)
        if value not in _STANDARD_OUTPUT:
            return str(value)
        if ctx is not None:
            if sys.stdout.name == os.devnull:  # instead of a stream that was closed
                raise RequestError("standard output is closed", path=value)
            ctx.meta[_OUTPUT_IS_TAKEN] = True
        return STANDARD_STREAM


class Length(click.ParamType):  # type: ignore[type-arg]
    """A size, as people write it: `8GiB`; or `word`, which stays as it is.

    `50%` is a share of `share_of`: of this machine's "memory" it becomes bytes at once; of
    "experts" it stays a text, until their length is known.
    """

    name = "size"

    def __init__(
        self,
        word: str | None = None,
        *,
        share_of: Literal["memory", "experts"] | None = None,
        least: int = LEAST_BARE,
    ) -> None:
        self._word = word
        self._share_of = share_of
        self._least = least

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> int | str:
        """Return the bytes. Raises RequestError."""
        if value == self._word:
            return str(value)
        whole = None
        if self._share_of is not None and is_share(value):
            from moepack.host.memory_limits import read_memory

            whole = read_memory()
        try:
            length = parse_size(value, _name(param), whole=whole, least=self._least)
        except RequestError as error:
            if self._word and value.isalpha():
                error.hint = f"`{self._word}` is the only word"
            raise
        return str(value) if whole is not None and self._share_of == "experts" else length


class Numbers(click.ParamType):  # type: ignore[type-arg]
    """Whole numbers with commas between them: `1,4,16`."""

    name = "list"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> list[Any]:
        """Return the numbers. Raises RequestError."""
        try:
            return value if isinstance(value, list) else list(map(int, value.split(",")))
        except ValueError:
            problem, expected = "not a list of numbers", "such as 1,4,16"
            raise RequestError(
                problem, argument=_name(param), expected=expected, found=value
            ) from None


def _check_named(value: str, param: click.Parameter | None) -> None:
    """Raise RequestError for an empty name, as an unset variable of the shell leaves it."""
    if not value.strip():
        hint = "is a shell variable unset? Type a name here"
        raise RequestError("an empty name", place=_name(param), hint=hint)


def _name(param: click.Parameter | None) -> str | None:
    return None if param is None else typed_name(param)
