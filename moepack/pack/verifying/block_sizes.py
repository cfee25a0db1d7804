"""The block sizes of GGML's types, as the verifier knows them.

A table of its own, so that an error in the packer's is found here. The tests compare it with
FORMAT.md, and as far as that goes with the gguf package.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple


class BlockSize(NamedTuple):
    """A block of a type: how many elements it has, and its length in bytes.

    A row begins with `meta` bytes, `rows` of them are stored as one unit, and a tensor ends with
    `tail` bytes.
    """

    type_name: str
    element_count: int
    length: int
    meta: int = 0
    rows: int = 1
    tail: int = 0


_TYPES = {
    1: (
        "0 F32 4, 1 F16 2, 24 I8 1, 25 I16 2, 26 I32 4, 27 I64 8, 28 F64 8, 30 BF16 2, "
        "230 BF16_R16 2 rows=16"
    ),
    4: "36 I2_S 1 tail=32",
    32: (
        "2 Q4_0 18, 3 Q4_1 20, 6 Q5_0 22, 7 Q5_1 24, 8 Q8_0 34, 9 Q8_1 36, 20 IQ4_NL 18, "
        "31 Q4_0_4_4 18 rows=4, 32 Q4_0_4_8 18 rows=4, 33 Q4_0_8_8 18 rows=8, 39 MXFP4 17, "
        "97 Q8_0_X4 34, 98 Q8_1_X4 36, 99 Q8_2_X4 36, 133 Q6_0 26, 151 Q8_KV 32 meta=8, "
        "202 Q4_0_R8 18 rows=8, 206 Q5_0_R4 22 rows=4, 208 Q8_0_R8 34 rows=8, "
        "219 IQ1_S_R4 6 meta=2 rows=4, 220 IQ4_NL_R4 18 rows=4, 229 IQ1_M_R4 7 meta=2 rows=4, "
        "233 Q6_0_R4 26 rows=4, 353 MXFP4_R8 17 rows=8, 398 Q8_KV_R8 32 meta=4 rows=8"
    ),
    64: (
        "40 NVFP4 36, 42 Q2_0 18, 134 IQ1_BN 13 meta=2, 135 IQ2_BN 16 meta=4, 136 Q8_K64 68, "
        "147 Q8_K16 64 meta=20, 335 IQ2_BN_R4 16 meta=4 rows=4"
    ),
    128: "41 Q1_0 18, 150 Q8_K128 140",
    256: (
        "10 Q2_K 84, 11 Q3_K 110, 12 Q4_K 144, 13 Q5_K 176, 14 Q6_K 210, 15 Q8_K 292, "
        "16 IQ2_XXS 66, 17 IQ2_XS 74, 18 IQ3_XXS 98, 19 IQ1_S 50, 21 IQ3_S 110, 22 IQ2_S 82, "
        "23 IQ4_XS 136, 29 IQ1_M 56, 34 TQ1_0 54, 35 TQ2_0 66, 137 IQ2_K 76, 138 IQ3_K 110, "
        "139 IQ4_K 144, 140 IQ5_K 176, 141 IQ6_K 212, 144 IQ4_KS 136 meta=4, "
        "145 IQ2_KS 70 meta=2, 146 IQ4_KSS 128 meta=4, 148 Q8_K32 296, 149 Q8_KR8 296, "
        "152 IQ5_KS 168 meta=4, 153 IQ2_KT 68 meta=4, 154 IQ3_KT 100 meta=4, "
        "155 IQ4_KT 128 meta=4, 156 IQ3_KS 102 meta=2, 157 IQ2_KL 86 meta=2, "
        "158 IQ1_KT 56 meta=4, 210 Q2_K_R4 84 rows=4, 211 Q3_K_R4 110 rows=4, "
        "212 Q4_K_R4 144 rows=4, 213 Q5_K_R4 176 rows=4, 214 Q6_K_R4 210 rows=4, "
        "216 IQ2_XXS_R4 66 rows=4, 217 IQ2_XS_R4 74 rows=4, 218 IQ3_XXS_R4 98 rows=4, "
        "221 IQ3_S_R4 110 rows=4, 222 IQ2_S_R4 82 rows=4, 223 IQ4_XS_R8 136 rows=8, "
        "337 IQ2_K_R4 76 rows=4, 338 IQ3_K_R4 110 rows=4, 339 IQ4_K_R4 144 rows=4, "
        "340 IQ5_K_R4 176 rows=4, 344 IQ4_KS_R4 136 meta=4 rows=4, "
        "352 IQ5_KS_R4 168 meta=4 rows=4, 397 Q8_K_R16 258 rows=16, 399 Q8_K_R8 258 rows=8"
    ),
}
"""By the elements of a block: number, name, bytes of a block, then other fields of a BlockSize."""


def _sizes() -> Iterator[tuple[int, BlockSize]]:
    for element_count, types in _TYPES.items():
        for number, name, length, *others in map(str.split, types.split(",")):
            extra = {key: int(value) for key, _, value in (one.partition("=") for one in others)}
            yield int(number), BlockSize(name, element_count, int(length), **extra)


BLOCK_SIZES = dict(_sizes())
"""By the number of the type in GGUF."""


def stated_length(type_id: int, shape: tuple[int, ...]) -> int | None:
    """Return the bytes of a tensor; None if the type is unknown or the shape no whole blocks."""
    size = BLOCK_SIZES.get(type_id)
    ne0 = shape[0] if shape else 1
    if size is None or ne0 % size.element_count:
        return None
    if 0 in shape:
        return 0
    row_length = size.meta + ne0 // size.element_count * size.length
    return math.prod(shape[1:]) * row_length + size.tail
