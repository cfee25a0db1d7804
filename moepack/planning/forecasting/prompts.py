"""The time of a prompt until its first token: reads, copies and computing of its micro-batches.

A prompt is computed in micro-batches, and each of them sweeps all layers: a pass. A pass reads the
experts that its tokens use together from the drive, copies those in memory to a GPU that computes
with them, and multiplies. No engine does all three at once, nor one after the other: the time is
taken to lie halfway between the longest of them and their sum.

Of a uniform router n tokens use a share of 1 - (1 - k/E)^n. Real text comes back to experts: it
uses as many as n^c tokens of a uniform router would. Published runs had c of 0.57 (130 tokens,
40 % of the experts of a layer) and 0.52 (1,658 tokens, 77 %; both Qwen3.6-35B), and 0.63 (149
tokens, 42 %; DeepSeek V4 Flash); a trace of Qwen3-30B-A3B has 0.60 at 130 tokens.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from moepack.common.errors import TraceError
from moepack.common.shape import ModelShape
from moepack.planning.forecasting.facts import PromptFacts, TouchedFrom
from moepack.planning.forecasting.measured_runs import MeasuredRun
from moepack.planning.forecasting.modes import ExecutionMode, ModelOnMachine
from moepack.planning.forecasting.rates import SURE, WITH_GPU, Rates, Reads
from moepack.planning.machine.model import Machine
from moepack.traces.model import Item
from moepack.traces.spool import SpooledTrace
from moepack.traces.steps import ALL_PHASES, Steps, StepStream

_OFFLOADED_TOKENS = 32
"""Tokens of a micro-batch from which on llama.cpp has a GPU compute experts that lie in memory
(op offload, `GGML_OP_OFFLOAD_MIN_BATCH`)."""
_ACHIEVED = {"measured": 0.6, "read": 0.4, "typed": 0.4}
"""Of the speed of matrix products, with quantised experts: 0.5 by a build for any processor, 1.4 by
one for this (AVX-512 with VNNI); of data sheets less."""
_COMPUTE_REL_STD = {"measured": 0.45, "read": 0.6, "typed": 0.6}
_OPERATIONS_A_BYTE = {False: 10, True: 100}
"""Operations of processors and GPUs while they read a byte of their memory, roughly, for machines
of unknown speed: 8 to 12, and 75 (RTX 3090) to 200 (H200)."""
_GUESS_REL_STD, _MEASURED_REL_STD = 0.9, 0.15
_RUN_REL_STD = 0.2

_PUBLISHED, _LEAST, _UNIFORM = 0.58, 0.5, 1.0
_MOST_TOKENS = 1 << 14
_TRACE_SPREAD = 0.03
"""The difference of the exponent for another text of the same kind."""


def forecast_prompt(
    model: ModelOnMachine,
    mode: ExecutionMode,
    rates: Rates,
    touched: Touched | None,
    count: int,
    runs: Sequence[MeasuredRun],
) -> PromptFacts:
    """Forecast a prompt of `count` tokens, of which none is there already.

    No expert is in a cache in memory yet. Measured `runs` of this model tell how fast it computes.
    """
    batch = min(count, model.micro_batches[mode.kind])
    share, pass_length, cases = None, None, list[Reads]()
    if touched is not None:
        cases = [_reads(model, mode, touched, count, which) for which in range(3)]
        share = touched.shares(batch)[0]
        pass_length = 0 if mode.budget is None else round(share * model.kept_length(mode))
    computing, rel_std = _computing(model, mode, count, runs)
    reason = None
    if not cases:
        reason = "the experts that a token uses are unknown"
    elif computing is None:
        reason = "the machine's compute speed is unknown"
    elif None in rates.terms(cases[0]):
        reason = "a bandwidth is unknown"
    facts = PromptFacts(
        token_count=count,
        micro_batch=batch,
        pass_count=math.ceil(count / batch),
        touched_share=share,
        touched_from=None if touched is None else touched.source,
        pass_length=pass_length,
        read_length=round(cases[0].drive) if cases else None,
        reason=reason,
    )
    if reason is not None or computing is None:
        return facts
    times = []
    for reads in cases:
        _, vram, memory, drive, link = (term or 0.0 for term in rates.terms(reads))
        times.append((drive, link, max(computing, vram + memory)))
    seconds, fastest, slowest = map(_together, times)
    factor = math.exp(SURE * _rel_std(times[0], model.machine, rel_std))
    limits = _limits(model, cases[0], computing)
    binding = max(limits, key=lambda name: limits[name])
    return replace(
        facts,
        seconds=seconds,
        shortest=max(fastest / factor, *_limits(model, cases[1], 0.0).values()),
        longest=slowest * factor,
        tokens_per_second=count / seconds,
        limit=count / limits[binding],
        binding=binding,
    )


def _reads(
    model: ModelOnMachine, mode: ExecutionMode, touched: Touched, count: int, which: int
) -> Reads:
    """Return the likely, the least or the most bytes that a prompt moves, by `which`."""
    batch = min(count, model.micro_batches[mode.kind])
    sizes = [batch] * (count // batch) + ([count % batch] if count % batch else [])
    kept = float(model.kept_length(mode)) if mode.kind != "gpu" else 0.0
    dense = float(model.weights.read_dense_length or 0)
    in_vram = model.weights.expert_length - kept
    shares = [touched.shares(size)[which] for size in sizes]
    drive = 0.0
    if mode.budget is not None:
        drive = sum(shares) * kept
        whole = touched.shares(count)[which] * kept
        if whole <= mode.budget:
            drive = whole  # experts of the first pass are still there
        elif which == 1:  # the least: the cache is full of this prompt's experts
            drive = sum(max(0.0, share * kept - mode.budget) for share in shares)
    if mode.kind not in WITH_GPU:
        return Reads(0, memory=len(sizes) * dense + sum(shares) * kept, drive=drive)
    moved = kept * sum(
        share for size, share in zip(sizes, shares, strict=True) if size >= _OFFLOADED_TOKENS
    )
    vram = len(sizes) * dense + sum(shares) * in_vram + moved
    return Reads(0, vram=vram, memory=sum(shares) * kept - moved, drive=drive, link=moved)


def _together(seconds: tuple[float, float, float]) -> float:
    """Return the time of all parts, with half of the possible overlap."""
    return (max(seconds) + sum(seconds)) / 2


def _limits(model: ModelOnMachine, reads: Reads, computing: float) -> dict[str, float]:
    """Return the least seconds of each part, by its name."""
    drive, link = model.drive, model.machine.link
    return {
        "drive": reads.drive / drive.value if drive is not None else 0.0,
        "link": reads.link / link.value if link is not None else 0.0,
        "computing": computing,
    }


def _computing(
    model: ModelOnMachine, mode: ExecutionMode, count: int, runs: Sequence[MeasuredRun]
) -> tuple[float | None, float]:
    """Return the seconds of computing a prompt, and their relative standard deviation."""
    machine, has_gpu = model.machine, mode.kind in WITH_GPU
    kinds = ("gpu",) if has_gpu else ("cpu", "stream")
    seconds = [run.prompt_seconds for run in runs if run.kind in kinds and run.prompt_seconds]
    if seconds:
        return count * statistics.median(seconds), _MEASURED_REL_STD
    figures = [gpu.compute for gpu in machine.gpus] if has_gpu else [machine.compute]
    speeds = [figure for figure in figures if figure is not None]
    bandwidth = machine.vram_bandwidth if has_gpu else machine.memory_bandwidth
    speed, rel_std = None, _GUESS_REL_STD
    if speeds and len(speeds) == len(figures):
        figure = min(speeds, key=lambda one: one.value)  # layers come one after the other
        speed, rel_std = _ACHIEVED[figure.basis] * figure.value, _COMPUTE_REL_STD[figure.basis]
    elif bandwidth is not None:
        speed = _ACHIEVED["typed"] * _OPERATIONS_A_BYTE[has_gpu] * bandwidth.value
    operations = model.footprint.prompt_operations(count)
    return (operations / speed if speed and operations else None), rel_std


def _rel_std(seconds: tuple[float, float, float], machine: Machine, computing: float) -> float:
    """Return the standard deviation of the logarithm of a prompt's time."""
    is_measured = machine.drive is not None and bool(machine.drive.reads)
    parts = zip(seconds, (0.3 if is_measured else 0.5, 0.5, computing), strict=True)
    terms = [second * rel_std for second, rel_std in parts]
    overlap = (sum(seconds) - max(seconds)) / 2 / SURE
    together = _together(seconds)
    return math.hypot(*terms, overlap, _RUN_REL_STD * together) / together


class Touched:
    """The shares of experts that tokens use, of which one uses `used` of `count`.

    `shares` are those of a trace, by tokens.
    """

    def __init__(self, used: int, count: int, shares: Mapping[int, float] | None = None) -> None:
        self._unused = 1 - min(used, count) / count
        self._exponents = {
            tokens: self._exponent(tokens, share)
            for tokens, share in (shares or {}).items()
            if tokens > 1
        }

    @property
    def source(self) -> TouchedFrom:
        """The origin of the shares."""
        return "trace" if self._exponents else "published texts"

    def shares(self, tokens: int) -> tuple[float, float, float]:
        """Return the likely, the least and the most share that so many tokens use.

        It is by the window of the trace nearest to them.
        """
        exponents = (_PUBLISHED, _LEAST, _UNIFORM)
        if self._exponents:
            nearest = min(self._exponents, key=lambda window: abs(math.log(window / tokens)))
            likely = self._exponents[nearest]
            is_within = tokens <= max(self._exponents)
            most = min(_UNIFORM, likely + _TRACE_SPREAD) if is_within else _UNIFORM
            exponents = likely, max(0.0, likely - _TRACE_SPREAD), most
        likely, least, most = (
            1 - self._unused ** (tokens**c) if self._unused else 1.0 for c in exponents
        )
        return likely, least, most

    def _exponent(self, tokens: int, share: float) -> float:
        if not self._unused or share >= 1:
            return _UNIFORM
        uniform_tokens = math.log(1 - share) / math.log(self._unused)
        return max(0.0, math.log(max(uniform_tokens, 1.0)) / math.log(tokens))


def touched_of(shape: ModelShape, trace: SpooledTrace | None) -> Touched | None:
    """Return the shares of a model; None if it is not known how many experts a token uses.

    Raises what `touched_shares` raises.
    """
    used, counts = shape.experts_used, shape.expert_counts
    if used is None:
        return None
    shares = None if trace is None else touched_shares(trace)
    return Touched(used, max(counts.values()), shares)


def touched_shares(trace: SpooledTrace) -> dict[int, float]:
    """Return the share of a layer's experts that so many tokens in a row are routed to.

    By powers of two of tokens, up to the longest request of the trace, and by all tokens of that
    one. It is the mean over layers and over windows within a request, prompts included. Raises
    TraceError if there is no token.
    """
    assert trace.shape is not None, "it was read for a model"
    counts = trace.shape.without_mtp().expert_counts
    stream = StepStream(ALL_PHASES, _MOST_TOKENS)
    pieces: list[Steps] = []

    def add(item: Item) -> None:
        steps = stream.add(item)
        if steps is not None:
            pieces.append(steps)

    trace.feed(add)
    if not pieces:
        raise TraceError("no tokens in it", path=trace.paths[0])
    request = np.concatenate([steps.request for steps in pieces])
    starts = np.flatnonzero(np.diff(request, prepend=-1))
    position = np.arange(len(request)) - np.repeat(starts, np.diff(np.append(starts, len(request))))
    rows = np.repeat(np.arange(len(request)), np.concatenate([np.diff(s.starts) for s in pieces]))
    layer = np.concatenate([steps.layer for steps in pieces])
    expert = np.concatenate([steps.expert for steps in pieces])
    lengths = np.bincount(request)
    longest = int(lengths.max())
    shares = {}
    for window in sorted({*(1 << n for n in range(longest.bit_length())), longest}):
        window_count = int((lengths // window).sum())
        is_whole = (position // window + 1) * window <= lengths[request]
        numbers = request * (_MOST_TOKENS + 1) + position // window
        pairs = (numbers[rows] << 16) + expert  # a window and an expert as one number
        of_layers = [
            len(np.unique(pairs[selections])) / (count * window_count)
            for number, count in counts.items()
            if np.any(selections := (layer == number) & is_whole[rows])
        ]
        if of_layers:
            shares[window] = float(np.mean(of_layers))
    return shares
