"""Names of parts, whole and for short, and names that files may not have."""

import pytest

from moepack.pack.format.names import projection, short_name


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
