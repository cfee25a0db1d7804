"""The scope of a verification: the whole pack, some layers, or a sample."""

import math
from collections.abc import Iterable, Sequence

from moepack.common.errors import PackError, RequestError
from moepack.common.sizes import parse_ranges, ranges_text
from moepack.pack.format.index import Index
from moepack.pack.reading.copies import Partial
from moepack.pack.verifying.extents import readable


def choose(
    index: Index,
    layers: str | Iterable[int] | None,
    sample: str | float | None,
    seed: int,
    partial: Partial | None = None,
) -> tuple[frozenset[int] | None, list[str]]:
    """Choose the blobs and tensors of `layers`, and of these a `sample`; of a partial pack, a part.

    Returns the numbers of the items to check (see `extents.Item`), None for all; the rest in words.
    The same `seed` chooses the same items of the same pack. Raises RequestError for a layer that
    the pack does not hold, and for a sample that is no share.
    """
    if layers is None and sample is None and partial is None:
        return None, []
    packed = sorted({family.layer for family in index.families})
    chosen = packed if layers is None else _layers(layers, packed)
    numbers = [
        number
        for family in index.families
        if family.layer in chosen
        for number in range(family.first_blob, family.first_blob + family.expert_count)
    ]
    for number, tensor in readable(index.tensor, index.tensor_count):
        block, layer, *_ = (*tensor.name.split("."), "")
        if layers is None or (block == "blk" and layer in map(str, chosen)):
            numbers.append(index.blob_count + number)
    if partial is not None:
        numbers = [number for number in numbers if _is_here(index, partial, number)]
    if sample is not None:
        from random import Random  # here, since most verifications do without it

        count = min(len(numbers), math.ceil(len(numbers) * _share(sample)))
        numbers = Random(seed).sample(numbers, count)
    blob_count = sum(number < index.blob_count for number in numbers)
    left_out = []
    if others := sorted(set(packed) - set(chosen)):
        left_out.append(f"layers {ranges_text(others)}")
    if blob_count < index.blob_count:
        count = index.blob_count - blob_count
        left_out.append(f"{count:,} of {index.blob_count:,} blobs")
    if len(numbers) - blob_count < index.tensor_count:
        count = index.tensor_count - len(numbers) + blob_count
        left_out.append(f"{count:,} of {index.tensor_count:,} dense tensors")
    has_blobs = any(not file.is_shard for file in index.files)
    left_out.append(f"padding between {'blobs and tensors' if has_blobs else 'tensors'}")
    return frozenset(numbers), left_out


def _is_here(index: Index, partial: Partial, number: int) -> bool:
    """Return whether the bytes of a blob or a tensor are in the directory of a partial pack."""
    try:
        if number < index.blob_count:
            offset, length, _, _, file = index.blob(number)
        else:
            tensor = index.tensor(number - index.blob_count)
            offset, length, file = tensor.offset, tensor.length, tensor.file
    except PackError:  # a finding of its own
        return False
    return partial.covers(index.files[file].name, offset, offset + length)


def _layers(layers: str | Iterable[int], packed: Sequence[int]) -> list[int]:
    try:
        chosen = sorted(set(parse_ranges(layers) if isinstance(layers, str) else layers))
    except ValueError as error:
        raise RequestError(f"not a list of layers: {error}") from None
    missing = sorted(set(chosen) - set(packed))
    if missing or not chosen:
        raise RequestError(
            f"the pack has no experts in layer {missing[0]}" if missing else "no layers are named",
            expected=f"layers of {ranges_text(packed)}",
        )
    return chosen


def _share(sample: str | float) -> float:
    """Read a share: 0.1, or `10%`."""
    try:
        if isinstance(sample, str) and sample.strip().endswith("%"):
            share = float(sample.strip().rstrip("%")) / 100
        else:
            share = float(sample)
        if 0 < share <= 1:
            return share
    except ValueError:
        pass
    raise RequestError("not a sample", expected="a share such as 10%", found=sample)
