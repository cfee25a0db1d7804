"""What a decoded token reads, by where it lies."""

from typing import Literal, NamedTuple

Kind = Literal["gpu", "offload", "cpu", "stream", "gpu-stream"]
"""How a model runs: whole in VRAM; the experts of some layers, or of all, in memory; all of it in
memory; experts from a drive through a cache in memory, where the rest is as well; the same with the
rest in VRAM. What one of them reaches of a machine says nothing of another (but `gpu` is the end of
`offload` where nothing is in memory)."""

STREAMS: tuple[Kind, ...] = ("stream", "gpu-stream")

KIND_WORDS: dict[Kind, str] = {
    "gpu": "whole in VRAM",
    "offload": "experts in memory, the rest in VRAM",
    "cpu": "whole in memory",
    "stream": "experts from the drive, the rest in memory",
    "gpu-stream": "experts from the drive, the rest in VRAM",
}


class Reads(NamedTuple):
    """What a decoded token reads of each memory, in bytes, and how many layers have experts.

    What is missed is read of `drive`, and of `memory` as well. `link` is what goes from memory to a
    GPU that computes with it.
    """

    layer_count: int
    vram: float = 0.0
    memory: float = 0.0
    drive: float = 0.0
    link: float = 0.0
