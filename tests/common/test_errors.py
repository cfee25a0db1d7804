"""What errors say to people."""

import pytest

from moepack.common.errors import MoepackError
from moepack.common.sizes import exact_size_text


@pytest.mark.parametrize(
    ("value", "text"), [(7, "7"), (17_408, "17,408"), (-4096, "-4,096"), ("4096", "4096")]
)
def test_numbers_have_separators_and_texts_stay_as_they_are(value: object, text: str) -> None:
    error = MoepackError("wrong", expected=value, found=value)
    assert str(error) == f"wrong, expected {text}, found {text}"
    assert error.expected is value


def test_a_number_of_a_hostile_file_takes_no_time() -> None:
    assert len(str(MoepackError("wrong", found=1 << (1 << 24)))) < 300


@pytest.mark.parametrize(
    ("length", "text"),
    [
        (1, "1 byte"),
        (1023, "1,023 bytes"),
        (17_408, "17.0 KiB (17,408 bytes)"),
        (3 << 29, "1.5 GiB (1,610,612,736 bytes)"),
    ],
)
def test_lengths_are_said_for_people_and_to_the_byte(length: int, text: str) -> None:
    assert exact_size_text(length) == text
