"""Steps that several commands for traces share."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import moepack
from moepack.cli.shared.parameters import STANDARD_STREAM
from moepack.cli.shared.terminal import next_line
from moepack.common.errors import RequestError

if TYPE_CHECKING:
    from moepack.traces.formats.registry import ReadOptions


def read_options(
    *, form: str | None, lenient: bool, model_path: str | None, pack_path: str | None = None
) -> ReadOptions:
    """Return the options for reading traces. Raises RequestError for a model and a pack."""
    from moepack.traces.formats.registry import ReadOptions

    if model_path and pack_path:
        raise RequestError("a model and a pack at once", hint="give --model or --pack, not both")
    path = model_path or pack_path
    return ReadOptions(form, moepack.shape_of(path) if path else None, lenient)


def count_line(trace: str) -> str | None:
    """Return the command line that counts the selections of a trace; None if it is no file."""
    if trace == STANDARD_STREAM:
        return None
    stem = os.path.splitext(trace)[0]
    counts = f"{stem}-hotness.csv" if os.path.exists(f"{stem}.csv") else f"{stem}.csv"
    return next_line("hotness", trace, "-o", counts)
