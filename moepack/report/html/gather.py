"""The facts of a page, gathered by the calls that other commands make."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from moepack.common.errors import RequestError, TraceError
from moepack.common.escaping import one_line
from moepack.common.paths import AnyPath, PathOrPaths, path_list, path_texts
from moepack.common.remote_path import is_remote
from moepack.common.shape import ROUTED_FAMILY, ModelShape
from moepack.common.sizes import Size, parse_size
from moepack.inspection.describe import inspect
from moepack.inspection.facts import PackFacts, SourceFacts
from moepack.inspection.listing import BlobRow, TensorRow, list_pack
from moepack.pack.reading.directory import named_pack
from moepack.pack.verifying.report import Report
from moepack.planning.forecasting.facts import ForecastFacts
from moepack.planning.forecasting.forecast import forecast
from moepack.planning.forecasting.measured_runs import ReceiptFile, read_receipt
from moepack.planning.machine.file import read_machine
from moepack.planning.machine.model import Machine
from moepack.planning.placing.facts import PlacementFacts
from moepack.planning.placing.place import place
from moepack.planning.placing.streamed import PACK
from moepack.report.html.facts import CountTable, ReportFacts, RoutingFacts
from moepack.report.html.run_files import run_file_of
from moepack.report.printable import with_texts
from moepack.running.programs.run_facts import RunFacts
from moepack.traces.analysis.concentration import RoutingSample, read_sample
from moepack.traces.formats.reading import spooled
from moepack.traces.formats.registry import AnyTrace, ReadOptions
from moepack.traces.formats.traced_model import shape_of
from moepack.traces.simulation.facts import Simulation
from moepack.traces.simulation.simulate import simulate
from moepack.traces.spooled import SpooledTrace

STAGE_COUNT = 4
"""The calls of `advance` for a page; the last follows its drawing."""


@dataclass(slots=True)
class ReportInputs:
    """The files and settings of a page.

    `budget` is bytes for experts, or a text such as `8GiB`.
    """

    paths: PathOrPaths
    traces: AnyTrace = ()
    machine: Machine | AnyPath | None = None
    runs: list[str] = field(default_factory=list)
    budget: Size | None = None
    verification: Report | None = None
    options: ReadOptions = field(default_factory=ReadOptions)

    @property
    def paths_of_traces(self) -> Sequence[str]:
        """The paths of all traces."""
        traces = self.traces
        return traces.paths if isinstance(traces, SpooledTrace) else path_texts(traces)

    @property
    def paths_of_files(self) -> tuple[str, ...]:
        """The paths of all files, as they were given."""
        named = [*path_list(self.paths), *self.paths_of_traces, *self.runs]
        if self.verification is not None:
            named.append(self.verification.path)
        if self.machine is not None and not isinstance(self.machine, Machine):
            named.append(self.machine)
        return tuple(os.fspath(name) for name in named)


def gather(inputs: ReportInputs, advance: Callable[[], None]) -> ReportFacts:
    """Return the facts of a page; `advance` is called after each of its longer parts.

    Raises what the calls raise for their files. A placement or a forecast that is refused, such as
    for too little memory, is one of `problems`.
    """
    shape = shape_of(inputs.paths)
    with spooled(inputs.traces, inputs.options._replace(shape=shape)) as trace:
        facts = _gather(inputs, shape, trace, advance)
    return _for_page(facts, inputs.paths_of_files)


def _gather(
    inputs: ReportInputs,
    shape: ModelShape,
    trace: SpooledTrace | None,
    advance: Callable[[], None],
) -> ReportFacts:
    """Return the facts of a page, with texts and paths as they are."""
    problems: dict[str, str] = {}
    model = inspect(inputs.paths)
    rows = list(list_pack(inputs.paths))
    blobs = tuple(row for row in rows if isinstance(row, BlobRow))
    receipts = list(map(read_receipt, inputs.runs))
    runs = tuple(map(run_file_of, receipts))
    sample = None if trace is None else read_sample(trace)
    advance()
    usable = [
        receipt
        for receipt, run in zip(receipts, runs, strict=True)
        if isinstance(run.facts, RunFacts | tuple)
    ]
    placement, best, sweep = _plans(inputs, trace, usable, problems)
    budget = None
    if inputs.budget is not None:
        budget = parse_size(inputs.budget, "budget", whole=shape.expert_length)
    elif placement is not None and placement.option.streamed_length:
        budget = placement.option.memory_expert_length
    advance()
    caches, at_budget = _simulations(inputs, trace, budget, problems)
    advance()
    return ReportFacts(
        name=_name(inputs.paths, model),
        model=model,
        blobs=blobs,
        tensors=tuple(row for row in rows if isinstance(row, TensorRow)),
        counts=_counts(inputs, sample, blobs),
        routing=_routing(sample),
        simulation=caches,
        budget_length=budget,
        at_budget=at_budget,
        placement=placement,
        forecast=best,
        sweep=sweep,
        runs=runs,
        verification=inputs.verification,
        inputs=tuple(dict.fromkeys(map(_base_name, inputs.paths_of_files))),
        problems=problems,
    )


def _for_page(facts: ReportFacts, paths: Iterable[str]) -> ReportFacts:
    """Return facts with escaped texts, and with the names of files in place of their paths.

    So no page tells of a machine. Blobs and tensors, of which there are many, stay as they are.
    """
    shards = facts.model.shards if isinstance(facts.model, SourceFacts) else ()
    files = {*paths, *(shard.path for shard in shards)}
    if isinstance(facts.model, PackFacts) and facts.model.mirror is not None:
        files.add(str(facts.model.mirror.path))
    files |= {os.path.abspath(path) for path in files if not is_remote(path)}
    names = {path: _base_name(path) for path in files if "/" in path.rstrip("/")}
    longest_first = sorted(names, key=len, reverse=True)

    def shortened(text: str) -> str:
        for path in longest_first:
            text = text.replace(path, names[path])
        return one_line(text)

    others = with_texts(replace(facts, blobs=(), tensors=()), shortened)
    return replace(
        others,
        blobs=facts.blobs,
        tensors=facts.tensors,
        runs=with_texts(others.runs, _without_folders),
        verification=with_texts(others.verification, _without_folders),
    )


def _base_name(path: str) -> str:
    return os.path.basename(path.rstrip("/"))


def _without_folders(text: str) -> str:
    """Return a text with the absolute paths in it shortened to names: of files that are unknown."""
    return re.sub(r"(?<![\w.:/])/(?:[^/\s]+/)+", "", text)


def _name(paths: PathOrPaths, model: SourceFacts | PackFacts) -> str:
    """Return the name of a model, else that of its file."""
    name = model.source.name if isinstance(model, PackFacts) else model.name
    return name or _base_name(os.path.abspath(path_list(paths)[0]))


def _counts(
    inputs: ReportInputs, sample: RoutingSample | None, blobs: Sequence[BlobRow]
) -> CountTable | None:
    """Return the counts of traces, else those that a pack was ranked by."""
    if sample is not None:
        names = ", ".join(_base_name(path) for path in inputs.paths_of_traces)
        return CountTable(names, *sample.count_table())
    ranked = [one for one in blobs if one.family == ROUTED_FAMILY and one.hotness is not None]
    if not any(one.hotness for one in ranked):
        return None
    layers = tuple(sorted({one.layer for one in ranked}))
    counts = np.full((len(layers), 1 + max(one.expert for one in ranked)), -1, np.int64)
    for one in ranked:
        counts[layers.index(one.layer), one.expert] = one.hotness or 0
    return CountTable("the counts in the pack", layers, counts)


def _routing(sample: RoutingSample | None) -> RoutingFacts | None:
    return None if sample is None else RoutingFacts(sample.concentration(), sample.curves())


def _simulations(
    inputs: ReportInputs,
    trace: SpooledTrace | None,
    budget: int | None,
    problems: dict[str, str],
) -> tuple[Simulation | None, Simulation | None]:
    """Return the simulation of a dozen budgets, and that of the requested one."""
    if trace is None:
        return None, None
    if not trace.has_tokens:
        problems["caches"] = "counts alone do not tell the order of tokens"
        return None, None
    caches = simulate(trace)
    if budget is None:
        return caches, None
    try:
        at_budget = simulate(trace, budgets=budget)
    except RequestError:
        if inputs.budget is not None:
            raise
        return caches, None  # what a placement leaves is less than one token uses
    return caches, at_budget


def _plans(
    inputs: ReportInputs,
    trace: SpooledTrace | None,
    receipts: Sequence[ReceiptFile],
    problems: dict[str, str],
) -> tuple[PlacementFacts | None, ForecastFacts | None, ForecastFacts | None]:
    """Return the placement, the forecast of the best mode that fits, and that of all."""
    if inputs.machine is None:
        return None, None, None
    machine = inputs.machine
    machine = machine if isinstance(machine, Machine) else read_machine(machine)
    traces: AnyTrace = () if trace is None or not trace.has_tokens else trace
    placement = _placement(inputs, machine, traces, problems)
    forecast_for = partial(forecast, inputs.paths, machine, traces=traces, receipts=receipts)
    if placement is not None:
        forecast_for = partial(forecast_for, context=placement.context)
    try:
        best = forecast_for()
    except (RequestError, TraceError) as error:
        problems["forecast"] = str(error)
        return placement, None, None
    try:
        return placement, best, forecast_for(sweep=True)
    except RequestError:  # such as for a machine without a drive
        return placement, best, None


def _placement(
    inputs: ReportInputs, machine: Machine, traces: AnyTrace, problems: dict[str, str]
) -> PlacementFacts | None:
    """Return the placement for llama.cpp, or for `moepack run` if that does not fit."""
    engines = (PACK,) if named_pack(inputs.paths) else (None, PACK)
    for engine in engines:
        used = traces if engine == PACK else ()  # others place whole layers
        try:
            facts = place(inputs.paths, machine, engine=engine, traces=used)
        except (RequestError, TraceError) as error:
            problems["placement"] = str(error)
        else:
            problems.pop("placement", None)
            return facts
    return None
