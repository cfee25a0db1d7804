"""The published formula comes out."""

import math

import pytest

from moepack.common.errors import RequestError
from moepack.planning.forecasting.published import published_formula


@pytest.mark.parametrize(
    ("options", "speed"),
    [
        ({}, 2.9715),
        ({"ram_bytes": 256 << 30}, 5.1360),
        ({"ssds_in_raid": 4}, 5.2723),
    ],
)
def test_what_its_script_prints(options: dict[str, float], speed: float) -> None:
    assert round(published_formula(**options).tokens_per_second, 4) == speed


def test_terms_add_up() -> None:
    facts = published_formula(ram_bytes=1 << 40, average_expert_turnover_per_batch=0)
    assert facts.drive_seconds == 0
    assert 1 / facts.tokens_per_second == facts.dense_seconds + facts.memory_seconds


@pytest.mark.parametrize("value", [-1, math.nan, math.inf])
def test_numbers_that_cannot_be_are_refused(value: float) -> None:
    with pytest.raises(RequestError, match="--ram_bytes.*expected 0 or more"):
        published_formula(ram_bytes=value)


def test_nothing_is_divided_by_nothing() -> None:
    with pytest.raises(RequestError, match="--batch_size.*expected more than 0"):
        published_formula(batch_size=0)
    nothing = {"active_per_layer": 0, "dense_gpu_latency_per_token": 0}
    with pytest.raises(RequestError, match="takes no time"):
        published_formula(
            **nothing, average_active_per_batch=0, average_expert_turnover_per_batch=0
        )
