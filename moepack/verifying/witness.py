"""The verifier's own way from shards to expert slices and to what is no expert's.

This module shares nothing with the packer on purpose: another walk over the headers, and other
matching of names (by fields, not by pattern). A mistake on either side makes the two disagree, and
verification fail.
"""

from collections.abc import Sequence
from typing import NamedTuple

from moepack.errors import SourceError
from moepack.verifying.header_walk import WalkedShard, WalkedTensor, walk

_MATRICES = {"gate", "up", "down", "gate_up"}
_DIMENSIONS = {"weight": 3, "bias": 2, "scale": 1, "input_scale": 1}


class PartKey(NamedTuple):
    """A part by its layer and its name there."""

    layer: int
    part: str


class PartSlices(NamedTuple):
    """One part of all experts of a layer.

    `starts` are offsets from the start of shard number `shards[expert]`; `length` is bytes and
    `shape` GGUF order, both of one expert.
    """

    type_id: int
    shape: tuple[int, ...]
    length: int
    shards: Sequence[int]
    starts: Sequence[int]


class DenseSlice(NamedTuple):
    """A tensor that is no expert's: the number of its shard, its start there, its bytes."""

    type_id: int
    shape: tuple[int, ...]
    length: int
    shard: int
    start: int


class Witness(NamedTuple):
    """What the shards hold, in their order."""

    shards: tuple[WalkedShard, ...]
    parts: dict[PartKey, PartSlices]
    dense: dict[str, DenseSlice]

    def text(self, key: str) -> str | None:
        """Return a text of the model's metadata, None where it has none or a long one."""
        return self.shards[0].texts.get(key)


def hear(paths: Sequence[str], *, sort: bool = False) -> Witness:
    """Find what the shards at `paths` hold; with `sort`, in the order of the numbers they state."""
    shards = [walk(path) for path in paths]
    if sort:
        shards.sort(key=lambda shard: shard.numbers.get("split.no", 0))
    parts: dict[PartKey, PartSlices] = {}
    dense: dict[str, DenseSlice] = {}
    alone: dict[PartKey, dict[int, tuple[int, WalkedTensor]]] = {}
    for number, shard in enumerate(shards):
        for tensor in shard.tensors:
            fields = tensor.name.split(".")
            if _is_stacked(fields, tensor.shape):
                _check_length(shard, tensor, tensor.shape[-1])
                key = PartKey(int(fields[1]), ".".join(fields[2:]))
                parts[key] = _cut(number, tensor)
            elif _is_alone(fields, tensor.shape):
                _check_length(shard, tensor, 1)
                key = PartKey(int(fields[1]), f"{fields[2]}_exps.weight")
                alone.setdefault(key, {})[int(fields[3])] = (number, tensor)
            else:
                place = (tensor.length, number, tensor.start)
                dense[tensor.name] = DenseSlice(tensor.type_id, tensor.shape, *place)
    for key, by_expert in alone.items():
        parts[key] = _join(by_expert)
    return Witness(tuple(shards), parts, dense)


def _check_length(shard: WalkedShard, tensor: WalkedTensor, count: int) -> None:
    """Check that the tensor's length is known and that of `count` slices."""
    if not tensor.length:
        problem = "an empty tensor"
    elif tensor.is_open:
        problem = "its length is open"
    elif tensor.length % count:
        problem = "it does not divide into experts"
    else:
        return
    raise SourceError(problem, path=shard.path, place=f"tensor {tensor.name!r}")


def _cut(shard: int, tensor: WalkedTensor) -> PartSlices:
    """Cut a tensor of all experts into slices of the same length."""
    *shape, count = tensor.shape
    length = tensor.length // count
    starts = range(tensor.start, tensor.start + tensor.length, length)
    return PartSlices(tensor.type_id, tuple(shape), length, [shard] * count, starts)


def _join(by_expert: dict[int, tuple[int, WalkedTensor]]) -> PartSlices:
    """Take tensors of one expert each together."""
    in_order = [by_expert[expert] for expert in sorted(by_expert)]
    first = in_order[0][1]
    return PartSlices(
        first.type_id,
        first.shape,
        first.length,
        [shard for shard, _ in in_order],
        [tensor.start for _, tensor in in_order],
    )


def _is_stacked(fields: list[str], shape: tuple[int, ...]) -> bool:
    if len(fields) != 4 or fields[0] != "blk" or not _is_number(fields[1]):
        return False
    if len(shape) != _DIMENSIONS.get(fields[3]):
        return False
    words = fields[2].split("_")
    is_ffn = words[0] == "ffn" and words[-1] in ("exps", "chexps")
    return fields[2] == "attn_v_exps" or (is_ffn and "_".join(words[1:-1]) in _MATRICES)


def _is_alone(fields: list[str], shape: tuple[int, ...]) -> bool:
    return (
        len(fields) == 5
        and fields[0] == "blk"
        and fields[2] in ("ffn_gate", "ffn_up", "ffn_down")
        and _is_number(fields[1])
        and _is_number(fields[3])
        and fields[4] == "weight"
        and len(shape) == 2
    )


def _is_number(field: str) -> bool:
    return field.isascii() and field.isdigit()
