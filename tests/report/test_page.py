"""Pages: no line is wider than the terminal, no cell is cut, and what is left out is said."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moepack.report.page import (
    Column,
    Page,
    Table,
    Verbatim,
    padded,
    shortened,
    text_width,
    wrapped,
)

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


CELLS = st.text(st.sampled_from("0123456789abMiB模"), max_size=9)


@st.composite
def tables(draw: st.DrawFn) -> Table:
    """Draw a table whose first column stays, and may have names."""
    ranks = draw(st.lists(st.integers(1, 4), max_size=6))
    least = draw(st.sampled_from([0, 8]))
    columns = [Column("name", "l", 0, least)]
    columns += [
        Column(f"n{number}", draw(st.sampled_from("lr")), rank) for number, rank in enumerate(ranks)
    ]
    names = st.text("name-", min_size=1, max_size=40 if least else 10)
    rows = draw(st.lists(st.tuples(names, *(CELLS for _ in ranks)), min_size=1, max_size=5))
    return Table(columns, rows, draw(st.integers(0, 4)))


@given(tables(), st.integers(16, 120))
def test_no_line_is_wider_than_the_terminal(table: Table, width: int) -> None:
    assert max(map(text_width, table.lines(width))) <= width


@given(tables(), st.integers(16, 120))
def test_cells_that_are_shown_are_whole_and_others_are_counted(table: Table, width: int) -> None:
    shown, every = table.widths(width), table.widths()
    assert {n for n, cells in enumerate(zip(*table.rows, strict=True)) if any(cells)} == {*every}
    heading, *lines = table.lines(width)
    for row, line in zip(table.rows, lines, strict=False):
        assert all(table.columns[n].least or row[n] in line for n in shown)
    text = " ".join(" ".join([heading, *lines[len(table.rows) :]]).split())
    left_out = [table.columns[n].rank for n in every if n not in shown]
    assert (f"{len(left_out)} column" in text) == bool(left_out)
    assert not left_out or min(left_out) > max(table.columns[n].rank for n in shown)


@given(tables())
def test_without_a_terminal_nothing_is_left_out_or_shortened(table: Table) -> None:
    lines = table.lines()
    assert not any("…" in line or "left out" in line for line in lines)
    for line, row in zip(lines[-len(table.rows) :], table.rows, strict=True):
        assert all(cell in line for cell in row)


def test_what_is_left_out_is_said_in_few_words() -> None:
    columns = [Column("a", "l"), Column("b", rank=1), Column("c", rank=2)]
    table = Table(columns, [("one", "1" * 20, "2" * 20)])
    note = "1 column left out: --json or a wider terminal shows it"
    assert " ".join(" ".join(table.lines(30)[2:]).split()) == note
    assert " ".join(" ".join(table.lines(20)).split()).startswith("a one 2 columns left out: ")
    assert table.lines(60)[0].split() == ["a", "b", "c"]


def test_a_name_is_shortened_before_a_column_is_left_out() -> None:
    columns = [Column("file", "l", least=12), Column("length", rank=1)]
    table = Table(columns, [("model-00001-of-00004.gguf", "123,456")])
    heading, line = table.lines(31)
    assert heading == "file                     length"
    assert line == "model-…1-of-00004.gguf  123,456"
