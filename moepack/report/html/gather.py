"""The facts of a page, gathered by the calls that other commands make, and from files of those."""

from __future__ import annotations

import json
import os
import re
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np

from moepack.bench.engine_speed import EngineSpeed
from moepack.bench.run import BenchReport
from moepack.common.errors import RequestError, TraceError
from moepack.common.escaping import one_line
from moepack.common.paths import PathOrPaths, is_remote, path_texts
from moepack.common.shape import ROUTED_FAMILY
from moepack.common.sizes import Size, parse_size
from moepack.inspection.describe import PackFacts, SourceFacts, inspect
from moepack.inspection.listing import BlobRow, TensorRow, list_pack
from moepack.pack.opening.open_model import open_model
from moepack.pack.reading.pack import Pack
from moepack.planning.forecasting.facts import ForecastFacts
from moepack.planning.forecasting.forecast import forecast
from moepack.planning.forecasting.measured_runs import ReceiptFile, read_receipt, read_runs
from moepack.planning.machine.described import AnyMachine, find_machine
from moepack.planning.machine.model import Machine
from moepack.planning.placing.facts import PlacementFacts
from moepack.planning.placing.offload import PACK
from moepack.planning.placing.place import place
from moepack.report.facts import with_texts
from moepack.report.html.section import CountTable, ReportFacts, RoutingFacts, RunFile
from moepack.running.serving.run_facts import RunFacts
from moepack.traces.analysis.concentration import RoutingSample, read_sample
from moepack.traces.formats.reading import AnyTrace, spooled
from moepack.traces.formats.registry import ReadOptions
from moepack.traces.simulation.facts import Simulation
from moepack.traces.simulation.simulate import simulate
from moepack.traces.spool import SpooledTrace

STAGE_COUNT = 4
"""The calls of `advance` for a page; the last follows its drawing."""


def gather(
    paths: PathOrPaths,
    traces: AnyTrace,
    machine: AnyMachine | None,
    runs: Sequence[str],
    requested: Size | None,
    options: ReadOptions,
    advance: Callable[[], None],
) -> ReportFacts:
    """Return the facts of a page; `advance` is called after each of its longer parts.

    `requested` is bytes for experts, or a text such as `8GiB`. Raises what the calls raise for
    their files. A placement or a forecast that is refused, such as for too little memory, is one of
    `problems`.
    """
    trace_paths = traces.paths if isinstance(traces, SpooledTrace) else path_texts(traces)
    others = []
    if machine is not None and not isinstance(machine, Machine):
        others = [os.fspath(machine)]
        machine = find_machine(machine)
    files = [*path_texts(paths), *trace_paths, *runs, *others]
    receipts = list(map(read_receipt, runs))
    run_files = tuple(map(_run_file, receipts))
    pairs = zip(receipts, run_files, strict=True)
    usable = [receipt for receipt, run in pairs if isinstance(run.facts, RunFacts | tuple)]
    problems: dict[str, str] = {}
    with open_model(paths) as pack, spooled(traces, options._replace(shape=pack.shape)) as trace:
        model = inspect(pack)
        rows = list(list_pack(pack))
        blobs = tuple(row for row in rows if isinstance(row, BlobRow))
        sample = None if trace is None else read_sample(trace)
        advance()
        placement, best, sweep = _plans(pack, machine, trace, usable, problems)
        budget = _budget(requested, pack, placement)
        advance()
        caches, at_budget = _simulations(trace, budget, requested is not None, problems)
        advance()
    source = model.source if isinstance(model, PackFacts) else model
    facts = ReportFacts(
        name=source.name or _base_name(os.path.abspath(files[0])),
        model=model,
        blobs=(),
        tensors=(),
        counts=_counts(", ".join(map(_base_name, trace_paths)), sample, blobs),
        routing=None if sample is None else RoutingFacts(sample.concentration(), sample.curves()),
        simulation=caches,
        budget_length=budget,
        at_budget=at_budget,
        placement=placement,
        forecast=best,
        sweep=sweep,
        runs=with_texts(run_files, _without_folders),
        inputs=tuple(dict.fromkeys(map(_base_name, files))),
        problems=problems,
    )
    # Blobs and tensors, of which there are many, stay as they are.
    tensors = tuple(row for row in rows if isinstance(row, TensorRow))
    return replace(_for_page(facts, files), blobs=blobs, tensors=tensors)


def _for_page(facts: ReportFacts, paths: Sequence[str]) -> ReportFacts:
    """Return facts with escaped texts, and with the names of files in place of their paths.

    So no page tells of a machine.
    """
    files = {*paths}
    if isinstance(facts.model, SourceFacts):
        files |= {shard.path for shard in facts.model.shards}
    elif facts.model.mirror is not None:
        files.add(str(facts.model.mirror.path))
    files |= {os.path.abspath(path) for path in files if not is_remote(path)}
    names = {path: _base_name(path) for path in files if "/" in path.rstrip("/")}
    longest_first = sorted(names, key=len, reverse=True)

    def shortened(text: str) -> str:
        for path in longest_first:
            text = text.replace(path, names[path])
        return one_line(text)

    return with_texts(facts, shortened)


def _base_name(path: str) -> str:
    return os.path.basename(path.rstrip("/"))


def _without_folders(text: str) -> str:
    """Return a text with the absolute paths in it shortened to names: of files that are unknown."""
    return re.sub(r"(?<![\w.:/])/(?:[^/\s]+/)+", "", text)


def _counts(
    origin: str, sample: RoutingSample | None, blobs: Sequence[BlobRow]
) -> CountTable | None:
    """Return the counts of traces, else those that a pack was ranked by."""
    if sample is not None:
        return CountTable(origin, *sample.count_table())
    ranked = [one for one in blobs if one.family == ROUTED_FAMILY and one.hotness is not None]
    if not any(one.hotness for one in ranked):
        return None
    layers = tuple(sorted({one.layer for one in ranked}))
    counts = np.full((len(layers), 1 + max(one.expert for one in ranked)), -1, np.int64)
    for one in ranked:
        counts[layers.index(one.layer), one.expert] = one.hotness or 0
    return CountTable("the counts in the pack", layers, counts)


def _budget(requested: Size | None, pack: Pack, placement: PlacementFacts | None) -> int | None:
    """Return the bytes for experts to mark: by default those of a placement that streams."""
    if requested is not None:
        return parse_size(requested, "budget", whole=pack.shape.expert_length)
    if placement is None or not placement.option.streamed_length:
        return None
    return placement.option.memory_expert_length


def _simulations(
    trace: SpooledTrace | None, budget: int | None, is_requested: bool, problems: dict[str, str]
) -> tuple[Simulation | None, Simulation | None]:
    """Return the simulation of a dozen budgets, and that of one."""
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
        if is_requested:
            raise
        return caches, None  # what a placement leaves is less than one token uses
    return caches, at_budget


def _plans(
    pack: Pack,
    machine: Machine | None,
    trace: SpooledTrace | None,
    receipts: Sequence[ReceiptFile],
    problems: dict[str, str],
) -> tuple[PlacementFacts | None, ForecastFacts | None, ForecastFacts | None]:
    """Return the placement, the forecast of the best mode that fits, and that of all.

    The placement is for llama.cpp, or for `moepack run` if that does not fit.
    """
    if machine is None:
        return None, None, None
    traces: AnyTrace = () if trace is None or not trace.has_tokens else trace
    placement = None
    for engine in (None, PACK) if pack.source is not None else (PACK,):
        used = traces if engine == PACK else ()  # others place whole layers
        try:
            placement = place(pack, machine, engine=engine, traces=used)
        except (RequestError, TraceError) as error:
            problems["placement"] = str(error)
        else:
            problems.pop("placement", None)
            break
    forecast_for = partial(forecast, pack, machine, traces=traces, receipts=receipts)
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


_KINDS: Mapping[type, tuple[str, ...]] = {
    BenchReport: ("surface", "readings", "verdict"),
    EngineSpeed: ("sides", "memory_limit"),
    RunFacts: ("prompt", "memory", "read_length"),
}
"""The kinds of facts that moepack writes, and fields by which each is told from the others."""


def _run_file(file: ReceiptFile) -> RunFile:
    """Return the measurements in a file. Raises RequestError for any other file."""
    name = os.path.basename(file.path)
    try:
        value = json.loads(file.data)
    except (ValueError, RecursionError):
        value = None  # llama-bench writes several objects, too
    for kind, names in _KINDS.items():
        if isinstance(value, dict) and value.keys() >= set(names):
            facts = _facts_of(kind, value, "", file.path)
            if isinstance(facts, RunFacts):  # nobody posts what was asked and answered
                facts = replace(facts, text="", thoughts="")
            return RunFile(name, facts)
    return RunFile(name, tuple(read_runs([file])))


def _facts_of(kind: Any, value: Any, place: str, path: str) -> Any:
    """Return JSON as facts of a kind, by the types of its fields; others are left out.

    Raises RequestError for a value that is not as moepack writes it, with its place in the file.
    """

    def check(is_right: bool, expected: str) -> None:
        if not is_right:
            problem, shown = "not as moepack writes it", json.dumps(value)[:40]
            raise RequestError(problem, path=path, place=place, expected=expected, found=shown)

    origin, kinds = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        if value is None and types.NoneType in kinds:
            return None
        return _facts_of(kinds[0], value, place, path)
    if origin is Literal:
        check(value in kinds, "one of its words")
    elif origin is tuple:
        check(isinstance(value, list), "a list")
        items = enumerate(value)
        return tuple(_facts_of(kinds[0], one, f"{place}[{n}]", path) for n, one in items)
    elif is_dataclass(kind) or hasattr(kind, "_fields"):
        check(isinstance(value, dict), "an object")
        names = getattr(kind, "_fields", None) or [field.name for field in fields(kind)]
        hints, prefix = get_type_hints(kind), f"{place}." if place else ""
        values = {
            name: _facts_of(hints[name], value.get(name), prefix + name, path)
            for name in names
            if name in value or name not in getattr(kind, "_field_defaults", {})
        }
        return kind(**values)
    else:
        if kind is float and type(value) is int and abs(value) < 1 << 63:
            value = float(value)
        is_right = type(value) is kind and (kind is not int or abs(value) < 1 << 63)
        check(is_right, kind.__name__)
    return value
