"""The results of a forecast."""

from dataclasses import dataclass

from moepack.planning.forecasting.misses import Source
from moepack.planning.forecasting.rates import Kind
from moepack.planning.forecasting.touched import TouchedFrom
from moepack.planning.machine.model import Basis


@dataclass(frozen=True, slots=True)
class TermFacts:
    """The time of a part of a token: its `layers`, its `waits`, or its bytes from a memory.

    That is `vram`, `memory`, `drive`, or `link`, from memory to a GPU. `length` is bytes, None for
    layers, and for those on average that wait for missing experts, of which there are `count`.
    `bandwidth` is the machine's figure, with its `basis`; `reached` is the forecast part of it.
    Both are bytes a second. None is unknown.
    """

    name: str
    length: int | None = None
    count: float | None = None
    bandwidth: float | None = None
    basis: Basis | None = None
    reached: float | None = None
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class PromptFacts:
    """The time until the first token, of a prompt of `token_count` tokens with nothing cached.

    It is computed in `pass_count` micro-batches of up to `micro_batch` tokens. A whole one uses
    `touched_share` of each layer's experts, and reads `pass_length` bytes of the drive, all of them
    `read_length`. In nine cases of ten the `seconds` are between `shortest` and `longest`. The
    longest part alone, `binding`, would allow `limit` tokens a second: "drive" at its full
    bandwidth, "link" or "computing". None is unknown, and `reason` says why.
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
    """The decoding speed of a model in one execution mode, of all texts; None is unknown.

    `cpu_layer_count` is N of `--n-cpu-moe N`, `budget_length` the bytes of a cache of experts. In
    nine cases of ten the speed is between `lowest` and `highest`; `ceiling` is the bound by the
    bandwidths alone. `reason` says why no speed is known. `binding` is the longest term. A token
    reads `missed_length` bytes of the drive, by a trace, or by the curve of the model
    `misses_curve`. Experts are in VRAM, in memory, or on the drive alone; the mode takes
    `vram_length` and `memory_length`; `fits` is whether the machine has that. A cache in VRAM has
    `vram_cache_length` bytes, hits `vram_hit_rate` of lookups, and a token brings `uploaded_length`
    to it. `prompt` is the time until the first token. Of several texts a token is one step of all
    of them.
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
    misses_curve: str | None
    binding: str | None
    terms: tuple[TermFacts, ...]
    receipt_count: int
    vram_length: int | None
    memory_length: int | None
    fits: bool | None
    vram_expert_length: int
    memory_expert_length: int
    streamed_length: int
    vram_cache_length: int | None
    vram_hit_rate: float | None
    uploaded_length: int | None
    prompt: PromptFacts
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ReceiptFacts:
    """A measured run, with the `fields` of its file that were used.

    `refusal` says why it calibrates none of the forecasts, None if it does.
    """

    path: str
    place: str
    kind: Kind
    tokens_per_second: float
    refusal: str | None
    fields: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ForecastFacts:
    """The speed of a model on a machine, in one execution mode or in several.

    `dense_length` and `expert_length` are all of the model's, but for row tables of `table_length`
    bytes, which stay on the drive; a token reads `read_dense_length` and `read_expert_length` of
    them, one of each of `text_count` texts. `context` tokens take `context_length` bytes.
    `next_receipt` is the command of the run that would narrow the forecast most, None if none would
    by much.
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
    text_count: int
    forecasts: tuple[SpeedFacts, ...]
    receipts: tuple[ReceiptFacts, ...]
    next_receipt: str | None
