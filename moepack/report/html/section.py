"""The facts of a page, and the pieces of its sections: sentences, pictures and tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from moepack.bench.engine_speed import EngineSpeed
from moepack.bench.run import BenchReport
from moepack.inspection.describe import PackFacts, SourceFacts
from moepack.inspection.listing import BlobRow, TensorRow
from moepack.planning.forecasting.facts import ForecastFacts
from moepack.planning.forecasting.measured_runs import MeasuredRun
from moepack.planning.placing.facts import PlacementFacts
from moepack.report.facts import JsonValue
from moepack.report.page import Block, Table
from moepack.running.serving.run_facts import RunFacts
from moepack.traces.analysis.concentration import Concentration
from moepack.traces.model import Ints
from moepack.traces.simulation.facts import Simulation


class CountTable(NamedTuple):
    """How often routers selected each expert: counts [layers, experts], -1 for none.

    `origin` names the trace, or the pack.
    """

    origin: str
    layers: tuple[int, ...]
    counts: Ints


class RoutingFacts(NamedTuple):
    """A sample of routing, judged, and its coverage curves by their names."""

    concentration: Concentration
    curves: dict[str, list[float]]


class RunFile(NamedTuple):
    """Measurements in a file: of `bench`, of `bench --run`, of `run`, or of llama-bench."""

    name: str
    facts: BenchReport | EngineSpeed | RunFacts | tuple[MeasuredRun, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportFacts:
    """All facts of a page; None if their input was not given, or they could not be computed.

    `problems` has the reason for the latter, by the name of the section. `budget_length` is the
    bytes for experts to mark, with `at_budget` the hit rates there.
    """

    name: str
    model: SourceFacts | PackFacts
    blobs: tuple[BlobRow, ...]
    tensors: tuple[TensorRow, ...]
    counts: CountTable | None
    routing: RoutingFacts | None
    simulation: Simulation | None
    budget_length: int | None
    at_budget: Simulation | None
    placement: PlacementFacts | None
    forecast: ForecastFacts | None
    sweep: ForecastFacts | None
    runs: tuple[RunFile, ...]
    inputs: tuple[str, ...]
    problems: dict[str, str]


class Key(NamedTuple):
    """An entry of a legend: its label, its colour, and its look.

    `colour` is a name of the style sheet, such as `c1`; `look` is `solid`, `dashed`, `dotted`,
    `hollow`, `fill` or `band`.
    """

    label: str
    colour: str
    look: str = "solid"


class Pointer(NamedTuple):
    """The texts about the places of a picture, for the page's script: a grid of cells.

    `text` names `values` in braces, `{offset:,}` with separators; each has an item for every cell,
    row by row. A cell has no text if its first value is None. `at` is the places of columns, shares
    of the width, if they are no cells.
    """

    row_count: int
    column_count: int
    text: str
    values: Mapping[str, Sequence[JsonValue]]
    at: Sequence[float] | None = None


def points(at: Sequence[float], texts: Sequence[str]) -> Pointer:
    """Return the texts about points of curves, at shares of the width."""
    return Pointer(1, len(at), "{text}", {"text": texts}, at)


class Picture(NamedTuple):
    """A picture as SVG, with its title and a `text` for people who do not see it.

    `ramp` labels the least and the most of a map's colours. `pointer` describes the place under the
    pointer, None if nothing does.
    """

    name: str
    title: str
    text: str
    svg: str
    keys: Sequence[Key] = ()
    ramp: tuple[str, str] | None = None
    pointer: Pointer | None = None


class DataTable(NamedTuple):
    """A table with a caption; it stands beside the next picture that has none."""

    caption: str
    table: Table


class PageSection(NamedTuple):
    """A section: its content in one sentence, its pictures and tables, and unknown facts.

    `blocks` are further lines, tables and commands to paste, as on a terminal. `headline` has
    figures with their labels, for the top of the page.
    """

    name: str
    sentence: str
    figures: Sequence[Picture] = ()
    tables: Sequence[DataTable] = ()
    blocks: Sequence[Block] = ()
    unknown: Sequence[str] = ()
    headline: Sequence[tuple[str, str]] = ()


def adding(reason: str, options: str) -> str:
    """Return why a section is missing, with the command that adds it."""
    return f"{reason}; `moepack report {options} -o report.html` adds it"
