"""Values as text."""

import pytest

from moepack.report.values import rate_text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (0, "0"),
        (0.00412, "0.00412"),
        (0.52, "0.52"),
        (0.9996, "1"),
        (5, "5"),
        (23.44, "23.4"),
        (99.96, "100"),
        (999.6, "1,000"),
        (1014.2, "1,010"),
        (123456.7, "123,000"),
    ],
)
def test_a_rate_has_three_digits_and_no_exponent(value: float | None, text: str) -> None:
    assert rate_text(value) == text
