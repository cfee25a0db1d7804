"""The results of a placement."""

from dataclasses import dataclass

from moepack.planning.forecasting.facts import SpeedFacts
from moepack.source.parameters import Parameters


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """The contents of one memory of `length` bytes, and its free bytes with the margin."""

    name: str
    length: int
    dense_length: int
    context_length: int
    expert_length: int
    compute_length: int
    left_length: int


@dataclass(frozen=True, slots=True)
class OptionFacts:
    """A command line, and where it puts experts: bytes in VRAM, in memory, and read as needed.

    `cpu_layer_count` is N of `--n-cpu-moe N`, all with `--cpu-moe`, None without a GPU. Of the
    bytes in VRAM, `vram_cache_length` are a cache of experts that are in memory or on the drive as
    well. `micro_batch` is how many tokens of a prompt it computes at once. `forecast` is None
    without a machine to forecast for.
    """

    command: str
    cpu_layer_count: int | None
    vram_expert_length: int
    memory_expert_length: int
    streamed_length: int
    micro_batch: int
    vram_cache_length: int | None = None
    forecast: SpeedFacts | None = None


@dataclass(frozen=True, slots=True)
class PinFacts:
    """Whether it is worth pinning the hottest experts; None is unknown.

    `verdict` is the concentration gate's, `reason` its sentence. At the budget for experts the
    hottest have `static_hit_rate` on held-out tokens, and LRFU has `lrfu_hit_rate`. Of the budget
    `pin_length` bytes are pinned: 0 if that is worth nothing.
    """

    verdict: str
    reason: str
    static_hit_rate: float | None
    lrfu_hit_rate: float | None
    pin_length: int


@dataclass(frozen=True, slots=True)
class PlacementFacts:
    """A placement of everything, as command lines to paste.

    `alternatives` to `option` cache experts in VRAM, or leave the GPU alone. `notes` are of both.
    Row tables of `table_length` bytes stay on the drive.
    """

    model: str
    engine: str
    context: int
    margin_length: int
    parameters: Parameters
    table_length: int
    devices: tuple[DeviceFacts, ...]
    option: OptionFacts
    alternatives: tuple[OptionFacts, ...]
    notes: tuple[str, ...]
    pins: PinFacts | None
