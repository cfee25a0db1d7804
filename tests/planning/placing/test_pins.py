"""Whether single experts are worth pinning."""

import pytest

from moepack.common.shape import ROUTED_FAMILY, ExpertKey, FamilyShape, ModelShape
from moepack.planning.footprint.model import footprint_of
from moepack.planning.placing.pins import held_out_coverage, judge, pins_by_trace
from moepack.traces.formats.reading import read_trace
from moepack.traces.hotness.model import HeldOut, Hotness
from tests.support.models import FIXTURES, first_shard

SHAPE = ModelShape((FamilyShape(0, ROUTED_FAMILY, 4, 10, 2),))


@pytest.mark.parametrize(
    ("verdict", "static", "lrfu", "is_worth_it"),
    [
        ("static", 0.6, 0.3, True),
        ("static", None, None, True),
        ("static", 0.6, 0.56, False),
        ("static", 0.3, 0.6, False),
        ("recency", 0.6, 0.3, False),
        ("unknown", None, None, False),
    ],
)
def test_the_gate_and_lrfu_decide(
    verdict: str, static: float | None, lrfu: float | None, is_worth_it: bool
) -> None:
    pins = judge(verdict, "why", static, lrfu, 100)
    assert pins.pin_length == (100 if is_worth_it else 0)
    assert (pins.static_hit_rate, pins.lrfu_hit_rate) == (static, lrfu)
    assert judge(verdict, "why", static, lrfu, -5).pin_length == 0


def hotness(counts: tuple[int, ...], held_out: tuple[int, ...] | None) -> Hotness:
    def by_expert(numbers: tuple[int, ...]) -> dict[ExpertKey, int]:
        return {ExpertKey(0, expert): count for expert, count in enumerate(numbers)}

    half = None if held_out is None else HeldOut("time", 10, by_expert(held_out))
    return Hotness("hot.csv", by_expert(counts), 20, 0, held_out=half)


def test_what_is_ranked_is_not_what_is_measured() -> None:
    """Learned are 1, 7, 2 and 0; the hottest two are 1 and 2, which have 3 of 8 held out."""
    measured = hotness((1, 8, 4, 5), (0, 1, 2, 5))
    assert held_out_coverage(measured, SHAPE, 20) == 3 / 8
    assert held_out_coverage(measured, SHAPE, 19) == 1 / 8
    assert held_out_coverage(measured, SHAPE, 9) == 0
    assert held_out_coverage(measured, SHAPE, 40) == 1


def test_experts_of_other_layers_take_no_room_from_those_that_are_cached() -> None:
    shape = footprint_of(first_shard("qwen3moe")).weights.shape
    budget = shape.routed_length // 4
    with read_trace(FIXTURES / "qwen3moe-trace.csv", model=shape) as trace:
        whole, part = (pins_by_trace(trace, budget, 0, layers) for layers in ((0, 1), (0,)))
    assert (part.lrfu_hit_rate or 0) > (whole.lrfu_hit_rate or 0)
