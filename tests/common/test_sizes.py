"""Sizes as people type them, and shares of files by their sizes."""

import math
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moepack.common import sizes
from moepack.common.errors import RequestError
from moepack.common.share import Share
from moepack.running.streaming.budget import check_memory

GIB = 1 << 30

_around_units = st.builds(
    lambda power, less: (1 << power) - less, st.sampled_from([10, 20, 30, 40]), st.integers(0, 64)
)


@pytest.mark.parametrize(
    ("text", "length"),
    [
        *(
            (text, 8 * GIB)
            for text in ("8G", "8GB", "8GiB", "8g", "8gb", "8gib", "8 GiB", " 8GiB ")
        ),
        *((text, 8 * GIB) for text in ("8192M", "8192 MB", "8388608K", "8589934592", "8.0G")),
        ("1.5GiB", 3 * GIB // 2),
        ("512 MiB", GIB // 2),
        ("2T", 2048 * GIB),
        ("8_000_000", 8_000_000),
        ("0.1KiB", 102),
        ("7B", 7),
        ("0", 0),
        ("4096", 4096),
    ],
)
def test_a_size_is_read_however_it_is_written(text: str, length: int) -> None:
    assert sizes.parse_size(text) == length


@given(st.integers(0, (1 << 63) - 1))
def test_a_number_of_bytes_is_itself(length: int) -> None:
    assert sizes.parse_size(length) == sizes.parse_size(f"{length}B") == length


def test_what_is_printed_is_read_again() -> None:
    for length in (1, 1 << 10, 3 << 20, 3 << 29, 5 << 30, 7 << 40):
        assert sizes.parse_size(sizes.size_text(length)) == length


@given(st.integers(0, (1 << 53) - 1) | _around_units)
def test_a_size_is_in_the_unit_of_its_rounded_number(length: int) -> None:
    number, unit = sizes.size_text(length).split()
    assert float(number) < 1024 or unit == "TiB"
    assert float(number) >= 1 or length == 0
    assert math.isclose(length, float(number) * (sizes.unit_length(unit) or 0), rel_tol=0.05)


@pytest.mark.parametrize(
    ("text", "length"), [("50%", 500), ("12.5 %", 125), ("0%", 0), ("100%", 1000), ("0.05%", 0)]
)
def test_a_percentage_is_of_the_whole(text: str, length: int) -> None:
    assert sizes.is_share(text)
    assert sizes.parse_size(text, whole=1000) == length


@pytest.mark.parametrize(
    ("text", "problem", "hint"),
    [
        ("8", "8 bytes are too few", "a number without a unit is bytes: 8GiB?"),
        ("1", "1 byte is too few", "a number without a unit is bytes: 1GiB?"),
        ("2048", "2,048 bytes are too few", "a number without a unit is bytes: 2048MiB?"),
        ("1.5", "not a size", "a number without a unit is bytes: 1.5GiB?"),
        ("1,5GiB", "not a size", None),
        ("1_000", "1,000 bytes are too few", "a number without a unit is bytes: 1000MiB?"),
        ("007", "7 bytes are too few", "a number without a unit is bytes: 7GiB?"),
        ("007.5", "not a size", "a number without a unit is bytes: 7.5GiB?"),
        ("101%", "more than all", None),
        ("50%", "not a size", "a percentage says nothing here: give a size such as 8GiB"),
        *(
            (text, "not a size", None)
            for text in ("", "much", "8 pages", "8GX", "-1", "1e3", "1_0", "_1", "\u0668G", "%")
        ),
        ("9" * 5000, "not a size", None),
        ("9" * 20, "too large a size", None),
        ("999999999999999999T", "too large a size", None),
    ],
)
def test_what_is_no_size_is_refused_with_what_to_type(
    text: str, problem: str, hint: str | None
) -> None:
    with pytest.raises(RequestError, match=f"^memory: {re.escape(problem)}") as refused:
        sizes.parse_size(text, "memory", whole=1000 if text == "101%" else None)
    assert refused.value.hint == hint
    assert len(str(refused.value)) < 200


@pytest.mark.parametrize("size", [8.0, True, -1, None, [8], b"8G"])
def test_what_is_neither_a_number_of_bytes_nor_a_text_is_refused(size: object) -> None:
    with pytest.raises(RequestError, match="memory: not a size"):
        sizes.parse_size(size, "memory")  # type: ignore[arg-type]


def test_one_token_is_no_tokens() -> None:
    with pytest.raises(RequestError, match=r"expected 8 B, for 1 token at once"):
        check_memory(4, 8, 1)
    with pytest.raises(RequestError, match="for 1,024 tokens at once"):
        check_memory(4, 8, 1024)


def test_few_bytes_are_taken_where_they_make_sense() -> None:
    assert sizes.parse_size("64", least=0) == 64


@given(st.lists(st.integers(1, 1000), max_size=30), st.integers(1, 8))
def test_every_file_has_one_part_and_all_parts_have_like_lengths(
    file_lengths: list[int], count: int
) -> None:
    lengths = {f"file {number}": length for number, length in enumerate(file_lengths)}
    shares = [Share((number + 1, count)).names(lengths) for number in range(count)]
    assert sorted(name for share in shares for name in share) == sorted(lengths)
    loads = [sum(lengths[name] for name in share) for share in shares]
    assert max(loads) - min(loads) <= max(lengths.values(), default=0)


@pytest.mark.parametrize("part", ["0/3", "4/3", "3", "1/x", "-1/3", "1/2/3", (0, 3), (4, 3)])
def test_what_is_no_part_is_refused(part: Any) -> None:
    with pytest.raises(RequestError, match="not a part"):
        Share(part)
