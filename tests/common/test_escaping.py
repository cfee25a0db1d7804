"""Text that is safe to print, and that says all the same what it was."""

import subprocess
import unicodedata
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moepack.common import escaping
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
