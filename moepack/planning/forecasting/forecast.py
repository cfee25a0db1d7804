"""Forecasts: the speed of a model on a machine, in one execution mode or in many."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from moepack.common.errors import RequestError
from moepack.common.paths import AnyPath
from moepack.common.sizes import Size, parse_size, rate_text, size_text
from moepack.pack.opening.open_model import Model
from moepack.planning.footprint.model import Footprint, footprint_of
from moepack.planning.forecasting.calibration import (
    RUN_REL_STD,
    calibrate,
    check_model,
    next_receipt,
)
from moepack.planning.forecasting.facts import ForecastFacts, ReceiptFacts, SpeedFacts, TermFacts
from moepack.planning.forecasting.measured_runs import AnyReceipts, MeasuredRun, read_runs
from moepack.planning.forecasting.misses import Misses, WorkingSet, cache_misses
from moepack.planning.forecasting.modes import ExecutionMode, ModelOnMachine
from moepack.planning.forecasting.prompts import forecast_prompt
from moepack.planning.forecasting.rates import Rates, ceiling_seconds
from moepack.planning.forecasting.reads import KIND_WORDS, Kind, Reads
from moepack.planning.forecasting.touched import Touched, touched_of
from moepack.planning.forecasting.warnings import warnings_of
from moepack.planning.machine.file import read_machine
from moepack.planning.machine.model import Machine
from moepack.traces.formats.reading import spooled
from moepack.traces.formats.registry import AnyTrace, ReadOptions

_BUDGET_COUNT = 12
_NO_CACHE = (
    "nothing is read from the drive here, so the working set was not used: `budget` asks for a "
    "cache"
)
_MEMORIES = {"vram": "VRAM", "memory": "memory", "drive": "drive", "link": "GPU's link"}
_MOST_OF_CEILING = 1.2
"""Figures are that far off without being wrong, and caches of CPUs help a little."""


def forecast(
    model: Model | Footprint,
    machine: Machine | AnyPath,
    *,
    cpu_layer_count: int | None = None,
    budget: Size | None = None,
    sweep: bool = False,
    dense_in_memory: bool = False,
    traces: AnyTrace = (),
    working_set: WorkingSet | None = None,
    vram_cache: Size | None = None,
    micro_batch: int | None = None,
    prompt: int = 1000,
    receipts: AnyReceipts = (),
    context: int = 4096,
    depth: int = 0,
) -> ForecastFacts:
    """Forecast the decoding speed of a model on a machine, and the time of a prompt.

    `model` is a source or a pack, open or not, `machine` is one or the path of its file. With
    `cpu_layer_count` the experts of this number of layers, from the first, are in memory, the rest
    in VRAM; with `budget` experts come from the drive through a cache of this size (bytes, `8GiB`,
    or `25%` of the experts), and the rest is in VRAM if it fits, unless `dense_in_memory`; with
    both the cache is only for these layers. With `vram_cache` a GPU caches this many bytes of the
    experts that are not permanently there. With `sweep` every count of layers is forecast if the
    machine has a GPU and any of them fits, else a dozen budgets. By default it is the fastest mode
    that fits. Cache misses are simulated with `traces` (files, or what `read_trace` returned), or
    follow from `working_set`, else from a uniform router. Prompts, those of traces too, are
    computed in batches of `micro_batch` tokens, by default of as many as suit the mode; one of
    `prompt` tokens is forecast. `receipts` are files of measured runs. The context is `context`
    tokens long, of which `depth` are there already.

    Raises RequestError for invalid options, for too little memory, for a machine that lacks a
    needed part, and for invalid receipts and those of another model; and what opening the model,
    the machine and the traces raises.
    """
    if depth > context:
        raise RequestError(
            "more tokens than the context holds",
            argument="depth",
            expected=f"up to {context:,}",
            found=f"{depth:,}",
        )
    if traces and working_set is not None:
        raise RequestError("give either traces or a working set")
    machine = machine if isinstance(machine, Machine) else read_machine(machine)
    placed = ModelOnMachine(footprint_of(model), machine, context, micro_batch)
    weights = placed.weights
    budget = None if budget is None else parse_size(budget, "budget", whole=weights.expert_length)
    streams = ExecutionMode("stream") if dense_in_memory else placed.stream()
    modes = _modes(placed, streams, cpu_layer_count, budget, sweep)
    if vram_cache is not None:
        cache_length = parse_size(vram_cache, "vram_cache")
        modes = [_with_cache(mode, cache_length) for mode in modes]
    runs = read_runs(receipts)
    check_model(runs, placed.footprint)
    with spooled(traces, ReadOptions(shape=weights.shape)) as trace:
        misses = cache_misses(placed, modes, trace, working_set, micro_batch)
        touched = touched_of(weights.shape.without_mtp(), trace)
    forecasts = _Forecasts(placed, runs, depth)
    speeds = tuple(
        forecasts.speed(mode, *missed, touched, prompt)
        for mode, missed in zip(modes, misses, strict=True)
    )
    if working_set is not None and all(mode.budget is mode.vram_cache is None for mode in modes):
        speeds = tuple(replace(one, warnings=(*one.warnings, _NO_CACHE)) for one in speeds)
    receipt_facts = forecasts.receipts()
    used = [run for run, one in zip(runs, receipt_facts, strict=True) if one.refusal is None]
    return ForecastFacts(
        model=placed.footprint.path,
        machine=machine.name,
        dense_length=weights.dense_length,
        expert_length=weights.expert_length,
        table_length=weights.table_length,
        read_dense_length=weights.read_dense_length,
        read_expert_length=weights.read_expert_length,
        context=context,
        context_length=placed.context_lengths[modes[0].kind],
        forecasts=speeds,
        receipts=receipt_facts,
        next_receipt=next_receipt(placed, modes, used),
    )


def _modes(
    model: ModelOnMachine,
    streams: ExecutionMode,
    cpu_layer_count: int | None,
    budget: int | None,
    sweep: bool,
) -> list[ExecutionMode]:
    """Return the requested modes; `streams` is the one with experts from the drive.

    Raises RequestError.
    """
    if sweep and (cpu_layer_count is not None or budget is not None):
        raise RequestError("either layers in memory, or a budget, or both, or all of them")
    if cpu_layer_count is not None and not model.machine.gpus:
        hint = "a [[gpus]] with `length` and `bandwidth` says what there is"
        raise RequestError("the machine has no GPU", argument="cpu_layer_count", hint=hint)
    if budget is not None:
        least = max((layer.used_expert_length or 0 for layer in model.layers), default=0)
        if budget < least:
            raise RequestError(
                "the budget is less than one token's experts in a layer",
                argument="budget",
                expected=f"at least {size_text(least)}",
                found=size_text(budget),
            )
        if cpu_layer_count is not None and streams.kind == "stream":
            problem = "dense weights do not fit into VRAM, or are not to use it"
            raise RequestError(problem, argument="cpu_layer_count", found=cpu_layer_count)
        return [streams._replace(budget=budget, cpu_layer_count=cpu_layer_count)]
    if cpu_layer_count is not None:
        return [model.offload(cpu_layer_count)]
    if not sweep:
        return [model.best(streams)]
    offloads = model.offloads()
    if model.machine.gpus and any(model.fits(mode) is not False for mode in offloads):
        return offloads
    most = model.weights.expert_length
    least = min(most, model.step_length or most // _BUDGET_COUNT)
    lengths = {int(length) for length in np.geomspace(least, most, _BUDGET_COUNT)}
    return [streams._replace(cpu_layer_count=None, budget=length) for length in sorted(lengths)]


def _with_cache(mode: ExecutionMode, length: int) -> ExecutionMode:
    """Return a mode with a cache in VRAM. Raises RequestError if nothing would be cached."""
    if mode.kind not in ("offload", "gpu-stream"):
        raise RequestError(
            "a cache in VRAM needs a GPU, and experts that are not permanently there",
            argument="vram_cache",
            found=KIND_WORDS[mode.kind],
            hint="`cpu_layer_count` says which layers' experts are in memory",
        )
    return mode._replace(vram_cache=length)


class _Forecasts:
    """Makes forecasts for one model on one machine, and records which runs calibrate them."""

    def __init__(self, model: ModelOnMachine, runs: Sequence[MeasuredRun], depth: int) -> None:
        self._model, self._depth = model, depth
        self._runs = [self._with_reads(run) for run in runs]
        self._calibrations: dict[Kind, tuple[Rates, list[str | None]]] = {}

    def _with_reads(self, run: MeasuredRun) -> tuple[MeasuredRun, Reads | None]:
        """Return a run with its reads; no run is faster than its bandwidths."""
        reads = self._model.read_by(run)
        if reads is None:
            return run, None
        least = ceiling_seconds(self._model.machine, reads, self._model.drive)
        if least and run.tokens_per_second * least > _MOST_OF_CEILING and not run.exclusion:
            most = f"at most {rate_text(1 / least)} tok/s"
            run = run._replace(
                exclusion=f"the machine's bandwidths allow {most}: one of them is wrong, or it ran "
                "elsewhere"
            )
        return run, reads

    def speed(
        self,
        mode: ExecutionMode,
        misses: Misses | None,
        uploads: Misses | None,
        touched: Touched | None,
        prompt: int,
    ) -> SpeedFacts:
        """Forecast one mode; `uploads` are the misses of a cache in VRAM."""
        model = self._model
        if mode.kind not in self._calibrations:
            guess = Rates.from_machine(model.machine, mode.kind, model.drive)
            count = model.weights.block_count or len(model.weights.layers)
            self._calibrations[mode.kind] = calibrate(guess, mode.kind, self._runs, count)
        rates, refusals = self._calibrations[mode.kind]
        missed, uploaded = (0.0 if one is None else one.length for one in (misses, uploads))
        reads = model.reads(mode, missed, self._depth, uploaded)
        terms = () if reads is None else tuple(self._terms(rates, reads))
        likely = lowest = highest = ceiling = binding = None
        if reads is not None:
            likely, lowest, highest, ceiling = self._speeds(mode, rates, reads, misses, uploads)
        reason = None if terms else "the bytes that a token reads are unknown"
        unknown = [_MEMORIES[term.name] for term in terms if term.seconds is None]
        if unknown:
            reason = f"unknown: the bandwidth of {' and '.join(unknown)}"
        if likely is not None:
            binding = max(terms, key=lambda term: term.seconds or 0.0).name
        vram_length, memory_length = model.needs(mode) or (None, None)
        runs = [run for run, _ in self._runs]
        return SpeedFacts(
            kind=mode.kind,
            cpu_layer_count=mode.cpu_layer_count,
            budget_length=mode.budget,
            tokens_per_second=likely,
            lowest=lowest,
            highest=highest,
            ceiling=ceiling,
            reason=reason,
            hit_rate=None if misses is None else misses.hit_rate,
            missed_length=None if misses is None else round(misses.length),
            misses_from=None if misses is None else misses.source,
            binding=binding,
            terms=terms,
            receipt_count=refusals.count(None),
            vram_length=vram_length,
            memory_length=memory_length,
            fits=model.fits(mode),
            vram_cache_length=mode.vram_cache,
            vram_hit_rate=None if uploads is None else uploads.hit_rate,
            uploaded_length=None if uploads is None else round(uploads.length),
            prompt=forecast_prompt(model, mode, rates, touched=touched, count=prompt, runs=runs),
            warnings=tuple(warnings_of(model, mode, misses)),
        )

    def _speeds(
        self,
        mode: ExecutionMode,
        rates: Rates,
        reads: Reads,
        misses: Misses | None,
        uploads: Misses | None,
    ) -> tuple[float | None, float | None, float | None, float | None]:
        """Return the likely, lowest and highest tokens a second, and their ceiling."""
        least, most = reads, reads
        if misses is not None:
            least, most = (reads._replace(drive=missed) for missed in (misses.least, misses.most))
        if uploads is not None:
            least, most = least._replace(link=uploads.least), most._replace(link=uploads.most)
        model = self._model
        ceilings = [
            ceiling_seconds(model.machine, one, model.drive) for one in (reads, most, least)
        ]
        likely, low, high = (
            rates.estimate(one, RUN_REL_STD[mode.kind], seconds or 0.0)
            for one, seconds in zip((reads, most, least), ceilings, strict=True)
        )
        ceiling = 1 / ceilings[2] if ceilings[2] else None
        if likely is None or low is None or high is None:
            return None, None, None, ceiling
        highest = high.factor / high.seconds
        if ceiling is not None:
            highest = min(highest, ceiling)
        return 1 / likely.seconds, 1 / (low.seconds * low.factor), highest, ceiling

    def receipts(self) -> tuple[ReceiptFacts, ...]:
        """Return for each run whether it calibrates any of the forecasts, and why not."""
        facts = []
        for number, (run, _) in enumerate(self._runs):
            refusals = [each[number] for _, each in self._calibrations.values()]
            refusal = None if None in refusals else next(iter(refusals), None)
            facts.append(
                ReceiptFacts(
                    path=run.path,
                    place=run.place,
                    kind=run.kind,
                    tokens_per_second=run.tokens_per_second,
                    refusal=refusal,
                    fields=run.fields,
                )
            )
        return tuple(facts)

    def _terms(self, rates: Rates, reads: Reads) -> Iterator[TermFacts]:
        layer_seconds, *terms = rates.terms(reads)
        machine = self._model.machine
        memories = machine.vram_bandwidth, machine.memory_bandwidth
        figures = (*memories, self._model.drive, machine.link)
        yield TermFacts("layers", None, reads.layer_count, None, None, None, layer_seconds)
        for name, length, figure, seconds in zip(_MEMORIES, reads[1:], figures, terms, strict=True):
            if length:
                yield TermFacts(
                    name=name,
                    length=round(length),
                    count=None,
                    bandwidth=None if figure is None else figure.value,
                    basis=None if figure is None else figure.basis,
                    reached=length / seconds if seconds else None,
                    seconds=seconds,
                )
