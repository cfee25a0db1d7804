"""The facts of a page: results of other calls, and the files that they came from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from moepack.bench.engine_speed import EngineSpeed
from moepack.bench.run import BenchReport
from moepack.inspection.facts import PackFacts, SourceFacts
from moepack.inspection.listing import BlobRow, TensorRow
from moepack.pack.verifying.report import Report
from moepack.planning.forecasting.facts import ForecastFacts
from moepack.planning.forecasting.measured_runs import MeasuredRun
from moepack.planning.placing.facts import PlacementFacts
from moepack.running.programs.run_facts import RunFacts
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
    verification: Report | None
    inputs: tuple[str, ...]
    problems: dict[str, str]
