"""Text that is safe to print, and that says all the same what it was; and what errors say."""

import subprocess
import unicodedata
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moepack.common import escaping
from moepack.common.errors import MoepackError
from moepack.common.sizes import exact_size_text
from moepack.pack.verifying.report import Finding
from moepack.report.facts import printable

CHARACTERS = [
    *map(chr, range(0x20000)),  # nearly all that Unicode has; planes above: a sample, and the tags
    *map(chr, range(0x20000, 0x110000, 251)),
    *map(chr, range(0xE0000, 0xE0200)),
]
EMBEDDINGS_AND_ISOLATES = ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")


def is_obeyed(c: str) -> bool:
    """Return whether Unicode calls it a control, a surrogate, or one that turns a line around."""
    is_control = unicodedata.category(c) in ("Cc", "Cs") and c not in "\t\n"
    return is_control or unicodedata.bidirectional(c) in EMBEDDINGS_AND_ISOLATES


def test_of_all_characters_those_that_terminals_obey_are_escaped_in_text() -> None:
    others = "".join(c for c in CHARACTERS if not is_obeyed(c))
    assert escaping.lines(others) == others
    obeyed = [c for c in CHARACTERS if is_obeyed(c)]
    assert all(escaping.lines(c) != c for c in obeyed)
    assert escaping.lines("".join(obeyed)) == "".join(map(escaping.lines, obeyed))


def test_of_all_characters_those_that_are_not_printable_are_escaped_in_a_line() -> None:
    printable_text = "".join(c for c in CHARACTERS if c.isprintable())
    assert escaping.one_line(printable_text + "\n") == printable_text + r"\n"
    assert escaping.one_line("".join(CHARACTERS)).isprintable()


def test_text_of_people_stays_as_it_is() -> None:
    text = "naïve 漢字\u3000 עברית हिन्दी x\u200cy 👩\u200d💻\ttab\nline"
    assert escaping.lines(text) == text
    assert escaping.lines("one\r\ntwo\rthree\x1b[m") == "one\ntwo\\rthree\\x1b[m"


@pytest.mark.parametrize(
    "text",
    ["plain", "two words", "it's", "$HOME `x`", "a\n\x1b[2Jb'\\", "\u202ex", "\udcff", "é\x9b"],
)
def test_a_shell_reads_the_very_word(text: str) -> None:
    """Bash reads back the bytes of the name, though none of them moved a cursor."""
    word = escaping.shell_word(text)
    assert word.isprintable()
    script = f"printf %s {escaping.shell_words(['--', text])[3:]}"
    run = subprocess.run(["bash", "-c", script.encode()], capture_output=True, check=True)
    assert run.stdout == text.encode("utf-8", "surrogateescape")


class Row(NamedTuple):
    """Facts of some kind."""

    name: str
    path: Path
    findings: tuple[Finding, ...]
    counts: dict[str, list[str]]


TEXTS = st.text("ab/'\n\x1b\x9b\u202e\udcff漢")


@given(TEXTS, TEXTS)
def test_facts_keep_their_form_and_lose_what_is_not_printable(one: str, other: str) -> None:
    finding = Finding("kind", one, 1, tensor=other)
    row = Row(one, Path("a") / (other.replace("/", "") or "b"), (finding,), {one: [other]})
    escaped = printable(row)
    finding = Finding("kind", escaping.one_line(one), 1, tensor=escaping.one_line(other))
    texts = escaping.one_line(one), escaping.one_line(other)
    assert escaped == Row(
        texts[0], Path(escaping.one_line(str(row.path))), (finding,), {texts[0]: [texts[1]]}
    )


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
