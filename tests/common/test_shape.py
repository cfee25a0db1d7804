"""The model's shape, sizes and runs of numbers: what all rooms share."""

import pytest

from moepack.common import sizes
from moepack.common.errors import RequestError
from moepack.common.shape import FamilyShape, ModelShape

MODEL = ModelShape(
    (
        FamilyShape(1, "ffn_exps", 8, 100, 2),
        FamilyShape(1, "ffn_chexps", 4, 10),
        FamilyShape(2, "attn_v_exps", 3, 7),
        FamilyShape(5, "ffn_exps", 16, 200, 4),
    ),
    dense_length=1000,
    mtp_layers=(5,),
)


def test_a_shape_tells_what_routers_choose_from_and_what_it_weighs() -> None:
    assert MODEL.layers == (1, 2, 5)
    assert MODEL.expert_counts == {1: 8, 5: 16}
    assert MODEL.experts_used == 4
    assert MODEL.expert_length == 800 + 40 + 21 + 3200
    assert str(MODEL) == "layers 1 to 5, up to 16 experts"
    assert MODEL.without_mtp().layers == (1, 2)
    assert MODEL.without_mtp().experts_used == 2


def test_what_is_not_known_of_a_shape_is_none() -> None:
    empty = ModelShape((FamilyShape(0, "attn_v_exps", 3, 7),))
    assert empty.experts_used is None
    assert empty.dense_length is None
    assert str(empty) == "no layers with experts"


def test_runs_of_numbers_are_read_as_they_are_written() -> None:
    assert sizes.ranges_text((0, 1, 2, 3, 7)) == "0-3,7"
    assert sizes.named_text("layer", (0, 1, 7)) == "layers 0-1,7"
    assert sizes.named_text("layer", (7,)) == "layer 7"
    assert sizes.parse_layers("7, 0-3") == (0, 1, 2, 3, 7)
    for text in ("", "x", "3-1", "1-", "-1", "65536", "1,,2", "0-99999"):
        with pytest.raises(RequestError, match="not a list of layers, expected numbers and ranges"):
            sizes.parse_layers(text)
