"""What all commands share: options, output, and progress on a terminal."""

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click

from moepack.errors import MachineError

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")

source_option = click.option(
    "--source",
    "source_paths",
    multiple=True,
    metavar="SOURCE",
    help="Compare with the model it was made from; may be given several times.",
)


def show(facts: dict[str, Any], as_json: bool, render: Callable[[dict[str, Any]], str]) -> None:
    """Print a result: as one JSON object, or as `render` writes it for people."""
    click.echo(json.dumps(facts, indent=2) if as_json else render(facts))


def write_file(path: str, data: bytes | memoryview) -> None:
    """Write a whole file. Raises MachineError where that cannot be."""
    try:
        Path(path).write_bytes(data)
    except OSError as error:
        raise MachineError(f"cannot write: {error.strerror}", path=path) from None


def write_whole(path: str, data: bytes) -> None:
    """Write a file that appears under its name when it is whole. Raises MachineError."""
    partial = f"{path}.partial"
    try:
        Path(partial).write_bytes(data)
        os.replace(partial, path)
    except OSError as error:
        Path(partial).unlink(missing_ok=True)
        raise MachineError(f"cannot write: {error.strerror}", path=path) from None


@contextlib.contextmanager
def progress(total: int | None, what: str, unit: str = "B") -> Iterator[Callable[..., None] | None]:
    """Show progress on a terminal, and nowhere else.

    What it gives is called with what was done since the last call, and with the total as well where
    that was not known before.
    """
    if not sys.stderr.isatty():
        yield None
        return
    from tqdm import tqdm

    with tqdm(total=total, desc=what, unit=unit, unit_scale=unit == "B", leave=False) as bar:

        def advanced(count: int, total: int | None = None) -> None:
            bar.total = bar.total if total is None else total
            bar.update(count)

        yield advanced
