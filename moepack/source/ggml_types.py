"""GGML's tensor types, with the bytes that a row of each takes.

Facts of llama.cpp b11549 (ggml.c, `type_traits`) and ik_llama.cpp 8337e4cd (ggml.c, where some
types put `row_meta_length` bytes in front of every row's blocks, and `_R4`, `_R8`, `_R16` types
interleave that many rows). The tests compare the table with a real llama.cpp and with the gguf
package.
"""

from collections.abc import Iterator
from typing import NamedTuple


class GgmlType(NamedTuple):
    """One type: a row takes row_meta_length + ne0 / block_count * block_length bytes.

    `block_count` is elements in a quantisation block; `block_length`, `row_meta_length` and
    `tail_length` (once, at the tensor's end) are bytes; `interleaved_row_count` is the
    number of consecutive rows that are stored together.
    """

    type_id: int
    name: str
    block_count: int
    block_length: int
    row_meta_length: int = 0
    interleaved_row_count: int = 1
    tail_length: int = 0

    def row_length(self, ne0: int) -> int:
        """Return the bytes of a row of `ne0` elements, which must be whole blocks."""
        assert ne0 % self.block_count == 0
        return self.row_meta_length + ne0 // self.block_count * self.block_length

    def tensor_length(self, ne0: int, row_count: int) -> int:
        """Return the bytes of a tensor of `row_count` rows of `ne0` elements."""
        return self.row_length(ne0) * row_count + self.tail_length


_MAINLINE = """
    0 F32 1 4; 1 F16 1 2; 2 Q4_0 32 18; 3 Q4_1 32 20; 6 Q5_0 32 22; 7 Q5_1 32 24; 8 Q8_0 32 34;
    9 Q8_1 32 36; 10 Q2_K 256 84; 11 Q3_K 256 110; 12 Q4_K 256 144; 13 Q5_K 256 176;
    14 Q6_K 256 210; 15 Q8_K 256 292; 16 IQ2_XXS 256 66; 17 IQ2_XS 256 74; 18 IQ3_XXS 256 98;
    19 IQ1_S 256 50; 20 IQ4_NL 32 18; 21 IQ3_S 256 110; 22 IQ2_S 256 82; 23 IQ4_XS 256 136;
    24 I8 1 1; 25 I16 1 2; 26 I32 1 4; 27 I64 1 8; 28 F64 1 8; 29 IQ1_M 256 56; 30 BF16 1 2;
    34 TQ1_0 256 54; 35 TQ2_0 256 66; 39 MXFP4 32 17; 40 NVFP4 64 36; 41 Q1_0 128 18; 42 Q2_0 64 18;
"""
_IK_LLAMA = """
    31 Q4_0_4_4 32 18 0 4; 32 Q4_0_4_8 32 18 0 4; 33 Q4_0_8_8 32 18 0 8; 36 I2_S 4 1 0 1 32;
    97 Q8_0_X4 32 34; 98 Q8_1_X4 32 36; 99 Q8_2_X4 32 36; 133 Q6_0 32 26; 134 IQ1_BN 64 13 2;
    135 IQ2_BN 64 16 4; 136 Q8_K64 64 68; 137 IQ2_K 256 76; 138 IQ3_K 256 110; 139 IQ4_K 256 144;
    140 IQ5_K 256 176; 141 IQ6_K 256 212; 144 IQ4_KS 256 136 4; 145 IQ2_KS 256 70 2;
    146 IQ4_KSS 256 128 4; 147 Q8_K16 64 64 20; 148 Q8_K32 256 296; 149 Q8_KR8 256 296;
    150 Q8_K128 128 140; 151 Q8_KV 32 32 8; 152 IQ5_KS 256 168 4; 153 IQ2_KT 256 68 4;
    154 IQ3_KT 256 100 4; 155 IQ4_KT 256 128 4; 156 IQ3_KS 256 102 2; 157 IQ2_KL 256 86 2;
    158 IQ1_KT 256 56 4; 202 Q4_0_R8 32 18 0 8; 206 Q5_0_R4 32 22 0 4; 208 Q8_0_R8 32 34 0 8;
    210 Q2_K_R4 256 84 0 4; 211 Q3_K_R4 256 110 0 4; 212 Q4_K_R4 256 144 0 4;
    213 Q5_K_R4 256 176 0 4; 214 Q6_K_R4 256 210 0 4; 216 IQ2_XXS_R4 256 66 0 4;
    217 IQ2_XS_R4 256 74 0 4; 218 IQ3_XXS_R4 256 98 0 4; 219 IQ1_S_R4 32 6 2 4;
    220 IQ4_NL_R4 32 18 0 4; 221 IQ3_S_R4 256 110 0 4; 222 IQ2_S_R4 256 82 0 4;
    223 IQ4_XS_R8 256 136 0 8; 229 IQ1_M_R4 32 7 2 4; 230 BF16_R16 1 2 0 16; 233 Q6_0_R4 32 26 0 4;
    335 IQ2_BN_R4 64 16 4 4; 337 IQ2_K_R4 256 76 0 4; 338 IQ3_K_R4 256 110 0 4;
    339 IQ4_K_R4 256 144 0 4; 340 IQ5_K_R4 256 176 0 4; 344 IQ4_KS_R4 256 136 4 4;
    352 IQ5_KS_R4 256 168 4 4; 353 MXFP4_R8 32 17 0 8; 397 Q8_K_R16 256 258 0 16;
    398 Q8_KV_R8 32 32 4 8; 399 Q8_K_R8 256 258 0 8
"""
"""Each type by the fields of GgmlType, in their order. I2_S has one scale, for the whole tensor."""


def _types() -> Iterator[GgmlType]:
    for row in (_MAINLINE + _IK_LLAMA).split(";"):
        type_id, name, *numbers = row.split()
        yield GgmlType(int(type_id), name, *map(int, numbers))


TYPES = {ggml_type.type_id: ggml_type for ggml_type in _types()}


def type_name(type_id: int) -> str:
    """Return the name of a type, also of one that is not in the table."""
    ggml_type = TYPES.get(type_id)
    return ggml_type.name if ggml_type else f"type-{type_id}"
