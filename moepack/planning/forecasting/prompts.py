"""The time of a prompt until its first token: reads, copies and computing of its micro-batches.

A prompt is computed in micro-batches, and each of them sweeps all layers: a pass. A pass reads the
experts that its tokens use together from the drive, copies those in memory to a GPU that computes
with them, and multiplies. Few tokens wait for most of a layer's reads, and then compute; for many
the next layer is read ahead, and the time is taken to lie halfway between the longest and the sum.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace

from moepack.planning.forecasting.facts import PromptFacts
from moepack.planning.forecasting.measured_runs import MeasuredRun
from moepack.planning.forecasting.modes import ExecutionMode, ModelOnMachine
from moepack.planning.forecasting.rates import SURE, WITH_GPU, Rates, Reads, together
from moepack.planning.forecasting.touched import Touched
from moepack.planning.machine.model import Machine

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
_GUESS_REL_STD, _MEASURED_REL_STD = {False: 0.9, True: 0.6}, 0.15
"""Of a machine of unknown speed, by whether a GPU computes: published prompts on three were 0.5 to
1.0 times as fast as that, in llama.cpp on M1 Max, M4 and Strix Halo."""
_RUN_REL_STD = 0.2
_AHEAD_TOKENS = 64
"""Tokens of a micro-batch from which on it counts that the next layer is read ahead: of 24 to 63
(native/prompts.h begins with 17) that saves a tenth."""
_FRESH_SECONDS = tuple(seconds / (1 << 30) for seconds in (0.06, 0.0, 0.2))
"""Likely, least and most for a byte of memory that is used for the first time: the most is of
virtual machines, whose host has to find it."""
_DIGEST_SECONDS = 0.1 / (1 << 30)
"""For a byte that is read first, and compared with its digest; where the next layer is read ahead
meanwhile it costs nothing."""
_FEW_TOKENS = 20
"""Tokens of a micro-batch of which processors reach half of the speed that they have for many."""


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
    is_ahead, times = mode.budget is None or batch >= _AHEAD_TOKENS, []
    for reads, fresh_seconds in zip(cases, _FRESH_SECONDS, strict=True):
        _, waits, vram, memory, drive, link = (term or 0.0 for term in rates.terms(reads))
        drive += waits + fresh_seconds * min(reads.drive, mode.budget or 0)
        drive += 0.0 if is_ahead else _DIGEST_SECONDS * reads.drive
        times.append((drive, link, max(computing, vram + memory)))
    seconds, fastest, slowest = (_together(parts, is_ahead=is_ahead) for parts in times)
    factor = math.exp(SURE * _rel_std(times[0], model.machine, rel_std, is_ahead=is_ahead))
    limits = _limits(model, cases[0], computing)
    binding = max(limits, key=lambda name: limits[name])
    return replace(
        facts,
        seconds=seconds,
        shortest=max(
            seconds / together(seconds / fastest, factor),
            *_limits(model, cases[1], 0.0).values(),
        ),
        longest=seconds * together(slowest / seconds, factor),
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
    waits = len(sizes) * len(model.cached_layers(mode)) if drive else 0
    if mode.kind not in WITH_GPU:
        return Reads(0, waits, memory=len(sizes) * dense + sum(shares) * kept, drive=drive)
    moved = kept * sum(
        share for size, share in zip(sizes, shares, strict=True) if size >= _OFFLOADED_TOKENS
    )
    vram = len(sizes) * dense + sum(shares) * in_vram + moved
    return Reads(0, waits, vram, sum(shares) * kept - moved, drive, moved)


def _together(seconds: tuple[float, float, float], *, is_ahead: bool) -> float:
    """Return the time of all parts, with half of the possible overlap if there is any."""
    return (max(seconds) + sum(seconds)) / 2 if is_ahead else sum(seconds)


def _limits(model: ModelOnMachine, reads: Reads, computing: float) -> dict[str, float]:
    """Return the least seconds of each part, by its name."""
    drive, link = model.drive, model.machine.link
    return {
        "drive": reads.drive / drive.bandwidth.value if drive is not None else 0.0,
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
    speed, rel_std = None, _GUESS_REL_STD[has_gpu]
    if speeds and len(speeds) == len(figures):
        figure = min(speeds, key=lambda one: one.value)  # layers come one after the other
        speed, rel_std = _ACHIEVED[figure.basis] * figure.value, _COMPUTE_REL_STD[figure.basis]
    elif bandwidth is not None:
        speed = _ACHIEVED["typed"] * _OPERATIONS_A_BYTE[has_gpu] * bandwidth.value
    if speed is not None and not has_gpu:
        batch = min(count, model.micro_batches[mode.kind])
        speed *= batch / (batch + _FEW_TOKENS)
    operations = model.footprint.prompt_operations(count)
    return (operations / speed if speed and operations else None), rel_std


def _rel_std(
    seconds: tuple[float, float, float], machine: Machine, computing: float, *, is_ahead: bool
) -> float:
    """Return the standard deviation of the logarithm of a prompt's time."""
    is_measured = machine.drive is not None and bool(machine.drive.reads)
    parts = zip(seconds, (0.3 if is_measured else 0.5, 0.5, computing), strict=True)
    terms = [second * rel_std for second, rel_std in parts]
    overlap = (sum(seconds) - max(seconds)) / 2 / SURE if is_ahead else 0.0
    together = _together(seconds, is_ahead=is_ahead)
    return math.hypot(*terms, overlap, _RUN_REL_STD * together) / together
