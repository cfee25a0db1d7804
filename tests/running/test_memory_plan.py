"""How memory is divided."""

import pytest

from moepack.errors import RequestError
from moepack.running.memory_plan import Needs, largest_batch, step_length
from moepack.shape import FamilyShape, ModelShape

MIB = 1 << 20
SHAPE = ModelShape(
    (
        FamilyShape(1, "ffn_exps", 64, 3 * MIB, 6),
        FamilyShape(1, "ffn_chexps", 8, MIB, 6),
        FamilyShape(2, "ffn_exps", 32, 4 * MIB, 6),
        FamilyShape(3, "ffn_exps", 4, MIB),
    )
)
NEEDS = Needs(dense=100, context=20, step=30, experts=1000)


def test_a_step_takes_what_a_token_uses_in_all_layers() -> None:
    assert step_length(SHAPE) == (6 * 3 + 6 * 4 + 4) * MIB, "all of those whose number is unknown"


@pytest.mark.parametrize(
    ("room", "count"),
    [(1, 1), (24, 1), (47, 1), (48, 2), (100, 4), (127, 5), (128, 7), (191, 10), (192, 99)],
)
def test_batches_are_as_large_as_their_experts_have_room(room: int, count: int) -> None:
    assert largest_batch(SHAPE, room * MIB, 99) == count


def test_experts_get_what_the_rest_leaves_and_no_more_than_they_are() -> None:
    assert NEEDS.budget(500, available=10) == 380
    assert NEEDS.budget(None, available=400) == 280
    assert NEEDS.budget(5000, available=10) == 1000
    assert NEEDS.budget(NEEDS.floor, available=10) == NEEDS.step


@pytest.mark.parametrize(("memory", "available"), [(149, 1000), (None, 149)])
def test_below_the_floor_the_numbers_are_told(memory: int | None, available: int) -> None:
    with pytest.raises(RequestError) as refused:
        NEEDS.budget(memory, available)
    expected = "150 B (100 B dense, 20 B context, 30 B experts of one token)"
    assert expected in str(refused.value)
    assert "found 149 B" in str(refused.value)
