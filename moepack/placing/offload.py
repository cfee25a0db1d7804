"""Experts in memory, as few as the VRAM of one or more GPUs allows, in the words of llama.cpp.

Facts of b11549: `--n-cpu-moe N` keeps the experts of the first N blocks in memory, `-ot` those that
match a pattern (common/arg.cpp). `-ts` deals out layers, and the output behind the last of them, in
proportion to its numbers, one GPU after the other (llama-model.cpp, `load_tensors`): counts of
layers give just these. Embeddings stay in memory.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

from moepack.placing.load import ExpertTensor, LayerLoad, Load

_PARTS = 1000
"""Of a GPU's memory: how finely GPUs are filled alike."""


class Offload(NamedTuple):
    """A placement: which expert tensors are in memory, and which layers each GPU has.

    `cpu_layer_count` is N. `layer_counts` are by GPU, the output counts as a layer of the last;
    `used_lengths` are the bytes on each.
    """

    cpu_layer_count: int
    in_memory: tuple[ExpertTensor, ...]
    layer_counts: tuple[int, ...]
    used_lengths: tuple[int, ...]

    @property
    def memory_length(self) -> int:
        """The bytes of the experts in memory."""
        return sum(tensor.length for tensor in self.in_memory)


def offload(load: Load, rooms: Sequence[int]) -> Offload | None:
    """Return the placement with the smallest N for GPUs of `rooms` bytes; None where none fits.

    All GPUs are filled to about the same share.
    """
    ends = [0, *(layer.layer + 1 for layer in load.layers if layer.expert_length)]
    for end in ends:
        if not _deal(load, rooms, end).is_whole:
            continue
        least = bisect_left(
            range(_PARTS),
            True,
            key=lambda part: _deal(load, _parts(rooms, part), end).is_whole,
        )
        dealt = _deal(load, _parts(rooms, least), end)
        tensors = (one for held in load.layers if held.layer < end for one in held.tensors)
        return Offload(end, tuple(tensors), dealt.layer_counts, dealt.used_lengths)
    return None


def missing_length(load: Load, rooms: Sequence[int]) -> int:
    """Return how many bytes of VRAM are missing, with all experts in memory."""
    computing_count = sum(room > load.compute_length for room in rooms) or 1
    needed = load.fixed_length + load.compute_length * computing_count + load.staged_length
    if needed > sum(rooms):
        return needed - sum(rooms)
    # Together there would be room, but layers are not divided.
    return sum(_deal(load, rooms, load.layers[-1].layer + 1).left_lengths)


def filled(load: Load, placed: Offload, rooms: Sequence[int]) -> Offload:
    """Return a placement with what VRAM is left filled, tensor by tensor, from the last layer on.

    It takes a pattern (`-ot`) to say so, as N counts whole layers.
    """
    left = [room - used for room, used in zip(rooms, placed.used_lengths, strict=True)]
    gpus = _gpus(load, placed.layer_counts)
    moved: set[ExpertTensor] = set()
    by_layer = sorted(placed.in_memory, key=lambda tensor: (-tensor.layer, -tensor.length))
    for tensor in by_layer:
        gpu = gpus[tensor.layer]
        if tensor.length <= left[gpu]:
            left[gpu] -= tensor.length
            moved.add(tensor)
    kept = tuple(tensor for tensor in placed.in_memory if tensor not in moved)
    used = tuple(room - free for room, free in zip(rooms, left, strict=True))
    return placed._replace(in_memory=kept, used_lengths=used)


def pattern(tensors: Sequence[ExpertTensor]) -> str:
    """Return the values of `-ot` that keep just these tensors in memory."""
    by_layer: dict[int, tuple[str, ...]] = {}
    for tensor in tensors:
        by_layer[tensor.layer] = (*by_layer.get(tensor.layer, ()), tensor.name)
    alike = sorted(by_layer.items(), key=lambda held: (sorted(held[1]), held[0]))
    return ",".join(
        rf"blk\.({'|'.join(str(layer) for layer, _ in held)})\.({'|'.join(names)})\.=CPU"
        for names, held in groupby(alike, key=lambda held: sorted(held[1]))
    )


def _parts(rooms: Sequence[int], part: int) -> list[int]:
    """Return so many of `_PARTS` parts of each room."""
    return [room * part // _PARTS for room in rooms]


class _Deal(NamedTuple):
    """How many layers each GPU has, and how many bytes; the bytes of each that has no room.

    `is_whole` says that all have room.
    """

    layer_counts: tuple[int, ...]
    used_lengths: tuple[int, ...]
    left_lengths: tuple[int, ...]

    @property
    def is_whole(self) -> bool:
        return not self.left_lengths


def _deal(load: Load, rooms: Sequence[int], end: int) -> _Deal:
    """Deal layers out to GPUs in their order, as many as have room.

    For a prompt the first of them computes with all experts that are in memory, and has room for a
    copy of the longest tensor of them (ggml-backend.cpp: op offload).
    """
    items = [_on_gpu(layer, end) for layer in load.layers] + [load.output_length]
    counts: list[int] = []
    used: list[int] = []
    staged = load.staged_length if end else 0
    for room in rooms:
        count, length = 0, load.compute_length + (0 if any(counts) else staged)
        while items and length + items[0] <= room:
            length += items.pop(0)
            count += 1
        counts.append(count)
        used.append(length if count else 0)
    return _Deal(tuple(counts), tuple(used), tuple(items))


def _on_gpu(layer: LayerLoad, end: int) -> int:
    return layer.fixed_length + (0 if layer.layer < end else layer.expert_length)


def _gpus(load: Load, counts: Sequence[int]) -> dict[int, int]:
    """Map each layer to its GPU."""
    order = [gpu for gpu, count in enumerate(counts) for _ in range(count)]
    return {layer.layer: gpu for layer, gpu in zip(load.layers, order, strict=False)}
