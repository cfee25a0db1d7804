"""Calibration of rates by measured runs, and the next run that would help most."""

from __future__ import annotations

from collections.abc import Sequence

from moepack.common.errors import RequestError
from moepack.common.escaping import shell_word
from moepack.common.sizes import rate_text, size_text
from moepack.planning.forecasting.measured_runs import MeasuredRun
from moepack.planning.forecasting.modes import ExecutionMode, ModelOnMachine
from moepack.planning.forecasting.rates import (
    KIND_WORDS,
    STREAMS,
    Kind,
    Rates,
    Reads,
    ceiling_seconds,
)
from moepack.planning.machine.model import DriveSpeed

_ALIKE = 0.02
"""The relative difference of one model's lengths: versions load more or fewer tensors."""
_MOST_OF_CEILING = 1.2
"""Figures are that far off without being wrong, and caches of CPUs help a little."""

# Fitted to runs: with less, the ranges cover fewer than nine of ten (docs/numbers.md).
STEADY = 0.065
"""The relative standard deviation of a run from the terms that describe it, without a drive."""
_UNSTEADY = {True: 0.12, False: 0.22}
"""The same with one, by whether that was measured: others may be in phones, and grow hot."""
_REPEATED = 0.045
"""The same of a steady run from the same one, done again."""


def unsteadiness(drive: DriveSpeed | None) -> float:
    """Return the relative standard deviation of a run with this drive from its terms."""
    return _UNSTEADY[drive is not None and drive.bandwidth.basis == "measured"]


RunReads = tuple[MeasuredRun, Reads | None]
"""A run with the reads of a token in it, None if unknown."""


def check_runs(model: ModelOnMachine, runs: Sequence[MeasuredRun]) -> list[RunReads]:
    """Return runs with their reads; those that are faster than their bandwidths are excluded.

    Raises RequestError for a run of another model.
    """
    length, checked = model.weights.length, list[RunReads]()
    for run in runs:
        if length is not None and abs(run.model_length / length - 1) > _ALIKE:
            raise RequestError(
                "a receipt of another model",
                path=run.path,
                place=run.place,
                expected=f"{size_text(length)} of tensors, as {model.footprint.path} has",
                found=size_text(run.model_length),
            )
        reads = model.read_by(run)
        least = None if reads is None else ceiling_seconds(model.machine, reads, model.drive)
        if least and run.tokens_per_second * least > _MOST_OF_CEILING and not run.exclusion:
            exclusion = (
                f"the machine's bandwidths allow at most {rate_text(1 / least)} tok/s: one of them "
                "is wrong, or it ran elsewhere"
            )
            run = run._replace(exclusion=exclusion)
        checked.append((run, reads))
    return checked


def calibrate(
    model: ModelOnMachine, kind: Kind, runs: Sequence[RunReads]
) -> tuple[Rates, list[str | None]]:
    """Return rates updated by runs, and for each the reason not to use it; None for used ones."""
    rates = Rates.from_machine(model.machine, kind, model.drive)
    kinds = {kind}
    if kind == "offload" and any(run.kind == kind for run, _ in runs):
        kinds.add("gpu")  # its end, with nothing in memory
    layer_count = model.weights.block_count or len(model.weights.layers)
    refusals: list[str | None] = []
    for run, reads in runs:
        refusal = _refusal(run, kind, kinds, layer_count)
        if refusal is None and reads is None:
            refusal = "the bytes that a token of this model reads are unknown"
        refusals.append(refusal)
        if refusal is None and reads is not None:
            seconds = 1 / run.tokens_per_second
            rel_std = unsteadiness(model.drive) if run.kind in STREAMS else _REPEATED
            if run.kind == "stream":
                computing = max(seconds - run.read_seconds, 0.01 * seconds)
                rates = rates.updated(reads._replace(wait_count=0, drive=0.0), computing, rel_std)
            rates = rates.updated(reads, seconds, rel_std)
    return rates, refusals


def _refusal(run: MeasuredRun, kind: Kind, kinds: set[Kind], layer_count: int) -> str | None:
    if run.exclusion is not None:
        return run.exclusion
    on_gpu = run.gpu_layer_count
    if run.kind in ("gpu", "offload") and on_gpu is not None and on_gpu < layer_count:
        return f"only {on_gpu} of {layer_count} layers were on the GPU, with all their weights"
    if run.kind in kinds:
        return None
    return (
        f"it ran in another mode ({KIND_WORDS[run.kind]}) than this one ({KIND_WORDS[kind]}): the "
        "speed of one says nothing about the other"
    )


def next_receipt(
    model: ModelOnMachine, modes: Sequence[ExecutionMode], runs: Sequence[MeasuredRun]
) -> str | None:
    """Return the command of the run that would narrow a forecast most, given the used `runs`.

    Of several `modes` it is one at an end. None if there is one already, or none would help.
    llama-bench runs no pack: then the model has no name. Engines that stream with a GPU do not say
    how much they read.
    """
    kinds = {mode.kind for mode in modes}
    if model.reads(modes[0], 0, 0) is None or "gpu-stream" in kinds:
        return None
    path = shell_word(model.footprint.path)
    if "stream" in kinds:
        return None if runs else f'moepack run {path} -p "…" -n 100 --json > receipt.json'
    gguf = "MODEL.gguf" if model.footprint.is_pack else path
    bench = f"llama-bench -m {gguf} -p 512 -n 128 -o json"
    if kinds == {"cpu"}:
        return None if runs else f"{bench} -ngl 0"
    fitting = [mode.cpu_layer_count for mode in modes if model.fits(mode) is not False]
    measured = {run.cpu_layer_count for run in runs}
    missing = (count for count in (*fitting[-1:], *fitting[:1]) if count not in measured)
    return next((f"{bench} -ngl 99 -ncmoe {count}" for count in missing), None)
