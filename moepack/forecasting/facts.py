"""What a forecast says."""

from dataclasses import dataclass

from moepack.forecasting.misses import Source
from moepack.forecasting.reads import Kind
from moepack.machine.model import Basis


@dataclass(frozen=True, slots=True)
class TermFacts:
    """What a part of a token takes: its bytes from `vram`, `memory` or `drive`, or its `layers`.

    `length` is bytes, None for layers, of which there are `count`. `bandwidth` is the machine's
    figure, and `basis` says where that comes from; `reached` is what is forecast to be reached of
    it. Both are bytes a second. None is what is not known.
    """

    name: str
    length: int | None
    count: int | None
    bandwidth: float | None
    basis: Basis | None
    reached: float | None
    seconds: float | None


@dataclass(frozen=True, slots=True)
class SpeedFacts:
    """How fast a model decodes in one way of running it.

    `cpu_layer_count` is N of `--n-cpu-moe N`, `budget_length` the bytes of a cache of experts. In
    nine cases of ten the speed is between `lowest` and `highest`; `ceiling` is what the bandwidths
    alone would allow. `reason` says why no speed is known, None where it is. `binding` is the term
    that takes longest. `missed_length` are the bytes that a token reads of the drive. `vram_length`
    and `memory_length` are what it takes there; `fits` is whether the machine has that.
    """

    kind: Kind
    cpu_layer_count: int | None
    budget_length: int | None
    tokens_per_second: float | None
    lowest: float | None
    highest: float | None
    ceiling: float | None
    reason: str | None
    hit_rate: float | None
    missed_length: int | None
    misses_from: Source | None
    binding: str | None
    terms: tuple[TermFacts, ...]
    receipt_count: int
    vram_length: int | None
    memory_length: int | None
    fits: bool | None
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ReceiptFacts:
    """A receipt: `refusal` says why it calibrates none of the forecasts, None where it does.

    `fields` are those of the file that were used.
    """

    path: str
    place: str
    kind: Kind
    tokens_per_second: float
    refusal: str | None
    fields: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ForecastFacts:
    """How fast a model will be on a machine, in one way or in several.

    `dense_length` and `expert_length` are all of the model's; `read_dense_length` and
    `read_expert_length` what a token reads of them. `context_length` is what `context` tokens take.
    `next_receipt` is the command whose result would narrow the forecast, None where that is little.
    """

    model: str
    machine: str | None
    dense_length: int | None
    expert_length: int
    read_dense_length: int | None
    read_expert_length: int | None
    context: int
    context_length: int | None
    forecasts: tuple[SpeedFacts, ...]
    receipts: tuple[ReceiptFacts, ...]
    next_receipt: str | None
