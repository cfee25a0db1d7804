"""Columns of a terminal: how many a text takes, where lines break, what is shortened."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moepack.report.page import Page, Verbatim, padded, shortened, text_width, wrapped

TEXTS = st.text(st.sampled_from("ab模🚀é\u0301 -_."), max_size=60)
WORDS = st.lists(st.text(st.sampled_from("ab模é.,"), min_size=1, max_size=12), max_size=30)


@pytest.mark.parametrize(
    ("text", "width"), [("abc", 3), ("模型", 4), ("🚀", 2), ("e\u0301", 1), ("–…é", 3), ("", 0)]
)
def test_wide_characters_take_two_columns_and_marks_none(text: str, width: int) -> None:
    assert text_width(text) == width
    assert text_width(padded(text, 9)) == 9


@given(TEXTS, st.integers(1, 80))
def test_what_is_shortened_fits_and_keeps_both_ends(text: str, width: int) -> None:
    short = shortened(text, width)
    assert text_width(short) <= width
    if short != text:
        head, tail = short.split("…")
        assert text.startswith(head)
        assert text.endswith(tail)


def test_a_shard_keeps_its_number() -> None:
    name = "qwen3moe-Q4_K_M-ntfs-t6-00003-of-00006.gguf"
    assert shortened(name, 26) == "qwen3mo…0003-of-00006.gguf"


@given(WORDS, st.integers(12, 80), st.integers(0, 4))
def test_lines_break_at_words_and_none_is_lost(words: list[str], width: int, indent: int) -> None:
    line = " " * indent + " ".join(words)
    lines = wrapped(line, width)
    assert [word for one in lines for word in one.split()] == words
    longest = max(map(text_width, words), default=0)
    assert all(text_width(one) <= max(width, indent + 2 + longest) for one in lines)
    if text_width(line) > width:
        assert all(one.startswith(" " * (indent + 2)) for one in lines[1:])


def test_text_goes_on_below_itself_behind_a_label() -> None:
    lines = wrapped("  coverage   50 %: 196.0 KiB, 80 %: 516.0 KiB, 90 %: 720.0 KiB", 40)
    assert lines == [
        "  coverage   50 %: 196.0 KiB, 80 %:",
        "             516.0 KiB, 90 %: 720.0 KiB",
    ]


def test_a_number_stays_with_its_unit_and_a_command_in_one_piece() -> None:
    assert wrapped("it takes about 12.5 GiB", 20) == ["it takes about", "  12.5 GiB"]
    command = "`moepack run MODEL -- llama-server`"
    assert wrapped(f"a build for this one helps: {command}", 40)[1] == f"  {command}"


def test_a_page_wraps_all_but_what_is_to_be_pasted() -> None:
    page = Page("word " * 20, Verbatim("word " * 20))
    first, *others, last = page.text(30).split("\n")
    assert max(map(len, (first, *others))) <= 30
    assert last == "word " * 20
    assert re.fullmatch(r"(word ?)+\n(word ?)+", str(page))
