"""The scope of a verification: the whole pack, some layers, or a sample."""

import math
from collections.abc import Iterable, Sequence

from moepack.common.errors import PackError, RequestError
from moepack.common.sizes import parse_ranges, ranges_text
from moepack.pack.verifying.checked_pack import CheckedPack


def choose(
    pack: CheckedPack, layers: str | Iterable[int] | None, sample: str | float | None, seed: int
) -> None:
    """Choose the blobs and tensors of `layers`, and of these a `sample`; of a partial pack, a part.

    The same `seed` chooses the same of the same pack. Raises RequestError for a layer that the pack
    does not hold, and for a sample that is no share.
    """
    if layers is None and sample is None and pack.partial is None:
        return
    index = pack.index
    packed = sorted({family.layer for family in index.families})
    chosen = packed if layers is None else _layers(layers, packed)
    numbers = [
        number
        for family in index.families
        if family.layer in chosen
        for number in range(family.first_blob, family.first_blob + family.expert_count)
    ]
    for number, tensor in pack.tensors.items():
        block, layer, *_ = (*tensor.name.split("."), "")
        if layers is None or (block == "blk" and layer in map(str, chosen)):
            numbers.append(index.blob_count + number)
    if pack.partial is not None:
        numbers = [number for number in numbers if _is_here(pack, number)]
    if sample is not None:
        from random import Random  # here, since most verifications do without it

        count = min(len(numbers), math.ceil(len(numbers) * _share(sample)))
        numbers = Random(seed).sample(numbers, count)
    pack.chosen = frozenset(numbers)
    blob_count = sum(number < index.blob_count for number in numbers)
    if others := sorted(set(packed) - set(chosen)):
        pack.not_looked_at.append(f"layers {ranges_text(others)}")
    for count, all_count, noun in (
        (blob_count, index.blob_count, "blobs"),
        (len(numbers) - blob_count, index.tensor_count, "dense tensors"),
    ):
        if count < all_count:
            pack.not_looked_at.append(f"{all_count - count:,} of {all_count:,} {noun}")
    has_blobs = any(not file.is_shard for file in index.files)
    between = "blobs and tensors" if has_blobs else "tensors"
    pack.not_looked_at.append(f"padding between {between}")


def _is_here(pack: CheckedPack, number: int) -> bool:
    """Return whether the bytes of a blob or a tensor are in the directory of a partial pack."""
    assert pack.partial is not None
    try:
        if number < pack.index.blob_count:
            offset, length, _, _, file = pack.index.blob(number)
        else:
            tensor = pack.tensors[number - pack.index.blob_count]
            offset, length, file = tensor.offset, tensor.length, tensor.file
    except PackError:  # a finding of its own
        return False
    return pack.partial.covers(pack.index.files[file].name, offset, offset + length)


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
