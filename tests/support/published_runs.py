"""Published runs of engines, to hold forecasts against.

They are read from a file of JSON lines, one for each run, with what is known of it: the bytes that
a token of the model reads, the machine's bandwidths in GB/s, and the tokens a second. The file is
not part of the project: its rows are others' work.
"""

import itertools
import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from moepack.forecasting.calibration import DOUBTS, calibrate
from moepack.forecasting.rates import Rates, ceiling_seconds
from moepack.forecasting.reads import Kind, Reads
from moepack.forecasting.receipts import Receipt
from moepack.machine.model import Basis, Drive, Figure, Gpu, Machine
from tests.support.machines import GB

_KINDS: dict[str, Kind] = {
    "full_gpu": "gpu",
    "ncmoe": "offload",
    "cpu": "cpu",
    "ssd": "stream",
}
_STOCK = ("llama.cpp", "ik_llama.cpp", "ktransformers")
_READ_LENGTH = 4 << 20
_LPDDR5X = 68.3
"""GB/s of the phones whose memory is only named: 64 bits of 8,533 MT/s."""
_ALL_LAYERS = 1
_STREAM_RECEIPT_DOUBT = 0.2
"""By what share a published run of a streaming engine differs from the same one, done again: phones
grow hot, and what they read was often not counted in the run that was timed."""


class Run(NamedTuple):
    """A published run: how, on which machine, what a token read, and how fast it was.

    `machine_group` is the same for runs of one author on one machine; `sweep` for those that differ
    in nothing but what is in memory, or in the cache. `computing` is the seconds of a token that
    were not spent waiting for the drive, where that was measured.
    """

    number: int
    kind: Kind
    machine_group: str
    sweep: tuple[str, ...]
    machine: Machine
    reads: Reads
    speed: float
    computing: float | None


class Forecast(NamedTuple):
    """What is forecast of a run."""

    run: Run
    speed: float
    lowest: float
    highest: float

    @property
    def error(self) -> float:
        """The measured speed over the forecast one, less 1."""
        return self.run.speed / self.speed - 1

    @property
    def is_held(self) -> bool:
        """Whether the range holds what was measured."""
        return self.lowest <= self.run.speed <= self.highest


RatesOf = Callable[[Run], Rates]
"""What is known of reading before there is a receipt of a run's machine."""


def plain_rates(run: Run) -> Rates:
    """Return the rates that moepack takes."""
    return Rates.of(run.machine, run.kind, _READ_LENGTH)


def read_runs(path: str | Path) -> list[Run]:
    """Read the runs of stock engines, and of those that stream experts from a drive.

    Those are left out of which too little is known to say what a token read; so are forks that
    change how a model whole in VRAM, or with experts in memory, is computed.
    """
    rows = map(json.loads, Path(path).read_text().splitlines())
    return [run for row in rows if (run := _run(row)) is not None]


def _run(row: dict[str, Any]) -> Run | None:
    kind = _KINDS.get(row["cls"])
    if kind is None or not row.get("moe_layers") or not row.get("expert_bytes_per_token"):
        return None
    if kind != "stream" and row["engine"] not in _STOCK:
        return None
    reads = _reads(row, kind)
    if reads is None:
        return None
    settings = ("quant", "config") if kind != "stream" else ()
    return Run(
        row["id"],
        kind,
        row["group"],
        tuple(str(row[key]) for key in ("group", "model", "gpu", *settings)),
        _machine(row, kind),
        reads,
        row["tok_s"],
        row.get("compute_s_per_tok"),
    )


def _machine(row: dict[str, Any], kind: Kind) -> Machine:
    def figure(key: str, basis: Basis = "typed") -> Figure | None:
        return Figure(row[key] * GB, basis) if row.get(key) else None

    vram, drive = figure("vram_gbps"), figure("ssd_gbps")
    memory = figure("ram_gbps_measured", "measured") or figure("ram_gbps_theory")
    if memory is None and kind == "stream" and "LPDDR5X" in row.get("ram", ""):
        memory = Figure(_LPDDR5X * GB, "typed")
    room = Figure(100 * GB, "typed")
    gpus = (Gpu(row["gpu"], room, vram),) if vram else ()
    return Machine(row["group"], room, memory, gpus, Drive(None, drive) if drive else None)


def _reads(row: dict[str, Any], kind: Kind) -> Reads | None:
    count, experts, dense = (
        row[key] for key in ("moe_layers", "expert_bytes_per_token", "dense_bytes_per_token")
    )
    if kind in ("gpu", "offload"):
        kept = experts * min(1, (row["n_cpu_moe"] or 0) / count)
        return Reads(count, vram=dense + experts - kept, memory=kept)
    if kind == "cpu":
        return Reads(count, memory=dense + experts)
    missed = row["miss_bytes_per_token"]
    if missed is None and row["hit"] is not None:
        missed = experts * (1 - row["hit"])
    if missed is None:
        return None
    if row["vram_gbps"] and not row["ram_gbps_theory"]:
        return Reads(count, vram=dense + experts, drive=missed)  # one memory for both
    if row["vram_gbps"]:
        return Reads(count, vram=dense, memory=experts, drive=missed)
    return Reads(count, memory=dense + experts, drive=missed)


def forecast(
    run: Run, receipts: Sequence[Run] = (), rates_of: RatesOf = plain_rates
) -> Forecast | None:
    """Forecast a run from others of its machine; None where too little is known."""
    rates, doubt = rates_of(run), DOUBTS[run.kind]
    if run.kind == "stream":
        for one in receipts:
            rates = _learned(rates, one)
    else:
        seen = [(_receipt(one), one.reads) for one in receipts]
        rates, judged, doubt = calibrate(rates, run.kind, seen, _ALL_LAYERS)
        assert all(one.refusal is None for one in judged)
    ceiling = ceiling_seconds(run.machine, run.reads, _READ_LENGTH) or 0.0
    found = rates.estimate(run.reads, doubt, ceiling)
    if found is None:
        return None
    speed = 1 / found.seconds
    highest = speed * found.factor
    return Forecast(
        run, speed, speed / found.factor, min(highest, 1 / ceiling) if ceiling else highest
    )


def _receipt(run: Run) -> Receipt:
    return Receipt(run.machine_group, str(run.number), run.kind, 1, run.speed, 0.0)


def _learned(rates: Rates, run: Run) -> Rates:
    """Learn from a run of another streaming engine than ours, as from ours but with more doubt."""
    seconds = 1 / run.speed
    if run.computing:
        computing = min(seconds, run.computing)
        rates = rates.learned(run.reads._replace(drive=0.0), computing, _STREAM_RECEIPT_DOUBT)
    return rates.learned(run.reads, seconds, _STREAM_RECEIPT_DOUBT)


def sweeps(runs: Iterable[Run]) -> Iterator[list[Run]]:
    """Yield runs that differ in nothing but what is in memory, those with the least first."""
    found: dict[tuple[str, ...], list[Run]] = defaultdict(list)
    for run in runs:
        found[run.sweep].append(run)
    for sweep in found.values():
        yield sorted(sweep, key=lambda run: (run.reads.memory, run.reads.drive))


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
        and pair[0].reads.memory != pair[1].reads.memory
    ]
    streams = [run for run in runs if run.kind == "stream"]
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
    alike = [run for run in runs if run.kind == kind]
    found = []
    for run in alike:
        others = [one for one in alike if one.machine_group != run.machine_group]
        others = [one for one in others if _figures(one) == _figures(run)] or others
        place = {"gpu": 0, "stream": 3}.get(kind, 2)
        one = forecast(run, rates_of=partial(scaled, place=place, scale=_fitted(others, place)))
        if one is not None:
            found.append(one)
    return found


def _figures(run: Run) -> bool:
    memory = run.machine.memory_bandwidth
    return memory is not None and memory.basis == "measured"


def scaled(run: Run, place: int, scale: float) -> Rates:
    """Return the rates that moepack takes, with one of the four made `scale` times as slow."""
    rates = plain_rates(run)
    units = rates._units.copy()
    units[place] *= scale
    return Rates(units, rates._factors, rates._covariance, rates._is_known)


def _fitted(runs: Sequence[Run], place: int) -> float:
    """Return the scale with which the median of the errors is least."""

    def median(scale: float) -> float:
        rates_of = partial(scaled, place=place, scale=scale)
        found = (forecast(run, rates_of=rates_of) for run in runs)
        logs = [math.log(1 + one.error) for one in found if one is not None]
        return abs(float(np.median(logs))) if logs else 0.0

    return min((float(scale) for scale in np.geomspace(0.2, 5, 65)), key=median)


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
