"""Names of parts, whole and for short, and names that files may not have."""

import pytest

from moepack.format.names import is_plain_name, projection, short_name


@pytest.mark.parametrize(
    ("part", "short", "matrix"),
    [
        ("ffn_up_exps.weight", "up", "up"),
        ("ffn_gate_up_exps.bias", "gate_up.bias", "gate_up"),
        ("ffn_down_chexps.weight", "down", "down"),
        ("ffn_down_exps.input_scale", "down.input_scale", "down"),
        ("attn_v_exps.weight", "attn_v", "attn_v"),
    ],
)
def test_a_part_has_a_short_name_and_a_projection(part: str, short: str, matrix: str) -> None:
    assert (short_name(part), projection(part)) == (short, matrix)


@pytest.mark.parametrize(
    ("name", "is_plain"),
    [
        ("experts-00000.bin", True),
        ("pack.journal", False),
        ("Manifest.JSON", False),
        ("index.bin", False),
        ("../x", False),
        ("", False),
        (".hidden", False),
        ("a.", False),
        ("nul", False),
        ("Con.bin", False),
        ("com1.x.bin", False),
        ("com.bin", True),
        ("lpt10", True),
        ("manifest.json.tmp", False),
        ("n" * 255, True),
        ("n" * 256, False),
        ("ä.bin", False),
        ("a b.bin", False),
        ("a\n", False),
    ],
)
def test_a_data_file_has_a_plain_name_that_nothing_else_has(name: str, is_plain: bool) -> None:
    assert is_plain_name(name) == is_plain
