"""`python -m benchmarks.published_runs RUNS`: forecasts of runs that others published.

RUNS has a run on each line, as JSON: the bytes that a token of its model reads, the bandwidths of
its machine in GB/s, and its tokens a second. Forecasts are made as the command makes them, of a
model's header, a machine, and files of measured runs.
"""

import argparse
import itertools
import json
import math
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np

import moepack
from benchmarks import program
from benchmarks.table import Row
from moepack.planning.footprint.model import footprint_of
from moepack.planning.forecasting import rates
from moepack.planning.forecasting.facts import SpeedFacts
from moepack.planning.forecasting.rates import Kind
from moepack.planning.machine.model import Basis, Figure, Gpu, Machine
from tests.support import large_models
from tests.support.machines import GB

_KINDS: dict[str, Kind] = {"full_gpu": "gpu", "ncmoe": "offload", "cpu": "cpu"}
_NAMES: dict[Kind, str] = {
    "gpu": "whole in VRAM",
    "offload": "experts in memory",
    "cpu": "whole in memory",
}
_STOCK = ("llama.cpp", "ik_llama.cpp", "ktransformers")
"""Forks change how a model whole in VRAM, or with experts in memory, is computed."""
_ENOUGH = Figure(1e13, "typed")
"""Bytes of memory: the models had room."""
_STEPS = 100


class Run(NamedTuple):
    """A published run, the options of its forecast, and the JSON that its engine would write.

    Runs of one `sweep` differ only in the experts in memory.
    """

    kind: Kind
    group: str
    sweep: tuple[str, ...]
    machine: Machine
    model: Path
    options: dict[str, Any]
    speed: float
    receipt: dict[str, Any]

    @property
    def cpu_layer_count(self) -> int:
        """The number of layers whose experts are in memory."""
        return int(self.options.get("cpu_layer_count", 0))

    @property
    def is_measured(self) -> bool:
        """Whether the bandwidth of memory was measured."""
        memory = self.machine.memory_bandwidth
        return memory is not None and memory.basis == "measured"


Forecast = tuple[Run, SpeedFacts]


def read_run(row: dict[str, Any], folder: Path) -> Run | None:
    """Return a run, with its model's header in `folder`; None if too little is known of it."""
    kind = _KINDS.get(row["cls"])
    if kind is None or not row.get("moe_layers") or not row.get("expert_bytes_per_token"):
        return None
    if row["engine"] not in _STOCK:
        return None
    model = _model(row, folder)
    weights = footprint_of(model).weights
    on_cpu = min(int(row["moe_layers"]), int(row["n_cpu_moe"] or 0))
    options: dict[str, Any] = {} if kind == "cpu" else {"cpu_layer_count": on_cpu}
    receipt = {"model_size": weights.length, "n_cpu_moe": on_cpu, "avg_ts": row["tok_s"]}
    receipt |= {"backends": "CPU" if kind == "cpu" else "CUDA", "n_prompt": 0, "n_gen": _STEPS}
    receipt["n_gpu_layers"] = 0 if kind == "cpu" else 999
    sweep = tuple(str(row[key]) for key in ("group", "model", "gpu", "quant", "config"))
    machine = _machine(row, kind)
    return Run(kind, row["group"], sweep, machine, model, options, row["tok_s"], receipt)


def _model(row: dict[str, Any], folder: Path) -> Path:
    """Write a model whose tokens read as many bytes as the published one's."""
    layers, experts, used = (int(row[key]) for key in ("moe_layers", "experts", "experts_used"))
    length = round(row["expert_bytes_per_token"] / (layers * used) / 3)
    dense = round(row["dense_bytes_per_token"])
    path = folder / f"{layers}-{experts}-{used}-{length}-{dense}.gguf"
    if path.exists():
        return path
    return large_models.write_plain(path, layers, experts, used, length, dense)


def _machine(row: dict[str, Any], kind: Kind) -> Machine:
    def figure(key: str, basis: Basis = "typed") -> Figure | None:
        return Figure(row[key] * GB, basis) if row.get(key) else None

    vram = figure("vram_gbps")
    memory = figure("ram_gbps_measured", "measured") or figure("ram_gbps_theory")
    gpus = (Gpu(row["gpu"], _ENOUGH, vram),) if vram or kind in ("gpu", "offload") else ()
    return Machine(row["group"], _ENOUGH, memory, gpus)


def forecasts(cases: Sequence[tuple[Run, Sequence[Run]]]) -> Iterator[Forecast]:
    """Forecast runs from others of their machines, where enough is known and all are used."""
    for run, receipts in cases:
        paths = []
        for number, receipt in enumerate(receipts):
            path = run.model.with_name(f"receipt-{number}.json")
            path.write_text(json.dumps(receipt.receipt))
            paths.append(str(path))
        facts = moepack.forecast(run.model, run.machine, **run.options, receipts=paths)
        (speed,) = facts.forecasts
        if speed.tokens_per_second is not None and not any(one.refusal for one in facts.receipts):
            yield run, speed


def evidence(runs: Sequence[Run]) -> Iterator[tuple[str, list[tuple[Run, Sequence[Run]]]]]:
    """Yield the kinds of evidence, each with runs and those that they are forecast from."""
    for kind, name in _NAMES.items():
        yield f"{name}, without receipts", [(run, ()) for run in runs if run.kind == kind]
    stock = _sweeps([run for run in runs if run.kind in ("gpu", "offload")])
    one = [(run, few) for run, few in _others(stock, 1) if few[0].kind == run.kind == "offload"]
    yield "experts in memory, one receipt", one
    ends = [(run, (sweep[0], sweep[-1])) for sweep in stock for run in sweep[1:-1]]
    yield "experts in memory, two receipts at the ends of a sweep", list(ends)
    pairs = [
        (run, few)
        for run, few in _others(stock, 2)
        if run.kind == few[1].kind == "offload" and few[0].cpu_layer_count != few[1].cpu_layer_count
    ]
    yield "experts in memory, any two receipts", pairs


def _sweeps(runs: Sequence[Run]) -> list[list[Run]]:
    """Return the runs of each sweep, those with the fewest layers in memory first."""
    sweeps: dict[tuple[str, ...], list[Run]] = defaultdict(list)
    for run in sorted(runs, key=lambda run: run.cpu_layer_count):
        sweeps[run.sweep].append(run)
    return list(sweeps.values())


def _others(sweeps: Sequence[Sequence[Run]], count: int) -> Iterator[tuple[Run, Sequence[Run]]]:
    """Yield each run with so many others of its sweep."""
    for sweep in sweeps:
        for others in itertools.combinations(sweep, count):
            yield from ((run, others) for run in sweep if not any(run is one for one in others))


def left_out(runs: Sequence[Run], kind: Kind) -> Iterator[Forecast]:
    """Forecast each run of a kind, with assumptions that are fitted to the other groups alone."""
    alike = list(forecasts([(run, ()) for run in runs if run.kind == kind]))
    for run, _ in alike:
        others = [one for one in alike if one[0].group != run.group]
        others = [one for one in others if one[0].is_measured == run.is_measured] or others
        times = min(np.geomspace(0.2, 5, 65).tolist(), key=partial(_misfit, others, kind))
        table: Any = rates._LAYER_SECONDS if kind == "gpu" else rates._MEMORY
        key: Any = kind if kind == "gpu" else (kind in rates.WITH_GPU, run.is_measured)
        value, rel_std = table[key]
        scaled = (value * times if kind == "gpu" else value / times, rel_std)
        with patch.dict(table, {key: scaled}):
            yield from forecasts([(run, ())])


def _misfit(several: Sequence[Forecast], kind: Kind, times: float) -> float:
    """Return the median error of forecasts, in logarithms, if a term takes `times` as long."""
    name = "layers" if kind == "gpu" else "memory"
    logs = []
    for run, facts in several:
        terms = {term.name: term.seconds or 0.0 for term in facts.terms}
        seconds = sum(terms.values()) + (times - 1) * terms.get(name, 0.0)
        logs.append(math.log(run.speed * seconds))
    return abs(float(np.median(logs))) if logs else 0.0


def compare(name: str, several: Sequence[Forecast]) -> Iterator[Row]:
    """Compare published speeds with forecasts; an error is how far their ratio is from 1."""
    if not several:
        yield Row(name, "forecast", note="no forecast could be made")
        return
    speeds = [run.speed for run, _ in several]
    likely = [facts.tokens_per_second or math.nan for _, facts in several]
    yield Row(name, "forecast", "tok/s", speeds, likely)
    errors = [100 * abs(speed / one - 1) for speed, one in zip(speeds, likely, strict=True)]
    yield Row(name, "error", "%", errors)
    ranges = [(facts.lowest or 0.0, facts.highest or 0.0) for _, facts in several]
    inside = [low <= one <= high for one, (low, high) in zip(speeds, ranges, strict=True)]
    yield Row(name, "inside the range", "%", [100 * sum(inside) / len(inside)])


def parser() -> argparse.ArgumentParser:
    """Return the options."""
    parser = program.new_parser("benchmarks.published_runs", __doc__)
    parser.add_argument("runs", type=Path)
    return parser


def rows(options: argparse.Namespace) -> Iterator[Row]:
    """Forecast each run by all kinds of evidence, then with its group left out."""
    lines = map(json.loads, options.runs.read_text().splitlines())
    with tempfile.TemporaryDirectory() as folder:
        runs = [run for one in lines if (run := read_run(one, Path(folder))) is not None]
        yield Row("published", "", note=f"{len(runs)} runs")
        for name, cases in evidence(runs):
            yield from compare(name, list(forecasts(cases)))
        for kind, name in _NAMES.items():
            yield from compare(f"{name}, its group left out", list(left_out(runs, kind)))


if __name__ == "__main__":
    sys.exit(program.measure(parser(), rows))
