"""Options for work that is shared by several machines."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from typing import Any

import click

from moepack.cli.shared.options import Option
from moepack.common import extras
from moepack.common.errors import MachineError, RequestError

_DASK = "dask://"

executor_option = click.option(
    "--executor",
    metavar="dask://HOST:PORT",
    help="Address of a Dask scheduler, whose workers do the work.",
)


def part_option(files: str) -> Option[Any]:
    """Return the option for a share of some files."""
    help_text = f"Share of the {files} to do, such as 3/16: one of 16 about equal ones."
    return click.option("--part", metavar="N/COUNT", help=help_text)


@contextmanager
def opened_executor(address: str | None) -> Iterator[Executor | None]:
    """Connect to the workers at an address for the block; None without one.

    Raises RequestError for another address, MachineError if nothing answers there.
    """
    if address is None:
        yield None
        return
    if not address.startswith(_DASK):
        raise RequestError(
            "not the address of a scheduler",
            argument="executor",
            expected="dask://HOST:PORT",
            found=address,
        )
    extras.require("cluster")
    from distributed import Client

    try:
        client = Client(f"tcp://{address.removeprefix(_DASK)}", set_as_default=False)
    except (OSError, ValueError) as error:
        hint = "is a Dask scheduler running there?"
        raise MachineError(f"no scheduler answers: {error}", path=address, hint=hint) from None
    with client:
        yield client.get_executor()
