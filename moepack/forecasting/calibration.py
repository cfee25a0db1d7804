"""Rates calibrated by receipts: which of them may, and what they teach."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from moepack.errors import RequestError
from moepack.footprint.weights import Weights
from moepack.forecasting.rates import Rates
from moepack.forecasting.reads import KIND_WORDS, STREAMS, Kind, Reads
from moepack.forecasting.receipts import Receipt
from moepack.sizes import size_text

_ALIKE = 0.02
"""How far the lengths of one model may be apart: versions load more or fewer tensors of it."""

# Fitted to published runs: with less, the ranges hold fewer than nine of ten (docs/numbers.md).
_STEADY, _REPEATED, _UNSTEADY = 0.065, 0.045, 0.22
DOUBTS: dict[Kind, float] = {kind: _UNSTEADY if kind in STREAMS else _STEADY for kind in KIND_WORDS}
"""By what share a run differs from the terms that describe it."""
RECEIPT_DOUBTS: dict[Kind, float] = {
    kind: _UNSTEADY if kind in STREAMS else _REPEATED for kind in KIND_WORDS
}
"""By what share a run differs from the same one, done again."""


class Judged(NamedTuple):
    """A receipt, and why it does not calibrate a forecast; None where it does."""

    receipt: Receipt
    refusal: str | None


class Calibration(NamedTuple):
    """Rates, and the receipts that were given."""

    rates: Rates
    judged: tuple[Judged, ...]

    @property
    def used_count(self) -> int:
        """How many receipts calibrate."""
        return sum(one.refusal is None for one in self.judged)


def check_model(receipts: Sequence[Receipt], weights: Weights, path: str) -> None:
    """Raise RequestError for a receipt of another model."""
    length = weights.length
    for receipt in receipts:
        if length is not None and abs(receipt.model_length / length - 1) > _ALIKE:
            raise RequestError(
                "a receipt of another model",
                path=receipt.path,
                place=receipt.place,
                expected=f"{size_text(length)} of tensors, as {path} has",
                found=size_text(receipt.model_length),
            )


def calibrate(
    rates: Rates, kind: Kind, receipts: Sequence[tuple[Receipt, Reads | None]], layer_count: int
) -> Calibration:
    """Teach rates what receipts say of them; each comes with what its run read.

    `layer_count` is how many layers the model has.
    """
    alike = {kind}
    if kind == "offload" and any(receipt.kind == kind for receipt, _ in receipts):
        alike.add("gpu")  # its end, where nothing is in memory
    judged = []
    for receipt, reads in receipts:
        refusal = _refusal(receipt, kind, alike, layer_count)
        if refusal is None and reads is None:
            refusal = "it is not known what a token reads of this model"
        judged.append(Judged(receipt, refusal))
        if refusal is None and reads is not None:
            rates = _learned(rates, receipt, reads)
    return Calibration(rates, tuple(judged))


def _learned(rates: Rates, receipt: Receipt, reads: Reads) -> Rates:
    seconds, doubt = 1 / receipt.tokens_per_second, RECEIPT_DOUBTS[receipt.kind]
    if receipt.kind == "stream":
        computing = max(seconds - receipt.read_seconds, 0.01 * seconds)
        rates = rates.learned(reads._replace(drive=0.0), computing, doubt)
    return rates.learned(reads, seconds, doubt)


def _refusal(receipt: Receipt, kind: Kind, alike: set[Kind], layer_count: int) -> str | None:
    if receipt.flaw is not None:
        return receipt.flaw
    on_gpu = receipt.gpu_layer_count
    if receipt.kind in ("gpu", "offload") and on_gpu is not None and on_gpu < layer_count:
        return f"only {on_gpu} of {layer_count} layers were on the GPU, with all their weights"
    if receipt.kind in alike:
        return None
    return (
        f"it ran another way ({KIND_WORDS[receipt.kind]}) than this ({KIND_WORDS[kind]}): what one "
        "reaches of a machine says nothing of the other"
    )
