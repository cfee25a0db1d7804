"""The pieces of a page: sections with sentences, pictures and tables, and missing ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

from moepack.report.facts import JsonValue
from moepack.report.page import Block, Column, Table


class Key(NamedTuple):
    """An entry of a legend: its label, its colour, and its look.

    `colour` is a name of the style sheet, such as `c1`; `look` is `solid`, `dashed`, `dotted`,
    `hollow`, `fill` or `band`.
    """

    label: str
    colour: str
    look: str = "solid"


class Picture(NamedTuple):
    """A picture as SVG, with its title and a `text` for people who do not see it.

    `ramp` labels the least and the most of a map's colours. `pointer` is the data that the page's
    script describes the place under the pointer with, None if the picture has none; `like` in it
    names a picture with the rest of the data.
    """

    name: str
    title: str
    text: str
    svg: str
    keys: tuple[Key, ...] = ()
    ramp: tuple[str, str] | None = None
    pointer: Mapping[str, JsonValue] | None = None


class DataTable(NamedTuple):
    """A table with a caption; `keys` are the legend of its rows, if a picture has them.

    It stands beside the next picture that has none, under the first picture, or below all.
    """

    caption: str
    table: Table
    keys: tuple[Key | None, ...] = ()
    place: Literal["beside", "under", "below"] = "beside"


class PageSection(NamedTuple):
    """A section: its content in one sentence, its pictures and tables, and unknown facts.

    `blocks` are further lines, tables and commands to paste, as on a terminal. `headline` has
    figures with their labels, for the top of the page. If `is_choice`, one of the pictures is shown
    at a time.
    """

    name: str
    sentence: str
    figures: tuple[Picture, ...] = ()
    tables: tuple[DataTable, ...] = ()
    blocks: tuple[Block, ...] = ()
    unknown: tuple[str, ...] = ()
    headline: tuple[tuple[str, str], ...] = ()
    is_choice: bool = False


class MissingSection(NamedTuple):
    """A section that is not there: the reason, and the option that would add it."""

    title: str
    reason: str


def adding(reason: str, options: str) -> str:
    """Return why a section is missing, with the command that adds it."""
    return f"{reason}; `moepack report {options} -o report.html` adds it"


def pair_rows(rows: Iterable[tuple[str, str]]) -> Table:
    """Return a table of names with their values, without headings."""
    return Table((Column("", "l"), Column("", "l")), [*rows])
