"""Published runs of engines, to hold forecasts against.

They are read from a file of JSON lines, one for each run, with what is known of it: the bytes that
a token of the model reads, the machine's bandwidths in GB/s, and the tokens a second. The file is
not part of the project: its rows are others' work. Forecasts of them are made as the command makes
them: of a model's header, a machine, and files of receipts.
"""

import itertools
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import moepack
from moepack.footprint.weights import Weights, weights_of
from moepack.forecasting import rates
from moepack.forecasting.facts import SpeedFacts
from moepack.forecasting.misses import WorkingSet
from moepack.forecasting.reads import Kind
from moepack.machine.model import Basis, Drive, Figure, Gpu, Machine
from tests.support.gguf_builder import GgufBuilder, TensorSpec
from tests.support.machines import GB

_KINDS: dict[str, Kind] = {
    "full_gpu": "gpu",
    "ncmoe": "offload",
    "cpu": "cpu",
    "ssd": "stream",
}
_STOCK = ("llama.cpp", "ik_llama.cpp", "ktransformers")
_LPDDR5X = 68.3
"""GB/s of the phones whose memory is only named: 64 bits of 8,533 MT/s."""
_ENOUGH = Figure(1e13, "typed")
"""Bytes of memory: that a model has room is not what is asked here."""
_I8 = 24
_STEPS = 100


class Run(NamedTuple):
    """A published run: how, on which machine, of which model, and how fast it was.

    `machine_group` is the same for runs of one author on one machine; `sweep` for those that differ
    in nothing but what is in memory, or in the cache. `options` are the forecast's. `receipt` is
    what the engine would have written, as JSON; None where that is not known: of those that stream
    it says how long they waited for the drive.
    """

    number: int
    kind: Kind
    machine_group: str
    sweep: tuple[str, ...]
    machine: Machine
    model: Path
    options: dict[str, Any]
    speed: float
    receipt: dict[str, Any] | None


class Forecast(NamedTuple):
    """What is forecast of a run."""

    run: Run
    facts: SpeedFacts

    @property
    def speed(self) -> float:
        """The likely tokens a second."""
        assert self.facts.tokens_per_second is not None
        return self.facts.tokens_per_second

    @property
    def lowest(self) -> float:
        """The lower end of the range."""
        return self.facts.lowest or 0.0

    @property
    def highest(self) -> float:
        """The upper end of the range."""
        return self.facts.highest or 0.0

    @property
    def error(self) -> float:
        """The measured speed over the forecast one, less 1."""
        return self.run.speed / self.speed - 1

    @property
    def is_held(self) -> bool:
        """Whether the range holds what was measured."""
        return self.lowest <= self.run.speed <= self.highest


def read_runs(path: str | Path, folder: Path) -> list[Run]:
    """Read the runs of stock engines, and of those that stream experts from a drive.

    Those are left out of which too little is known to say what a token read; so are forks that
    change how a model whole in VRAM, or with experts in memory, is computed. `folder` gets their
    models, of which only headers are there.
    """
    rows = map(json.loads, Path(path).read_text().splitlines())
    models = _Models(folder)
    return [run for row in rows if (run := _run(row, models)) is not None]


class _Models:
    """Writes models whose tokens read as many bytes as the published ones do."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._written: dict[tuple[int, ...], Path] = {}

    def of(self, row: dict[str, Any]) -> Path:
        """Return the model of a run."""
        layers, experts, used = (int(row[key]) for key in ("moe_layers", "experts", "experts_used"))
        length = round(row["expert_bytes_per_token"] / (layers * used) / 3)
        dense = round(row["dense_bytes_per_token"])
        key = layers, experts, used, length, dense
        if key not in self._written:
            path = self._folder / f"model-{len(self._written)}.gguf"
            self._written[key] = write_model(path, *key)
        return self._written[key]


def write_model(path: Path, layers: int, experts: int, used: int, length: int, dense: int) -> Path:
    """Write a model by the bytes of an expert's projection and of all that is dense."""
    builder = GgufBuilder().put("general.architecture", "str", "qwen3moe")
    numbers = {"block_count": layers, "expert_count": experts, "expert_used_count": used}
    numbers |= {"embedding_length": 32, "feed_forward_length": 32, "context_length": 4096}
    numbers |= {"attention.head_count": 1, "attention.head_count_kv": 1}
    for key, value in numbers.items():
        builder.put(f"qwen3moe.{key}", "u32", value)
    tensors: dict[str, tuple[int, ...]] = {"output_norm.weight": (dense,)}
    for layer in range(layers):
        for name in ("gate", "up", "down"):
            tensors[f"blk.{layer}.ffn_{name}_exps.weight"] = (length, 1, experts)
    for name, dims in tensors.items():
        builder.tensors.append(TensorSpec(name, dims, _I8, b"", hole=math.prod(dims)))
    return builder.write_sparse(path)


def _run(row: dict[str, Any], models: _Models) -> Run | None:
    kind = _KINDS.get(row["cls"])
    if kind is None or not row.get("moe_layers") or not row.get("expert_bytes_per_token"):
        return None
    if kind != "stream" and row["engine"] not in _STOCK:
        return None
    if kind == "stream" and _missed(row) is None:
        return None
    model = models.of(row)
    weights = weights_of(model)
    settings = ("quant", "config") if kind != "stream" else ("experts_used",)
    return Run(
        row["id"],
        kind,
        row["group"],
        tuple(str(row[key]) for key in ("group", "model", "gpu", *settings)),
        _machine(row, kind),
        model,
        _options(row, kind, weights),
        row["tok_s"],
        _run_receipt(row, weights) if kind == "stream" else _bench_receipt(row, kind, weights),
    )


def _machine(row: dict[str, Any], kind: Kind) -> Machine:
    def figure(key: str, basis: Basis = "typed") -> Figure | None:
        return Figure(row[key] * GB, basis) if row.get(key) else None

    vram, drive = figure("vram_gbps"), figure("ssd_gbps")
    memory = figure("ram_gbps_measured", "measured") or figure("ram_gbps_theory")
    if memory is None and kind == "stream":
        memory, vram = vram, None  # one memory for both
    if memory is None and kind == "stream" and "LPDDR5X" in row.get("ram", ""):
        memory = Figure(_LPDDR5X * GB, "typed")
    gpus = (Gpu(row["gpu"], _ENOUGH, vram),) if vram or kind in ("gpu", "offload") else ()
    return Machine(row["group"], _ENOUGH, memory, gpus, Drive(None, drive) if drive else None)


def _options(row: dict[str, Any], kind: Kind, weights: Weights) -> dict[str, Any]:
    if kind == "cpu":
        return {}
    if kind != "stream":
        return {"cpu_layer_count": _cpu_layer_count(row)}
    step = weights.read_expert_length or 0
    length = weights.shape.routed_length / weights.shape.routed_count
    # Of each token as many experts are new as were missed.
    known = WorkingSet(round(step / length), (_missed(row) or 0.0) / length, window=1)
    return {"budget": step, "working_set": known}


def _cpu_layer_count(row: dict[str, Any]) -> int:
    return min(int(row["moe_layers"]), int(row["n_cpu_moe"] or 0))


def _missed(row: dict[str, Any]) -> float | None:
    missed: float | None = row["miss_bytes_per_token"]
    if missed is None and row["hit"] is not None:
        missed = row["expert_bytes_per_token"] * (1 - row["hit"])
    return missed


def _bench_receipt(row: dict[str, Any], kind: Kind, weights: Weights) -> dict[str, Any]:
    """Return what llama-bench would have written of a run."""
    return {
        "model_size": weights.length,
        "backends": "CPU" if kind == "cpu" else "CUDA",
        "n_gpu_layers": 0 if kind == "cpu" else 999,
        "n_cpu_moe": _cpu_layer_count(row),
        "n_prompt": 0,
        "n_gen": _STEPS,
        "avg_ts": row["tok_s"],
    }


def _run_receipt(row: dict[str, Any], weights: Weights) -> dict[str, Any] | None:
    """Return what `moepack run --json` would have written of a run."""
    computing = row.get("compute_s_per_tok")
    if computing is None or row["vram_gbps"]:
        return None
    seconds = _STEPS / row["tok_s"]
    return {
        "model_length": weights.length,
        "step_count": _STEPS,
        "seconds": seconds,
        "read_length": _STEPS * (_missed(row) or 0.0),
        "read_seconds": max(0.0, seconds - _STEPS * computing),
        "misses": 1,
        "prefetched": 0,
        "prompt_count": 0,
        "memory": {"experts": weights.read_expert_length},
    }


def forecast(run: Run, receipts: Sequence[Run] = ()) -> Forecast | None:
    """Forecast a run from others of its machine; None where too little is known.

    None as well where one of the receipts is not used.
    """
    paths = []
    for one in receipts:
        path = run.model.with_name(f"receipt-{one.number}.json")
        path.write_text(json.dumps(one.receipt))
        paths.append(str(path))
    facts = moepack.forecast(run.model, run.machine, **run.options, receipts=paths)
    (speed,) = facts.forecasts
    if speed.tokens_per_second is None or any(one.refusal for one in facts.receipts):
        return None
    return Forecast(run, speed)


def sweeps(runs: Iterable[Run]) -> Iterator[list[Run]]:
    """Yield runs that differ in nothing but what is in memory, those with the least first.

    Of those that stream it is any order.
    """
    found: dict[tuple[str, ...], list[Run]] = defaultdict(list)
    for run in runs:
        found[run.sweep].append(run)
    for sweep in found.values():
        yield sorted(sweep, key=_in_memory)


def _in_memory(run: Run) -> int:
    count: int = run.options.get("cpu_layer_count", 0)
    return count


def evidence(runs: Sequence[Run]) -> dict[str, list[Forecast]]:
    """Forecast all runs from each kind of evidence."""
    found: dict[str, list[Forecast | None]] = {}
    for name, kind in KIND_NAMES.items():
        found[f"{name}, without receipts"] = [forecast(run) for run in runs if run.kind == kind]
    stock = [run for run in runs if run.kind in ("gpu", "offload")]
    found["experts in memory, one receipt"] = [
        forecast(run, [one])
        for sweep in sweeps(stock)
        for one, run in itertools.permutations(sweep, 2)
        if one.kind == run.kind == "offload"
    ]
    found["experts in memory, two receipts at the ends"] = [
        forecast(run, [sweep[0], sweep[-1]]) for sweep in sweeps(stock) for run in sweep[1:-1]
    ]
    found["experts in memory, any two receipts"] = [
        forecast(run, pair)
        for sweep in sweeps(stock)
        for pair in itertools.combinations(sweep, 2)
        for run in sweep
        if run not in pair
        and run.kind == pair[1].kind == "offload"
        and _in_memory(pair[0]) != _in_memory(pair[1])
    ]
    streams = [run for run in runs if run.kind == "stream" and run.receipt is not None]
    found["from the drive, one receipt"] = [
        forecast(run, [one])
        for sweep in sweeps(streams)
        for one, run in itertools.permutations(sweep, 2)
    ]
    found["from the drive, two receipts"] = [
        forecast(run, pair)
        for sweep in sweeps(streams)
        for pair in itertools.combinations(sweep, 2)
        for run in sweep
        if run not in pair
    ]
    return {
        name: [one for one in forecasts if one is not None] for name, forecasts in found.items()
    }


KIND_NAMES: dict[str, Kind] = {
    "whole in VRAM": "gpu",
    "experts in memory": "offload",
    "whole in memory": "cpu",
    "from the drive": "stream",
}


def left_out(runs: Sequence[Run], kind: Kind) -> list[Forecast]:
    """Forecast each run by what runs of the other groups say of its kind, and nothing else does.

    That is the cost of a layer where all is in VRAM, else the share of the memory's bandwidth, by
    whether it was measured; for streaming the share of the drive's. Each is chosen so that of the
    others as many are faster than their forecast as are slower.
    """
    alike = [one for run in runs if run.kind == kind and (one := forecast(run)) is not None]
    found = []
    for one in alike:
        others = [it for it in alike if it.run.machine_group != one.run.machine_group]
        others = [it for it in others if _is_measured(it.run) == _is_measured(one.run)] or others
        with pytest.MonkeyPatch.context() as patch:
            _scale(patch, one, _fitted(others, kind))
            scaled = forecast(one.run)
        assert scaled is not None
        found.append(scaled)
    return found


def _is_measured(run: Run) -> bool:
    memory = run.machine.memory_bandwidth
    return memory is not None and memory.basis == "measured"


def _scale(patch: pytest.MonkeyPatch, one: Forecast, times: float) -> None:
    """Take what is assumed of a run to be `times` as slow."""
    kind, is_measured = one.facts.kind, _is_measured(one.run)
    if kind == "gpu":
        seconds, doubt = rates._LAYER_SECONDS[kind]
        patch.setitem(rates._LAYER_SECONDS, kind, (seconds * times, doubt))
        return
    key: Any = False if one.run.kind == "stream" else (kind, is_measured)
    table: Any = rates._DRIVE if one.run.kind == "stream" else rates._MEMORY
    patch.setitem(table, key, table[key]._replace(share=table[key].share / times))


def _fitted(forecasts: Sequence[Forecast], kind: Kind) -> float:
    """Return how many times as slow one term has to be for the median of the errors to be least."""
    name = {"gpu": "layers", "stream": "drive"}.get(kind, "memory")

    def median(times: float) -> float:
        logs = []
        for one in forecasts:
            terms = {term.name: term.seconds or 0.0 for term in one.facts.terms}
            seconds = sum(terms.values()) + (times - 1) * terms.get(name, 0.0)
            logs.append(math.log(one.run.speed * seconds))
        return abs(float(np.median(logs))) if logs else 0.0

    return min((float(times) for times in np.geomspace(0.2, 5, 65)), key=median)


def row(name: str, forecasts: Sequence[Forecast]) -> str:
    """Write the errors of some forecasts, as a row of a table in Markdown."""
    if not forecasts:
        return f"| {name} | 0 | – | – | – | – | – |"
    errors = np.abs([one.error for one in forecasts])
    held = sum(one.is_held for one in forecasts)
    width = np.median([one.highest / one.lowest for one in forecasts]) ** 0.5
    cells = [
        str(len(forecasts)),
        *(f"{value:.1%}" for value in (np.median(errors), np.percentile(errors, 90), max(errors))),
        f"{held} of {len(forecasts)}",
        f"×/÷ {width:.2f}",
    ]
    return f"| {name} | {' | '.join(cells)} |"


HEADING = (
    "| evidence | forecasts | median | p90 | worst | held by the range | range, median |",
    "| --- | --- | --- | --- | --- | --- | --- |",
)
