"""Values as text."""

import pytest

from moepack.report.values import parameters_text, rate_text, seconds_text, speed_text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (0, "0"),
        (0.52, "0.52"),
        (0.9996, "1"),
        (23.44, "23.4"),
        (999.6, "1,000"),
        (1014.2, "1,010"),
    ],
)
def test_a_rate_has_three_digits_and_no_exponent(value: float | None, text: str) -> None:
    assert rate_text(value) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (None, "–"),
        (999_999, "999,999"),
        (1_000_000, "1.0M"),
        (999_949_999, "999.9M"),
        (999_950_000, "1.0B"),
        (30_532_122_624, "30.5B"),
    ],
)
def test_parameters_are_in_the_unit_of_their_rounded_number(count: int | None, text: str) -> None:
    assert parameters_text(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "–"),
        (0, "0 s"),
        (0.0523, "0.05 s"),
        (9.96, "10 s"),
        (59.6, "1 min"),
        (200, "3 min 20 s"),
        (599.6, "10 min"),
        (7500, "2 h 5 min"),
        (3_600_000, "1,000 h"),
    ],
)
def test_times_are_written_in_one_form(seconds: float | None, text: str) -> None:
    assert seconds_text(seconds) == text


def test_an_unknown_speed_is_a_dash_and_others_have_one_kind_of_unit() -> None:
    texts = [speed_text(speed) for speed in (None, 0.4, 1 << 20, 3.5 * (1 << 30))]
    assert texts == ["–", "0 B/s", "1.0 MiB/s", "3.5 GiB/s"]
