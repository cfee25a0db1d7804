"""An export: the contract of the module of a format, its needs and its plan.

A module describes its format by an `Engine`, and `exporting` lists it; nothing else has to know it.
Its plan is made from the index alone and opens no data file; `exporting` carries it out, `checking`
compares a finished export with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from moepack.common.errors import RequestError
from moepack.common.phases import Progress
from moepack.common.sizes import size_text
from moepack.pack.reading.pack import Pack
from moepack.storage.extents import NewFile

Settings = Mapping[str, Any]
"""The options of an export by their names; all of them, with their defaults."""


class ExportOption(NamedTuple):
    """An option of one format alone, by the name of its argument.

    A `file` is the path of one to read, a `size` is bytes, a `choice` one of `choices`.
    """

    name: str
    kind: Literal["file", "size", "choice"]
    help: str
    default: Any = None
    choices: tuple[str, ...] = ()


class Need(NamedTuple):
    """A need of an engine that a pack does not meet, in words; `hint` says how it can be met."""

    problem: str
    hint: str | None = None


class LastFile(NamedTuple):
    """A small file that is written when all others are whole: it marks the export as complete.

    `content` gives its bytes, and may read the finished files.
    """

    name: str
    content: Callable[[Progress | None], bytes]


class ExportPlan(NamedTuple):
    """The files of an export in `folder`.

    Inputs of `files` are the files of the pack's index, then what `heads` returns: headers and
    tables in memory. `heads` may read the pack (for digests that a format has); its arguments are a
    number of threads, and a function for progress. `files` are asked for their extents only
    afterwards.

    `tensor_count` is the number of the model's tensors in it, `alignment` that of experts, in
    bytes. `command` starts the engine, `notes` are warnings for people.
    """

    folder: Path
    tensor_count: int
    alignment: int
    command: str
    files: tuple[NewFile, ...] = ()
    heads: Callable[[int, Progress | None], Sequence[bytes]] = lambda _threads, _progress: ()
    last: LastFile | None = None
    notes: tuple[str, ...] = ()


MAX_MANIFEST_LENGTH = 1 << 30
"""The most bytes that are read of a manifest for the options in it."""


class Engine(NamedTuple):
    """A format of another engine, and how a pack is written in it.

    `name` is the word on the command line, `title` the engine; `reads`, `writes`, `copies` and
    `proof` are phrases of the table of exports. `is_folder` says that the target is a folder,
    `owns_folder` that nothing else lies in it. `needs` yields what a pack lacks; `plan` is only
    asked for a pack that lacks nothing. `settings_of` reads the options of a finished export from
    it, and may raise anything for a damaged one. `default_name` is the name of the export in the
    pack itself, if no target is given.
    """

    name: str
    title: str
    summary: str
    reads: str
    writes: str
    copies: str
    proof: str
    is_folder: bool
    needs: Callable[[Pack, Settings], Iterable[Need]]
    plan: Callable[[Pack, Path, Settings], ExportPlan]
    owns_folder: bool = False
    options: tuple[ExportOption, ...] = ()
    settings_of: Callable[[Pack, Path], Settings] = lambda _pack, _path: {}
    default_name: str | None = None


def checked_alignment(alignment: int, least: int, most: int) -> int:
    """Return an alignment in bytes; raise RequestError unless it is a power of two in bounds."""
    if alignment.bit_count() != 1 or not least <= alignment <= most:
        expected = f"a power of two from {size_text(least)} to {size_text(most)}"
        raise RequestError("not an alignment", expected=expected, found=f"{alignment:,} bytes")
    return alignment
