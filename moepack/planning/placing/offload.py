"""Experts in memory, as few as the VRAM of one or more GPUs allows, as options of llama.cpp.

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

from moepack.planning.footprint.weights import ExpertTensor
from moepack.planning.placing.request import PlacementRequest

_PARTS = 1000
"""Parts of a GPU's memory, to fill GPUs alike."""


class Offload(NamedTuple):
    """A placement: the expert tensors in memory, and the layers of each GPU.

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


def offload(request: PlacementRequest) -> Offload | None:
    """Return the placement on GPUs with the smallest N; None if none fits.

    All GPUs are filled to about the same share.
    """
    capacities = request.gpu_capacities

    def deal(part: int, end: int) -> tuple[Offload, list[int]]:
        return _deal(request, [capacity * part // _PARTS for capacity in capacities], end)

    for end in (0, *(layer.layer + 1 for layer in request.layers if layer.expert_length)):
        if not deal(_PARTS, end)[1]:
            least = bisect_left(range(_PARTS), True, key=lambda part: not deal(part, end)[1])
            return deal(least, end)[0]
    return None


def missing_length(request: PlacementRequest) -> int:
    """Return the missing bytes of VRAM, with all experts in memory."""
    capacities, compute_length = request.gpu_capacities, request.compute_length
    computing_count = sum(capacity > compute_length for capacity in capacities) or 1
    needed = request.fixed_length + compute_length * computing_count + request.weights.staged_length
    if needed > sum(capacities):
        return needed - sum(capacities)
    # Together they would be large enough, but layers are not divided.
    return sum(_deal(request, capacities, request.layers[-1].layer + 1)[1])


def filled(request: PlacementRequest, placed: Offload) -> tuple[ExpertTensor, ...]:
    """Return what stays in memory if VRAM is filled, tensor by tensor, from the last layer on.

    It takes a pattern (`-ot`) to say so, as N counts whole layers.
    """
    used_lengths = zip(request.gpu_capacities, placed.used_lengths, strict=True)
    left = [capacity - used for capacity, used in used_lengths]
    order = [gpu for gpu, count in enumerate(placed.layer_counts) for _ in range(count)]
    gpus = {layer.layer: gpu for layer, gpu in zip(request.layers, order, strict=False)}
    moved: set[ExpertTensor] = set()
    for tensor in sorted(placed.in_memory, key=lambda tensor: (-tensor.layer, -tensor.length)):
        gpu = gpus[tensor.layer]
        if tensor.length <= left[gpu]:
            left[gpu] -= tensor.length
            moved.add(tensor)
    return tuple(tensor for tensor in placed.in_memory if tensor not in moved)


def pattern(tensors: Sequence[ExpertTensor]) -> str:
    """Return the values of `-ot` that keep just these tensors in memory."""
    by_layer: dict[int, list[str]] = {}
    for tensor in tensors:
        by_layer.setdefault(tensor.layer, []).append(tensor.name)
    alike = sorted((sorted(names), layer) for layer, names in by_layer.items())
    return ",".join(
        rf"blk\.({'|'.join(str(layer) for _, layer in group)})\.({'|'.join(names)})\.=CPU"
        for names, group in groupby(alike, key=lambda item: item[0])
    )


def _deal(
    request: PlacementRequest, capacities: Sequence[int], end: int
) -> tuple[Offload, list[int]]:
    """Deal layers out to GPUs in their order, as many as fit, with N of `end`.

    Returns the placement, and the bytes of each layer that does not fit.

    For a prompt the first of them computes with all experts that are in memory, and has room for a
    copy of the longest tensor of them (ggml-backend.cpp: op offload).
    """
    items = [
        request.fixed_length_of(layer) + (0 if layer.layer < end else layer.expert_length)
        for layer in request.layers
    ]
    items.append(request.output_length)
    counts: list[int] = []
    used: list[int] = []
    staged = request.weights.staged_length if end else 0
    for capacity in capacities:
        count, length = 0, request.compute_length + (0 if any(counts) else staged)
        while items and length + items[0] <= capacity:
            length += items.pop(0)
            count += 1
        counts.append(count)
        used.append(length if count else 0)
    in_memory = tuple(one for layer in request.layers if layer.layer < end for one in layer.tensors)
    return Offload(end, in_memory, tuple(counts), tuple(used)), items
