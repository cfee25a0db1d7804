"""How much of a pack is looked at: all of it, some layers, or a sample."""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from moepack.errors import PackError, RequestError
from moepack.format.index import Index
from moepack.sizes import parse_ranges, ranges_text


class Scope(NamedTuple):
    """What was chosen: the `items` (see `extents.Item`) to look at, None for all there are.

    `not_looked_at` says in words what is left out.
    """

    items: frozenset[int] | None
    not_looked_at: tuple[str, ...]


def choose(
    index: Index,
    layers: str | Iterable[int] | None,
    sample: str | float | None,
    seed: int,
) -> Scope:
    """Choose the blobs and tensors of `layers`, and of these a `sample`.

    The same `seed` chooses the same items of the same pack. Raises RequestError for a layer that
    the pack does not hold, and for what is no share.
    """
    if layers is None and sample is None:
        return Scope(None, ())
    held = sorted({family.layer for family in index.families})
    chosen = held if layers is None else _layers(layers, held)
    numbers = [
        number
        for family in index.families
        if family.layer in chosen
        for number in range(family.first_blob, family.first_blob + family.expert_count)
    ]
    numbers += _tensors(index, None if layers is None else chosen)
    if sample is not None:
        numbers = _sample(numbers, _share(sample), seed)
    return Scope(frozenset(numbers), _left_out(index, numbers, held, chosen))


def _layers(layers: str | Iterable[int], held: Sequence[int]) -> list[int]:
    try:
        chosen = sorted(set(parse_ranges(layers) if isinstance(layers, str) else layers))
    except ValueError as error:
        raise RequestError(f"not a list of layers: {error}") from None
    lacking = [layer for layer in chosen if layer not in set(held)]
    if lacking or not chosen:
        raise RequestError(
            f"the pack has no experts in layer {lacking[0]}" if lacking else "no layers are named",
            expected=f"layers of {ranges_text(held)}",
        )
    return chosen


def _tensors(index: Index, layers: Sequence[int] | None) -> list[int]:
    """Return the items of the dense tensors, of `layers` alone where these are given."""
    numbers = []
    for number in range(index.tensor_count):
        try:
            fields = index.tensor(number).name.split(".")
        except PackError:
            continue
        in_layer = fields[0] == "blk" and len(fields) > 1 and fields[1] in map(str, layers or ())
        if layers is None or in_layer:
            numbers.append(index.blob_count + number)
    return numbers


def _share(sample: str | float) -> float:
    """Read a share: 0.1, or `10%`."""
    try:
        is_percent = isinstance(sample, str) and sample.strip().endswith("%")
        share = float(sample.strip().rstrip("%")) / 100 if is_percent else float(sample)  # type: ignore[union-attr]
        if 0 < share <= 1:
            return share
    except ValueError:
        pass
    raise RequestError("not a sample", expected="a share such as 10%", found=sample)


def _sample(numbers: Sequence[int], share: float, seed: int) -> list[int]:
    from random import Random  # here, since most verifications do without it

    count = min(len(numbers), math.ceil(len(numbers) * share))
    return Random(seed).sample(numbers, count)


def _left_out(
    index: Index, numbers: Sequence[int], held: Sequence[int], chosen: Sequence[int]
) -> tuple[str, ...]:
    blob_count = index.blob_count - sum(number < index.blob_count for number in numbers)
    tensor_count = index.tensor_count - sum(number >= index.blob_count for number in numbers)
    left_out = []
    if other := sorted(set(held) - set(chosen)):
        left_out.append(f"layers {ranges_text(other)}")
    if blob_count:
        left_out.append(f"{blob_count:,} of {index.blob_count:,} blobs")
    if tensor_count:
        left_out.append(f"{tensor_count:,} of {index.tensor_count:,} dense tensors")
    has_blobs = any(not file.is_shard for file in index.files)
    what = "blobs and tensors" if has_blobs else "tensors"
    return (*left_out, f"padding between {what}")
