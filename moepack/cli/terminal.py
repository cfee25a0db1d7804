"""What all commands share: options, output, and progress on a terminal."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol, TypeVar

import click

from moepack.errors import MachineError, RequestError
from moepack.sizes import parse_size

Facts = TypeVar("Facts")

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")

threads_option = click.option(
    "--threads",
    type=click.IntRange(1, 256),
    default=4,
    show_default=True,
    help="How many threads read and write.",
)

source_option = click.option(
    "--source",
    "source_paths",
    multiple=True,
    metavar="SOURCE",
    help="The model that the pack was made from, to compare with; may be repeated.",
)


def show(facts: Facts, as_json: bool, render: Callable[[Facts], str]) -> None:
    """Print facts: as one JSON object, or as `render` writes them for people."""
    from moepack.report.json_text import json_text

    click.echo(json_text(facts) if as_json else render(facts))


def write_file(path: str, data: bytes | memoryview) -> None:
    """Write a whole file. Raises MachineError where that cannot be."""
    try:
        Path(path).write_bytes(data)
    except OSError as error:
        raise MachineError(f"cannot write: {error.strerror}", path=path) from None


class Progress(Protocol):
    """A callback for what takes long."""

    def __call__(self, count: int, total: int | None = None) -> None:
        """Take `count` more as done, of `total` where that is known only now."""


@contextlib.contextmanager
def progress(total: int | None, what: str, unit: str = "B") -> Iterator[Progress | None]:
    """Show progress towards `total` on a terminal, and nowhere else.

    Without a `total` it is known when the first progress says it.
    """
    if not sys.stderr.isatty():
        yield None
        return
    from tqdm import tqdm

    with tqdm(total=total, desc=what, unit=unit, unit_scale=unit == "B", leave=False) as bar:

        def advance(count: int, total: int | None = None) -> None:
            bar.total = bar.total if total is None else total
            bar.update(count)

        yield advance


def length_of(text: str | None, option: str) -> int | None:
    """Read the length that an option was given; raise RequestError."""
    if text is None:
        return None
    try:
        return parse_size(text)
    except ValueError as error:
        raise RequestError(f"not a length: {error}", place=option) from None
