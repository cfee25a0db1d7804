"""What a forecast says."""

from dataclasses import dataclass

from moepack.forecasting.misses import Source
from moepack.forecasting.reads import Kind
from moepack.forecasting.touched import TouchedFrom
from moepack.machine.model import Basis


@dataclass(frozen=True, slots=True)
class TermFacts:
    """What a part of a token takes: its `layers`, or its bytes from a memory.

    That is `vram`, `memory`, `drive`, or `link`, from memory to a GPU.

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
class PromptFacts:
    """How long a prompt of `token_count` tokens takes, with nothing cached: until its first token.

    It is computed in `pass_count` micro-batches of up to `micro_batch` tokens. A whole one uses
    `touched_share` of each layer's experts, and reads `pass_length` bytes of the drive, all of them
    `read_length`. In nine cases of ten the `seconds` are between `shortest` and `longest`. `limit`
    is the tokens a second of what takes longest alone, `binding`: "drive" at its full bandwidth,
    "link" or "computing". None is what is not known, and `reason` says why.
    """

    token_count: int
    micro_batch: int
    pass_count: int
    touched_share: float | None
    touched_from: TouchedFrom | None
    pass_length: int | None
    read_length: int | None
    reason: str | None
    seconds: float | None = None
    shortest: float | None = None
    longest: float | None = None
    tokens_per_second: float | None = None
    limit: float | None = None
    binding: str | None = None


@dataclass(frozen=True, slots=True)
class SpeedFacts:
    """How fast a model decodes in one way of running it.

    `cpu_layer_count` is N of `--n-cpu-moe N`, `budget_length` the bytes of a cache of experts. In
    nine cases of ten the speed is between `lowest` and `highest`; `ceiling` is what the bandwidths
    alone would allow. `reason` says why no speed is known, None where it is. `binding` is the term
    that takes longest. `missed_length` are the bytes that a token reads of the drive. `vram_length`
    and `memory_length` are what it takes there; `fits` is whether the machine has that. Of a cache
    in VRAM, `vram_cache_length`, `vram_hit_rate` is what it finds, and `uploaded_length` what a
    token brings to it. `prompt` is until the first token.
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
    vram_cache_length: int | None
    vram_hit_rate: float | None
    uploaded_length: int | None
    prompt: PromptFacts
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

    `dense_length` and `expert_length` are all of the model's, but for row tables of `table_length`
    bytes, which stay on the drive; `read_dense_length` and
    `read_expert_length` what a token reads of them. `context_length` is what `context` tokens take.
    `next_receipt` is the command whose result would narrow the forecast, None where that is little.
    """

    model: str
    machine: str | None
    dense_length: int | None
    expert_length: int
    table_length: int
    read_dense_length: int | None
    read_expert_length: int | None
    context: int
    context_length: int | None
    forecasts: tuple[SpeedFacts, ...]
    receipts: tuple[ReceiptFacts, ...]
    next_receipt: str | None
