"""Shares of files: none is forgotten, and none done twice."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moepack.common.errors import RequestError
from moepack.common.share import Share


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
