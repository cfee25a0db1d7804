"""How long a prompt takes until its first token: what its micro-batches read, move and compute.

A prompt is computed in micro-batches, and each of them sweeps all layers: a pass. A pass reads the
experts that its tokens use together from the drive, copies those in memory to a GPU that computes
with them, and multiplies. No engine does all three at once, nor one after the other: the time is
taken to lie halfway between the longest of them and their sum.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from moepack.forecasting.facts import PromptFacts
from moepack.forecasting.rates import READ_DEPTH, SURE, Rates
from moepack.forecasting.reads import Reads
from moepack.forecasting.receipts import Receipt
from moepack.forecasting.touched import Touched
from moepack.forecasting.ways import Model, Way
from moepack.machine.model import Figure, Machine

_OFFLOADED_TOKENS = 32
"""From so many tokens in a micro-batch on llama.cpp has a GPU compute experts that lie in memory
(op offload, `GGML_OP_OFFLOAD_MIN_BATCH`)."""
_REACHED = {"measured": 0.6, "read": 0.4, "typed": 0.4}
"""Of what products of matrices get, quantised experts: 0.5 by a build for any processor, 1.4 by one
for this (AVX-512 with VNNI); of data sheets less."""
_COMPUTE_DOUBT = {"measured": 0.45, "read": 0.6, "typed": 0.6}
_OPERATIONS_A_BYTE = {False: 10, True: 100}
"""What processors and GPUs compute while they read a byte of their memory, roughly, for machines of
which no more is known: 8 to 12, and 75 (RTX 3090) to 200 (H200)."""
_GUESS_DOUBT, _RECEIPT_DOUBT = 0.9, 0.15
_RUN_DOUBT = 0.2
_WITH_GPU = ("gpu", "offload", "gpu-stream")


class _Lengths(NamedTuple):
    """What a prompt moves, in bytes, and how many of them come from the drive in a whole pass."""

    drive: float
    link: float
    vram: float
    memory: float
    drive_pass: float


class _Seconds(NamedTuple):
    """What each part takes."""

    drive: float
    link: float
    computing: float

    @property
    def together(self) -> float:
        """The time of all, half of what may overlap overlapping."""
        return (max(self) + sum(self)) / 2


def forecast_prompt(
    model: Model,
    machine: Machine,
    way: Way,
    rates: Rates,
    touched: Touched | None,
    count: int,
    receipts: Sequence[Receipt] = (),
) -> PromptFacts:
    """Forecast a prompt of `count` tokens, of which none is there already.

    `rates` are what reading takes. Nothing of the model's experts is in a cache in memory yet.
    `receipts` of this model say how fast it is computed.
    """
    batch = min(count, model.micro_batch(way.kind))
    passes = math.ceil(count / batch)
    likely = least = most = None
    share = None
    if touched is not None:
        share = touched.shares(batch).likely
        likely, least, most = (_lengths(model, way, touched, count, n) for n in range(3))
    computing, doubt = _computing(model, machine, way, count, receipts)
    reason = _reason(rates, likely, computing)
    facts = PromptFacts(
        token_count=count,
        micro_batch=batch,
        pass_count=passes,
        touched_share=share,
        touched_from=None if touched is None else touched.source,
        pass_length=None if likely is None else round(likely.drive_pass),
        read_length=None if likely is None else round(likely.drive),
        reason=reason,
    )
    if reason is not None or not (likely and least and most and computing):
        return facts
    times = [_seconds(rates, one, computing) for one in (likely, least, most)]
    middle, fastest, slowest = (one.together for one in times)
    factor = math.exp(SURE * _doubt(times[0], machine, doubt))
    limits = _limits(model, machine, likely, computing)
    limit = max(limits, key=lambda name: limits[name])
    return replace(
        facts,
        seconds=middle,
        shortest=max(fastest / factor, max(_limits(model, machine, least, 0.0).values())),
        longest=slowest * factor,
        tokens_per_second=count / middle,
        limit=count / limits[limit],
        binding=limit,
    )


def _lengths(model: Model, way: Way, touched: Touched, count: int, which: int) -> _Lengths:
    """Return what is moved: the likely, the least or the most of it, by `which`."""
    batch = min(count, model.micro_batch(way.kind))
    sizes = [batch] * (count // batch) + ([count % batch] if count % batch else [])
    kept = float(model.kept_length(way)) if way.kind != "gpu" else 0.0
    dense = float(model.weights.read_dense_length or 0)
    in_vram = model.weights.expert_length - kept
    shares = [touched.shares(size)[which] for size in sizes]
    has_gpu = way.kind in _WITH_GPU
    drive = 0.0
    if way.budget is not None:
        drive = sum(shares) * kept
        whole = touched.shares(count)[which] * kept
        if whole <= way.budget:
            drive = whole  # what the first pass read is still there
        elif which == 1:  # the least: the cache is full of what this prompt uses
            drive = sum(max(0.0, share * kept - way.budget) for share in shares)
    moved = [
        share * kept
        for size, share in zip(sizes, shares, strict=True)
        if has_gpu and size >= _OFFLOADED_TOKENS
    ]
    on_cpu = sum(shares) * kept - sum(moved)
    vram = len(sizes) * dense + sum(shares) * in_vram + sum(moved) if has_gpu else 0.0
    memory = on_cpu if has_gpu else len(sizes) * dense + on_cpu
    drive_pass = shares[0] * kept if way.budget is not None else 0.0
    return _Lengths(drive, sum(moved), vram, memory, drive_pass)


def _seconds(rates: Rates, lengths: _Lengths, computing: float) -> _Seconds:
    reads = Reads(0, lengths.vram, lengths.memory, lengths.drive, lengths.link)
    _, vram, memory, drive, link = (seconds or 0.0 for seconds in rates.terms(reads))
    return _Seconds(drive, link, max(computing, vram + memory))


def _limits(
    model: Model, machine: Machine, lengths: _Lengths, computing: float
) -> dict[str, float]:
    """Return the least seconds that each part takes, by its name."""
    drive = machine.drive and machine.drive.speed(model.read_length, READ_DEPTH)
    return {
        "drive": _over(lengths.drive, drive),
        "link": _over(lengths.link, machine.link),
        "computing": computing,
    }


def _over(length: float, figure: Figure | None) -> float:
    return length / figure.value if figure is not None else 0.0


def _computing(
    model: Model, machine: Machine, way: Way, count: int, receipts: Sequence[Receipt]
) -> tuple[float | None, float]:
    """Return the seconds that computing a prompt takes, and how sure that is."""
    alike = ("gpu",) if way.kind in _WITH_GPU else ("cpu", "stream")
    measured = [
        one.prompt_seconds
        for one in receipts
        if one.kind in alike and one.prompt_seconds is not None
    ]
    if measured:
        return count * statistics.median(measured), _RECEIPT_DOUBT
    operations = model.prompt_operations(count)
    speed, doubt = _compute_speed(machine, way)
    return (operations / speed if speed and operations else None), doubt


def _compute_speed(machine: Machine, way: Way) -> tuple[float | None, float]:
    """Return the operations a second that an engine gets, and how sure that is."""
    has_gpu = way.kind in _WITH_GPU
    speeds = [gpu.compute for gpu in machine.gpus] if has_gpu else [machine.compute]
    known = [figure for figure in speeds if figure is not None]
    if known and len(known) == len(speeds):
        figure = min(known, key=lambda one: one.value)  # layers come one after the other
        return _REACHED[figure.basis] * figure.value, _COMPUTE_DOUBT[figure.basis]
    bandwidth = machine.vram_bandwidth if has_gpu else machine.memory_bandwidth
    if bandwidth is None:
        return None, _GUESS_DOUBT
    return _REACHED["typed"] * _OPERATIONS_A_BYTE[has_gpu] * bandwidth.value, _GUESS_DOUBT


def _doubt(seconds: _Seconds, machine: Machine, computing: float) -> float:
    """Return how sure the time of a prompt is, as a standard deviation of its logarithm."""
    is_measured = machine.drive is not None and bool(machine.drive.reads)
    doubts = (0.3 if is_measured else 0.5, 0.5, computing)
    terms = [second * doubt for second, doubt in zip(seconds, doubts, strict=True)]
    overlap = (sum(seconds) - max(seconds)) / 2 / SURE
    return math.hypot(*terms, overlap, _RUN_DOUBT * seconds.together) / seconds.together


def _reason(rates: Rates, lengths: _Lengths | None, computing: float | None) -> str | None:
    """Return why the time is not known; None where it is."""
    if lengths is None:
        return "it is not known what a token uses"
    if computing is None:
        return "nothing is known of how fast the machine computes"
    reads = Reads(0, lengths.vram, lengths.memory, lengths.drive, lengths.link)
    if None in rates.terms(reads):
        return "nothing is known of a bandwidth"
    return None
