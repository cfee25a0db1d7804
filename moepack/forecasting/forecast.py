"""Forecasts: how fast a model decodes on a machine, in one way of running it or in many."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from moepack.errors import RequestError
from moepack.forecasting.cache_misses import CacheMisses
from moepack.forecasting.calibration import DOUBTS, Calibration, calibrate, check_model
from moepack.forecasting.facts import ForecastFacts, ReceiptFacts, SpeedFacts, TermFacts
from moepack.forecasting.misses import (
    Misses,
    WorkingSet,
)
from moepack.forecasting.next_receipt import next_receipt
from moepack.forecasting.prompts import forecast_prompt
from moepack.forecasting.rates import READ_DEPTH, Rates, ceiling_seconds
from moepack.forecasting.reads import KIND_WORDS, Kind, Reads
from moepack.forecasting.receipts import Receipt, read_receipts
from moepack.forecasting.touched import Touched, touched_of
from moepack.forecasting.warnings import warnings_of
from moepack.forecasting.ways import Model, Way
from moepack.machine.file import read_machine
from moepack.machine.model import Figure, Machine
from moepack.paths import AnyPath, PathOrPaths, path_texts
from moepack.sizes import Size, parse_size, rate_text, size_text

_BUDGET_COUNT = 12
_NO_CACHE = (
    "nothing is read of the drive here, so what a trace or a working set says was not used: "
    "`budget` asks for a cache"
)
_MEMORIES = {"vram": "VRAM", "memory": "memory", "drive": "drive", "link": "GPU's link"}
_MOST_OF_CEILING = 1.2
"""Figures are that far off without being wrong, and caches of CPUs help a little."""


def forecast(
    paths: PathOrPaths,
    machine: Machine | AnyPath,
    *,
    cpu_layer_count: int | None = None,
    budget: Size | None = None,
    sweep: bool = False,
    dense_in_memory: bool = False,
    traces: PathOrPaths = (),
    working_set: WorkingSet | None = None,
    vram_cache: Size | None = None,
    micro_batch: int | None = None,
    prompt: int = 1000,
    receipts: PathOrPaths = (),
    context: int = 4096,
    depth: int = 0,
) -> ForecastFacts:
    """Forecast how fast a model decodes on a machine, and how long a prompt takes.

    `paths` is a source or a pack, `machine` is one or the path of its file. With `cpu_layer_count`
    the experts of the first so many layers are in memory, the rest in VRAM; with `budget` experts
    come from the drive through a cache of so many bytes (`8GiB`, or `25%` of the experts), the rest
    is in VRAM if it has room, unless `dense_in_memory`; with both the cache is for these layers
    alone. With `vram_cache` a GPU caches so many bytes of the experts that it does not hold for
    good. With `sweep` it is every count of layers if the machine has a GPU and any of them fits,
    else a dozen budgets. By default it is what is fastest of what fits. What a cache misses is
    simulated with `traces`, or follows from `working_set`, else from an even router. Prompts, those
    of traces too, are computed in batches of `micro_batch` tokens, by default of as many as suit
    the way of running; one of `prompt` tokens is forecast. `receipts` are files of runs. `context`
    tokens have room, of which `depth` are there already.

    Raises RequestError for options that are none, for too little memory, for a machine that lacks
    what is asked for, and for receipts that are none or of another model; and what opening the
    model, the machine and the traces raises.
    """
    if depth > context:
        raise RequestError(
            "more tokens than the context has room for",
            argument="depth",
            expected=f"up to {context:,}",
            found=f"{depth:,}",
        )
    traces, receipts = path_texts(traces), path_texts(receipts)
    if traces and working_set is not None:
        raise RequestError("either a trace or a working set says what is missed")
    known = machine if isinstance(machine, Machine) else read_machine(machine)
    model = Model(paths, context, micro_batch)
    model.fit_micro_batches(known)
    whole = model.weights.expert_length
    budget = None if budget is None else parse_size(budget, "budget", whole=whole)
    streams = Way("stream") if dense_in_memory else model.stream(known)
    ways = _ways(model, known, streams, cpu_layer_count, budget, sweep)
    if vram_cache is not None:
        cache_length = parse_size(vram_cache, "vram_cache")
        ways = [_with_cache(way, cache_length) for way in ways]
    found = read_receipts(receipts)
    check_model(found, model.weights, model.path)
    missed = CacheMisses(model, traces, working_set, micro_batch)
    touched = touched_of(model.weights.shape.without_mtp(), traces)
    forecasts = _Forecasts(model, known, found, depth, touched, prompt)
    speeds = tuple(forecasts.speed(way, *missed.of(way, ways)) for way in ways)
    if working_set is not None and all(way.budget is way.vram_cache is None for way in ways):
        speeds = tuple(replace(one, warnings=(*one.warnings, _NO_CACHE)) for one in speeds)
    judged = forecasts.receipts()
    used = [one for one, facts in zip(found, judged, strict=True) if facts.refusal is None]
    weights = model.weights
    return ForecastFacts(
        model=model.path,
        machine=known.name,
        dense_length=weights.dense_length,
        expert_length=weights.expert_length,
        table_length=weights.table_length,
        read_dense_length=weights.read_dense_length,
        read_expert_length=weights.read_expert_length,
        context=context,
        context_length=model.context_length(ways[0].kind),
        forecasts=speeds,
        receipts=judged,
        next_receipt=next_receipt(model, known, ways, used),
    )


def _ways(
    model: Model,
    machine: Machine,
    streams: Way,
    cpu_layer_count: int | None,
    budget: int | None,
    sweep: bool,
) -> list[Way]:
    """Return the ways that are asked for; `streams` is that with experts from the drive.

    Raises RequestError.
    """
    if sweep and (cpu_layer_count is not None or budget is not None):
        raise RequestError("either layers in memory, or a budget, or both, or all of them")
    if cpu_layer_count is not None and not machine.gpus:
        hint = "a [[gpus]] with `length` and `bandwidth` says what there is"
        raise RequestError("the machine has no GPU", argument="cpu_layer_count", hint=hint)
    if budget is not None:
        _check_budget(model, budget)
        if cpu_layer_count is not None and streams.kind == "stream":
            problem = "VRAM has no room for what is no expert's, or is not to be used"
            raise RequestError(problem, argument="cpu_layer_count", found=cpu_layer_count)
        return [streams._replace(budget=budget, cpu_layer_count=cpu_layer_count)]
    if cpu_layer_count is not None:
        return [model.offload(cpu_layer_count)]
    if not sweep:
        return [model.best(machine, streams)]
    offloads = model.offloads()
    if machine.gpus and any(model.needs(way).fit(machine) is not False for way in offloads):
        return offloads
    most = model.weights.expert_length
    least = min(most, model.step_length or most // _BUDGET_COUNT)
    lengths = {int(length) for length in np.geomspace(least, most, _BUDGET_COUNT)}
    streams = streams._replace(cpu_layer_count=None)
    return [streams._replace(budget=length) for length in sorted(lengths)]


def _with_cache(way: Way, length: int) -> Way:
    """Return a way with a cache in VRAM. Raises RequestError where nothing would be cached."""
    if way.kind not in ("offload", "gpu-stream"):
        raise RequestError(
            "a cache in VRAM needs a GPU, and experts that are not there for good",
            argument="vram_cache",
            found=KIND_WORDS[way.kind],
            hint="`cpu_layer_count` says which layers' experts are in memory",
        )
    return way._replace(vram_cache=length)


def _check_budget(model: Model, budget: int) -> None:
    least = max((layer.used_expert_length or 0 for layer in model.layers), default=0)
    if budget < least:
        raise RequestError(
            "the budget holds less than a token uses in a layer",
            argument="budget",
            expected=f"at least {size_text(least)}",
            found=size_text(budget),
        )


def _reason(terms: Sequence[TermFacts]) -> str | None:
    """Return why no speed is known; None where it is."""
    if not terms:
        return "it is not known what a token reads"
    lacking = [_MEMORIES[term.name] for term in terms if term.seconds is None]
    return f"nothing is known of the bandwidth of {' and '.join(lacking)}" if lacking else None


class _Speeds(NamedTuple):
    """Tokens a second."""

    likely: float | None
    lowest: float | None
    highest: float | None
    ceiling: float | None


class _Forecasts:
    """Makes forecasts for one model on one machine, and keeps what became of receipts."""

    def __init__(
        self,
        model: Model,
        machine: Machine,
        receipts: Sequence[Receipt],
        depth: int,
        touched: Touched | None,
        prompt: int,
    ) -> None:
        self._model = model
        self._machine = machine
        self._depth = depth
        self._touched, self._prompt = touched, prompt
        self._seen = [self._with_reads(receipt) for receipt in receipts]
        self._calibrations: dict[Kind, Calibration] = {}

    def speed(self, way: Way, misses: Misses | None, uploads: Misses | None) -> SpeedFacts:
        """Forecast one way; `uploads` are what a cache in VRAM misses."""
        calibration = self._calibration(way.kind)
        lengths = [0.0 if one is None else one.length for one in (misses, uploads)]
        reads = self._model.reads(way, lengths[0], self._depth, lengths[1])
        needs = self._model.needs(way)
        terms: tuple[TermFacts, ...] = ()
        speeds = None
        if reads is not None:
            speeds = self._speeds(calibration.rates, DOUBTS[way.kind], reads, misses, uploads)
            terms = tuple(self._terms(calibration.rates, reads))
        binding = None
        if speeds is not None and speeds.likely is not None:
            binding = max(terms, key=lambda term: term.seconds or 0.0).name
        return SpeedFacts(
            kind=way.kind,
            cpu_layer_count=way.cpu_layer_count,
            budget_length=way.budget,
            tokens_per_second=None if speeds is None else speeds.likely,
            lowest=None if speeds is None else speeds.lowest,
            highest=None if speeds is None else speeds.highest,
            ceiling=None if speeds is None else speeds.ceiling,
            reason=_reason(terms),
            hit_rate=None if misses is None else misses.hit_rate,
            missed_length=None if misses is None else round(misses.length),
            misses_from=None if misses is None else misses.source,
            binding=binding,
            terms=terms,
            receipt_count=calibration.used_count,
            vram_length=needs.vram,
            memory_length=needs.memory,
            fits=needs.fit(self._machine),
            vram_cache_length=way.vram_cache,
            vram_hit_rate=None if uploads is None else uploads.hit_rate,
            uploaded_length=None if uploads is None else round(uploads.length),
            prompt=forecast_prompt(
                *(self._model, self._machine, way, calibration.rates),
                *(self._touched, self._prompt),
                [receipt for receipt, _ in self._seen],
            ),
            warnings=tuple(warnings_of(self._model, self._machine, way, needs, misses)),
        )

    def _speeds(
        self,
        rates: Rates,
        doubt: float,
        reads: Reads,
        misses: Misses | None,
        uploads: Misses | None,
    ) -> _Speeds:
        """Return the speeds with what is likely to be missed, with the most and with the least."""
        length, machine = self._model.read_length, self._machine
        least, most = reads, reads
        if misses is not None:
            least, most = (reads._replace(drive=missed) for missed in (misses.least, misses.most))
        if uploads is not None:
            least, most = least._replace(link=uploads.least), most._replace(link=uploads.most)
        ceilings = [ceiling_seconds(machine, one, length) for one in (reads, most, least)]
        likely, low, high = (
            rates.estimate(one, doubt, ceiling or 0.0)
            for one, ceiling in zip((reads, most, least), ceilings, strict=True)
        )
        ceiling = 1 / ceilings[2] if ceilings[2] else None
        if likely is None or low is None or high is None:
            return _Speeds(None, None, None, ceiling)
        highest = high.factor / high.seconds
        return _Speeds(
            1 / likely.seconds,
            1 / (low.seconds * low.factor),
            highest if ceiling is None else min(highest, ceiling),
            ceiling,
        )

    def receipts(self) -> tuple[ReceiptFacts, ...]:
        """Say of each receipt whether it calibrated any of the forecasts, and why not."""
        facts = []
        for number, (receipt, _) in enumerate(self._seen):
            judged = [one.judged[number].refusal for one in self._calibrations.values()]
            refusal = None if None in judged else next(iter(judged), None)
            facts.append(
                ReceiptFacts(
                    *(receipt.path, receipt.place, receipt.kind, receipt.tokens_per_second),
                    refusal,
                    receipt.fields,
                )
            )
        return tuple(facts)

    def _calibration(self, kind: Kind) -> Calibration:
        if kind not in self._calibrations:
            model = self._model
            rates = Rates.of(self._machine, kind, model.read_length)
            self._calibrations[kind] = calibrate(rates, kind, self._seen, model.layer_count)
        return self._calibrations[kind]

    def _with_reads(self, receipt: Receipt) -> tuple[Receipt, Reads | None]:
        """Return a receipt with what its run read; no run is faster than its bandwidths."""
        reads = self._model.read_by(receipt)
        if reads is None:
            return receipt, None
        least = ceiling_seconds(self._machine, reads, self._model.read_length)
        if least and receipt.tokens_per_second * least > _MOST_OF_CEILING and not receipt.flaw:
            most = f"at most {rate_text(1 / least)} tok/s"
            flaw = (
                f"the machine's bandwidths allow {most}: one of them is wrong, or it ran elsewhere"
            )
            receipt = receipt._replace(flaw=flaw)
        return receipt, reads

    def _terms(self, rates: Rates, reads: Reads) -> list[TermFacts]:
        seconds = rates.terms(reads)
        machine = self._machine
        drive = machine.drive
        figures: list[tuple[str, float, Figure | None]] = [
            ("vram", reads.vram, machine.vram_bandwidth),
            ("memory", reads.memory, machine.memory_bandwidth),
            ("drive", reads.drive, drive and drive.speed(self._model.read_length, READ_DEPTH)),
            ("link", reads.link, machine.link),
        ]
        facts = [TermFacts("layers", None, reads.layer_count, None, None, None, seconds[0])]
        for (name, length, figure), taken in zip(figures, seconds[1:], strict=True):
            if length:
                facts.append(
                    TermFacts(
                        name,
                        round(length),
                        None,
                        None if figure is None else figure.value,
                        None if figure is None else figure.basis,
                        length / taken if taken else None,
                        taken,
                    )
                )
        return facts
