"""Our type table against two others: the gguf package's, and a real llama.cpp's."""

import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from moepack.source.ggml_types import TYPES, type_name
from tests.support import llama_cpp
from tests.support.needs import needs_llama


def test_sizes_are_the_gguf_packages() -> None:
    """One entry of gguf 0.19.0 is wrong: Q8_1 has 36 bytes in C."""
    compared = 0
    for ggml_type, sizes in GGML_QUANT_SIZES.items():
        if ggml_type != GGMLQuantizationType.Q8_1:
            ours = TYPES[ggml_type.value]
            assert (ours.name, ours.block_count, ours.block_length) == (ggml_type.name, *sizes)
            compared += 1
    assert compared > 30


@needs_llama
def test_rows_are_as_long_as_in_llama_cpp_for_every_type() -> None:
    assert len(llama_cpp.type_ids()) > 30
    for type_id in llama_cpp.type_ids():
        ours = TYPES[type_id]
        assert ours.block_count == llama_cpp.block_size(type_id)
        assert ours.block_length == llama_cpp.type_size(type_id)
        assert ours.name.lower() == llama_cpp.type_name(type_id).lower()
        for blocks in (1, 7, 64):
            ne0 = blocks * ours.block_count
            assert ours.row_length(ne0) == llama_cpp.row_size(type_id, ne0)


@pytest.mark.parametrize(
    ("name", "ne0", "length"),
    [
        ("IQ4_KS", 256, 4 + 136),
        ("IQ2_KS", 512, 2 + 2 * 70),
        ("IQ1_BN", 128, 2 + 2 * 13),
        ("Q8_K16", 64, 20 + 64),
        ("IQ5_KS_R4", 256, 4 + 168),
        ("Q8_KV_R8", 64, 4 + 64),
        ("Q4_K_R4", 256, 144),
    ],
)
def test_row_meta_of_ik_types_stands_once_a_row(name: str, ne0: int, length: int) -> None:
    (ggml_type,) = (each for each in TYPES.values() if each.name == name)
    assert ggml_type.row_length(ne0) == length


def test_interleaved_types_say_how_many_rows_belong_together() -> None:
    for ggml_type in TYPES.values():
        suffix = ggml_type.name.rpartition("_R")[2]
        if "_R" in ggml_type.name and suffix.isdigit():
            assert ggml_type.interleaved_row_count == int(suffix)


def test_unknown_types_have_a_name_too() -> None:
    assert type_name(777) == "type-777"
