"""The bytes that a decoded token reads, by memory."""

from typing import Literal, NamedTuple

Kind = Literal["gpu", "offload", "cpu", "stream", "gpu-stream"]
"""The execution modes: whole in VRAM; the experts of some layers, or of all, in memory; everything
in memory; experts from a drive through a cache in memory, beside the rest; the same with the rest
in VRAM. The fraction of a bandwidth that one of them achieves says nothing of another (but `gpu` is
the end of `offload` with nothing in memory)."""

STREAMS: tuple[Kind, ...] = ("stream", "gpu-stream")

KIND_WORDS: dict[Kind, str] = {
    "gpu": "whole in VRAM",
    "offload": "experts in memory, the rest in VRAM",
    "cpu": "whole in memory",
    "stream": "experts from the drive, the rest in memory",
    "gpu-stream": "experts from the drive, the rest in VRAM",
}


class Reads(NamedTuple):
    """The bytes that a decoded token reads of each memory, and the number of layers with experts.

    Missed experts are read of `drive`, and of `memory` as well. `link` is the bytes from memory to
    a GPU that computes with them.
    """

    layer_count: int
    vram: float = 0.0
    memory: float = 0.0
    drive: float = 0.0
    link: float = 0.0
