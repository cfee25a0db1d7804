"""GGML's tensor types, with the bytes that a row of each takes.

Facts of llama.cpp b11549 (ggml.c, `type_traits`) and ik_llama.cpp 8337e4cd (ggml.c, where some
types put `row_meta_length` bytes in front of every row's blocks, and `_R4`, `_R8`, `_R16` types
interleave that many rows). The tests compare the table with a real llama.cpp and with the gguf
package.
"""

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

    @property
    def sliceable(self) -> bool:
        """Whether an expert's bytes stand alone: a tail at the tensor's end belongs to all."""
        return not self.tail_length

    def row_length(self, ne0: int) -> int:
        """Return the bytes of a row of `ne0` elements, which must be whole blocks."""
        assert ne0 % self.block_count == 0
        return self.row_meta_length + ne0 // self.block_count * self.block_length

    def tensor_length(self, ne0: int, row_count: int) -> int:
        """Return the bytes of a tensor of `row_count` rows of `ne0` elements."""
        return self.row_length(ne0) * row_count + self.tail_length


_MAINLINE = (
    GgmlType(0, "F32", 1, 4),
    GgmlType(1, "F16", 1, 2),
    GgmlType(2, "Q4_0", 32, 18),
    GgmlType(3, "Q4_1", 32, 20),
    GgmlType(6, "Q5_0", 32, 22),
    GgmlType(7, "Q5_1", 32, 24),
    GgmlType(8, "Q8_0", 32, 34),
    GgmlType(9, "Q8_1", 32, 36),
    GgmlType(10, "Q2_K", 256, 84),
    GgmlType(11, "Q3_K", 256, 110),
    GgmlType(12, "Q4_K", 256, 144),
    GgmlType(13, "Q5_K", 256, 176),
    GgmlType(14, "Q6_K", 256, 210),
    GgmlType(15, "Q8_K", 256, 292),
    GgmlType(16, "IQ2_XXS", 256, 66),
    GgmlType(17, "IQ2_XS", 256, 74),
    GgmlType(18, "IQ3_XXS", 256, 98),
    GgmlType(19, "IQ1_S", 256, 50),
    GgmlType(20, "IQ4_NL", 32, 18),
    GgmlType(21, "IQ3_S", 256, 110),
    GgmlType(22, "IQ2_S", 256, 82),
    GgmlType(23, "IQ4_XS", 256, 136),
    GgmlType(24, "I8", 1, 1),
    GgmlType(25, "I16", 1, 2),
    GgmlType(26, "I32", 1, 4),
    GgmlType(27, "I64", 1, 8),
    GgmlType(28, "F64", 1, 8),
    GgmlType(29, "IQ1_M", 256, 56),
    GgmlType(30, "BF16", 1, 2),
    GgmlType(34, "TQ1_0", 256, 54),
    GgmlType(35, "TQ2_0", 256, 66),
    GgmlType(39, "MXFP4", 32, 17),
    GgmlType(40, "NVFP4", 64, 36),
    GgmlType(41, "Q1_0", 128, 18),
    GgmlType(42, "Q2_0", 64, 18),
)

_IK_LLAMA = (
    GgmlType(31, "Q4_0_4_4", 32, 18, 0, 4),
    GgmlType(32, "Q4_0_4_8", 32, 18, 0, 4),
    GgmlType(33, "Q4_0_8_8", 32, 18, 0, 8),
    # Two bits an element and one scale for the whole tensor, behind its last row.
    GgmlType(36, "I2_S", 4, 1, tail_length=32),
    GgmlType(97, "Q8_0_X4", 32, 34),
    GgmlType(98, "Q8_1_X4", 32, 36),
    GgmlType(99, "Q8_2_X4", 32, 36),
    GgmlType(133, "Q6_0", 32, 26),
    GgmlType(134, "IQ1_BN", 64, 13, 2),
    GgmlType(135, "IQ2_BN", 64, 16, 4),
    GgmlType(136, "Q8_K64", 64, 68),
    GgmlType(137, "IQ2_K", 256, 76),
    GgmlType(138, "IQ3_K", 256, 110),
    GgmlType(139, "IQ4_K", 256, 144),
    GgmlType(140, "IQ5_K", 256, 176),
    GgmlType(141, "IQ6_K", 256, 212),
    GgmlType(144, "IQ4_KS", 256, 136, 4),
    GgmlType(145, "IQ2_KS", 256, 70, 2),
    GgmlType(146, "IQ4_KSS", 256, 128, 4),
    GgmlType(147, "Q8_K16", 64, 64, 20),
    GgmlType(148, "Q8_K32", 256, 296),
    GgmlType(149, "Q8_KR8", 256, 296),
    GgmlType(150, "Q8_K128", 128, 140),
    GgmlType(151, "Q8_KV", 32, 32, 8),
    GgmlType(152, "IQ5_KS", 256, 168, 4),
    GgmlType(153, "IQ2_KT", 256, 68, 4),
    GgmlType(154, "IQ3_KT", 256, 100, 4),
    GgmlType(155, "IQ4_KT", 256, 128, 4),
    GgmlType(156, "IQ3_KS", 256, 102, 2),
    GgmlType(157, "IQ2_KL", 256, 86, 2),
    GgmlType(158, "IQ1_KT", 256, 56, 4),
    GgmlType(202, "Q4_0_R8", 32, 18, 0, 8),
    GgmlType(206, "Q5_0_R4", 32, 22, 0, 4),
    GgmlType(208, "Q8_0_R8", 32, 34, 0, 8),
    GgmlType(210, "Q2_K_R4", 256, 84, 0, 4),
    GgmlType(211, "Q3_K_R4", 256, 110, 0, 4),
    GgmlType(212, "Q4_K_R4", 256, 144, 0, 4),
    GgmlType(213, "Q5_K_R4", 256, 176, 0, 4),
    GgmlType(214, "Q6_K_R4", 256, 210, 0, 4),
    GgmlType(216, "IQ2_XXS_R4", 256, 66, 0, 4),
    GgmlType(217, "IQ2_XS_R4", 256, 74, 0, 4),
    GgmlType(218, "IQ3_XXS_R4", 256, 98, 0, 4),
    GgmlType(219, "IQ1_S_R4", 32, 6, 2, 4),
    GgmlType(220, "IQ4_NL_R4", 32, 18, 0, 4),
    GgmlType(221, "IQ3_S_R4", 256, 110, 0, 4),
    GgmlType(222, "IQ2_S_R4", 256, 82, 0, 4),
    GgmlType(223, "IQ4_XS_R8", 256, 136, 0, 8),
    GgmlType(229, "IQ1_M_R4", 32, 7, 2, 4),
    GgmlType(230, "BF16_R16", 1, 2, 0, 16),
    GgmlType(233, "Q6_0_R4", 32, 26, 0, 4),
    GgmlType(335, "IQ2_BN_R4", 64, 16, 4, 4),
    GgmlType(337, "IQ2_K_R4", 256, 76, 0, 4),
    GgmlType(338, "IQ3_K_R4", 256, 110, 0, 4),
    GgmlType(339, "IQ4_K_R4", 256, 144, 0, 4),
    GgmlType(340, "IQ5_K_R4", 256, 176, 0, 4),
    GgmlType(344, "IQ4_KS_R4", 256, 136, 4, 4),
    GgmlType(352, "IQ5_KS_R4", 256, 168, 4, 4),
    GgmlType(353, "MXFP4_R8", 32, 17, 0, 8),
    GgmlType(397, "Q8_K_R16", 256, 258, 0, 16),
    GgmlType(398, "Q8_KV_R8", 32, 32, 4, 8),
    GgmlType(399, "Q8_K_R8", 256, 258, 0, 8),
)

TYPES = {ggml_type.type_id: ggml_type for ggml_type in (*_MAINLINE, *_IK_LLAMA)}


def type_name(type_id: int) -> str:
    """Return the name of a type, also of one that is not in the table."""
    ggml_type = TYPES.get(type_id)
    return ggml_type.name if ggml_type else f"type-{type_id}"
