"""The block sizes of GGML's types, as the verifier knows them.

A table of its own, so that an error in the packer's is found here. It has the types of llama.cpp
alone: for those that only forks know the gaps between tensors are the witness. The tests compare it
with the gguf package.
"""

import math
from typing import NamedTuple


class BlockSize(NamedTuple):
    """A block of a type: how many elements it holds, and in how many bytes."""

    type_name: str
    element_count: int
    length: int


BLOCK_SIZES = {
    number: BlockSize(name, element_count, length)
    for element_count, types in {
        1: "0 F32 4, 1 F16 2, 24 I8 1, 25 I16 2, 26 I32 4, 27 I64 8, 28 F64 8, 30 BF16 2",
        32: "2 Q4_0 18, 3 Q4_1 20, 6 Q5_0 22, 7 Q5_1 24, 8 Q8_0 34, 9 Q8_1 36, 20 IQ4_NL 18, "
        "39 MXFP4 17",
        64: "40 NVFP4 36, 42 Q2_0 18",
        128: "41 Q1_0 18",
        256: "10 Q2_K 84, 11 Q3_K 110, 12 Q4_K 144, 13 Q5_K 176, 14 Q6_K 210, 15 Q8_K 292, "
        "16 IQ2_XXS 66, 17 IQ2_XS 74, 18 IQ3_XXS 98, 19 IQ1_S 50, 21 IQ3_S 110, 22 IQ2_S 82, "
        "23 IQ4_XS 136, 29 IQ1_M 56, 34 TQ1_0 54, 35 TQ2_0 66",
    }.items()
    for number, name, length in (
        (int(fields[0]), fields[1], int(fields[2])) for fields in map(str.split, types.split(","))
    )
}
"""By the number of the type in GGUF."""


def stated_length(type_id: int, shape: tuple[int, ...]) -> int | None:
    """Return the bytes of a tensor; None if the type is unknown or the shape no whole blocks."""
    size = BLOCK_SIZES.get(type_id)
    if size is None or (shape and shape[0] % size.element_count):
        return None
    return math.prod(shape) // size.element_count * size.length
