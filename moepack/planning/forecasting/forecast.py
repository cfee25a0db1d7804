"""Forecasts: the speed of a model on a machine, in one execution mode or in many."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from moepack.common.errors import RequestError
from moepack.common.sizes import Size, parse_size, size_text
from moepack.pack.opening.open_model import Model
from moepack.planning.footprint.model import Footprint, footprint_of
from moepack.planning.forecasting.calibration import (
    STEADY,
    RunReads,
    calibrate,
    check_runs,
    next_receipt,
    unsteadiness,
)
from moepack.planning.forecasting.facts import (
    ForecastFacts,
    PromptFacts,
    ReceiptFacts,
    SpeedFacts,
    TermFacts,
)
from moepack.planning.forecasting.measured_runs import AnyReceipts, read_runs
from moepack.planning.forecasting.misses import Misses, cache_misses
from moepack.planning.forecasting.modes import ExecutionMode, ModelOnMachine
from moepack.planning.forecasting.prompts import forecast_prompt
from moepack.planning.forecasting.rates import (
    KIND_WORDS,
    STREAMS,
    Rates,
    Reads,
    ceiling_seconds,
    together,
)
from moepack.planning.forecasting.touched import Touched, touched_of
from moepack.planning.machine.described import AnyMachine, find_machine
from moepack.traces.formats.reading import AnyTrace, spooled
from moepack.traces.formats.registry import ReadOptions

_BUDGET_COUNT = 12
_NEARLY = 0.9
_ALIKE = 0.1
_MEMORIES = {"vram": "VRAM", "memory": "memory", "drive": "drive", "link": "GPU's link"}


def forecast(
    model: Model | Footprint,
    machine: AnyMachine,
    *,
    cpu_layer_count: int | None = None,
    budget: Size | None = None,
    sweep: bool = False,
    dense_in_memory: bool = False,
    traces: AnyTrace = (),
    vram_cache: Size | None = None,
    micro_batch: int | None = None,
    prompt: int = 1000,
    receipts: AnyReceipts = (),
    context: int = 4096,
    depth: int = 0,
    texts: int = 1,
) -> ForecastFacts:
    """Forecast the decoding speed of a model on a machine, and the time of a prompt.

    `model` is a source or a pack, open or not, `machine` is one, its file, or `preset:NAME`. With
    `cpu_layer_count` the experts of this number of layers, from the first, are in memory, the rest
    in VRAM; with `budget` experts come from the drive through a cache of this size (bytes, `8GiB`,
    or `25%` of the experts), and the rest is in VRAM if it fits, unless `dense_in_memory`; with
    both the cache is only for these layers. With `vram_cache` a GPU caches this many bytes of the
    experts that are not permanently there. With `sweep` every count of layers is forecast if the
    machine has a GPU and any of them fits, else a dozen budgets. By default it is the fastest mode
    that fits. Cache misses are simulated with `traces` (files, or what `read_trace` returned), or
    follow a curve of a real model. Prompts, those of traces too, are computed in batches of
    `micro_batch` tokens, by default of as many as suit the mode; one of `prompt` tokens is
    forecast. `receipts` are files of measured runs. The context is `context` tokens long, of which
    `depth` are there already. Of several `texts` at once it is the speed of all together.

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
    if texts < 1:
        raise RequestError("no text", argument="texts", expected="1 or more", found=texts)
    machine = find_machine(machine)
    placed = ModelOnMachine(footprint_of(model), machine, context, micro_batch, texts)
    weights = placed.weights
    budget = None if budget is None else parse_size(budget, "budget", whole=weights.expert_length)
    streams = ExecutionMode("stream") if dense_in_memory else placed.stream()
    modes = _modes(placed, streams, cpu_layer_count, budget, sweep)
    if vram_cache is not None:
        cache_length = parse_size(vram_cache, "vram_cache")
        modes = [_with_cache(mode, cache_length) for mode in modes]
    runs = check_runs(placed, read_runs(receipts))
    with spooled(traces, ReadOptions(shape=weights.shape)) as trace:
        misses = cache_misses(placed, modes, trace, micro_batch)
        touched = touched_of(weights.shape.without_mtp(), trace)
    speeds, refusals = _speeds_of_modes(placed, modes, misses, touched, runs, depth, prompt)
    measured = [run for run, _ in runs]
    used = [run for run, refusal in zip(measured, refusals, strict=True) if refusal is None]
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
        text_count=texts,
        forecasts=tuple(speeds),
        receipts=tuple(
            ReceiptFacts(run.path, run.place, run.kind, run.tokens_per_second, refusal, run.fields)
            for run, refusal in zip(measured, refusals, strict=True)
        ),
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


def _speeds_of_modes(
    model: ModelOnMachine,
    modes: Sequence[ExecutionMode],
    misses: Sequence[tuple[Misses | None, Misses | None]],
    touched: Touched | None,
    runs: Sequence[RunReads],
    depth: int,
    prompt: int,
) -> tuple[list[SpeedFacts], list[str | None]]:
    """Forecast each mode; return for each run the reason why none of them uses it, too."""
    kinds = dict.fromkeys(mode.kind for mode in modes)
    calibrations = {kind: calibrate(model, kind, runs) for kind in kinds}
    measured = [run for run, _ in runs]
    speeds = []
    for mode, missed in zip(modes, misses, strict=True):
        calibration = calibrations[mode.kind]
        facts = forecast_prompt(model, mode, calibration[0], touched, prompt, measured)
        speeds.append(_speed(model, mode, calibration, depth, missed, facts))
    each = zip(*(refusals for _, refusals in calibrations.values()), strict=True)
    return speeds, [None if None in reasons else reasons[0] for reasons in each]


def _speed(
    model: ModelOnMachine,
    mode: ExecutionMode,
    calibration: tuple[Rates, list[str | None]],
    depth: int,
    missed: tuple[Misses | None, Misses | None],
    prompt: PromptFacts,
) -> SpeedFacts:
    """Forecast one mode; the second misses are those of a cache in VRAM."""
    (rates, refusals), (misses, uploads) = calibration, missed
    several = [_reads(model, mode, depth, missed, end) for end in ("length", "most", "least")]
    reads = several[0]
    terms = () if reads is None else tuple(_terms(model, rates, reads))
    likely = lowest = highest = ceiling = binding = None
    if reads is not None:
        likely, lowest, highest, ceiling = _speeds(model, mode, rates, several)
    reason = None if terms else "the bytes that a token reads are unknown"
    unknown = [_MEMORIES[term.name] for term in terms if term.seconds is None]
    if unknown:
        reason = f"unknown: the bandwidth of {' and '.join(unknown)}"
    if likely is not None:
        binding = max(terms, key=lambda term: term.seconds or 0.0).name
    vram_length, memory_length = model.needs(mode) or (None, None)
    kept = model.kept_length(mode)
    resident = kept if mode.budget is None else min(mode.budget, kept)
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
        misses_curve=None if misses is None or misses.curve is None else misses.curve.name,
        binding=binding,
        terms=terms,
        receipt_count=refusals.count(None),
        vram_length=vram_length,
        memory_length=memory_length,
        fits=model.fits(mode),
        vram_expert_length=model.weights.expert_length - kept,
        memory_expert_length=resident,
        streamed_length=kept - resident,
        vram_cache_length=mode.vram_cache,
        vram_hit_rate=None if uploads is None else uploads.hit_rate,
        uploaded_length=None if uploads is None else round(uploads.length),
        prompt=prompt,
        warnings=tuple(_warnings(model, mode, misses)),
    )


def _reads(
    model: ModelOnMachine,
    mode: ExecutionMode,
    depth: int,
    missed: tuple[Misses | None, Misses | None],
    end: str,
) -> Reads | None:
    """Return the reads of a token that misses the `length`, the `most` or the `least`."""
    read, uploaded = (0.0 if one is None else float(getattr(one, end)) for one in missed)
    return model.reads(mode, read, depth, uploaded)


def _speeds(
    model: ModelOnMachine,
    mode: ExecutionMode,
    rates: Rates,
    several: Sequence[Reads | None],
) -> tuple[float | None, float | None, float | None, float | None]:
    """Return the likely, lowest and highest tokens a second, and their ceiling.

    By the likely, the most and the least reads, which are `several`.
    """
    rel_std = unsteadiness(model.drive) if mode.kind in STREAMS else STEADY
    reads = [one for one in several if one is not None]
    bounds = [ceiling_seconds(model.machine, one, model.drive) for one in reads]
    likely, low, high = (
        rates.estimate(one, rel_std, seconds or 0.0)
        for one, seconds in zip(reads, bounds, strict=True)
    )
    count = model.text_count
    ceiling = count / bounds[2] if bounds[2] else None
    if likely is None or low is None or high is None:
        return None, None, None, ceiling
    speed = count / likely.seconds
    # What is missed, and how long that takes, are independent.
    lowest = speed / together(low.seconds / likely.seconds, low.factor)
    highest = speed * together(likely.seconds / high.seconds, high.factor)
    return speed, lowest, min(highest, ceiling or math.inf), ceiling


def _terms(model: ModelOnMachine, rates: Rates, reads: Reads) -> Iterator[TermFacts]:
    layer_seconds, wait_seconds, *terms = rates.terms(reads)
    machine, bandwidth = model.machine, model.drive and model.drive.bandwidth
    figures = machine.vram_bandwidth, machine.memory_bandwidth, bandwidth, machine.link
    yield TermFacts("layers", count=reads.layer_count, seconds=layer_seconds)
    if reads.wait_count:
        yield TermFacts("waits", count=reads.wait_count, seconds=wait_seconds)
    for name, length, figure, seconds in zip(_MEMORIES, reads[2:], figures, terms, strict=True):
        if length:
            yield TermFacts(
                name=name,
                length=round(length),
                bandwidth=None if figure is None else figure.value,
                basis=None if figure is None else figure.basis,
                reached=length / seconds if seconds else None,
                seconds=seconds,
            )


def _warnings(model: ModelOnMachine, mode: ExecutionMode, misses: Misses | None) -> Iterator[str]:
    """Yield the warnings of a forecast."""
    machine, (vram_length, memory_length) = model.machine, model.needs(mode) or (0, 0)
    vram = sum(int(gpu.memory.value) for gpu in machine.gpus)
    if vram_length > vram:
        first = next(filter(model.fits, model.offloads()), None)
        least = (
            f"; `cpu_layer_count={first.cpu_layer_count}` is the least that fits" if first else ""
        )
        yield (
            f"takes {size_text(vram_length)} of {size_text(vram)} of VRAM: where a driver then "
            f"uses memory instead, speed falls to a fraction{least}"
        )
    memory = int(machine.memory.value)
    memory_length += vram_length if machine.is_unified else 0
    # A mapped file needs more memory than its length; a cache takes just its budget.
    is_stream = mode.kind in STREAMS
    if model.fits(mode) is False if is_stream else memory_length > _NEARLY * memory:
        fate = "it is swapped out, or killed"
        if not is_stream:
            fate = "pages of the file will have to be read repeatedly"
        yield (
            f"takes {size_text(memory_length)} of {size_text(memory)} of memory: {fate}, which no "
            "forecast sees"
        )
    slowest, fastest = machine.vram_bandwidth, machine.highest_vram_bandwidth
    if vram_length and slowest and fastest and slowest.value < fastest.value:
        yield (
            "all VRAM is taken to be as slow as that of the slowest GPU, and for the ceiling as "
            "fast as that of the fastest: it is faster the more lies in the fastest"
        )
    if misses is not None:
        yield from _of_misses(model, mode, misses)
        unsteady = machine.drive.unsteady if machine.drive else []
        if unsteady:
            yield (
                f"the drive was up to {max(unsteady):.1f} times as fast in one moment as in "
                "another: it is shared, or throttled"
            )


def _of_misses(model: ModelOnMachine, mode: ExecutionMode, misses: Misses) -> Iterator[str]:
    step = model.step_length
    if mode.budget is not None and mode.budget < (step or 0):
        yield (
            f"the budget is less than the {size_text(step or 0)} that a token uses: "
            "little is found there"
        )
    if misses.curve is not None:
        whose = "a model of this shape" if misses.curve.is_own else "another model"
        yield (
            f"without a trace, misses follow the curve of {misses.curve.name}, {whose}: up to "
            f"{misses.curve.spread} times more or less; a trace is exact"
        )
    if step and misses.step_length and abs(misses.step_length / step - 1) > _ALIKE:
        yield (
            f"a token of the trace uses {100 * misses.step_length / step:.0f} % of the experts "
            "that one of this model does, with fewer a token or in fewer layers: "
            "it misses as little"
        )
    if misses.needed_token_count is not None:
        yield (
            "the trace is too short to tell experts apart: other texts may miss 30 % more or less; "
            f"some {misses.needed_token_count:,} tokens would do"
        )
