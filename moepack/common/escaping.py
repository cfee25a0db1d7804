"""Text that comes from files, made safe to print: a name may move a cursor, or fake a line.

Escapes are Python's. JSON has its own, and needs none of this.
"""

import re
import shlex
from collections.abc import Iterable

MAX_FIELD_LENGTH = 200

_OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Characters that terminals obey, but for new lines and tabs, and that change text direction.

C0, DEL and C1; embeddings, overrides and isolates of Unicode's bidirectional algorithm; surrogates,
which stand for bytes that are not UTF-8.
"""


def one_line(text: str) -> str:
    """Escape all characters that are not printable (`str.isprintable`), new lines included."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else _escape(c) for c in text)


def shorten(value: object) -> str:
    """Return a value as one short line: it may come from a hostile file."""
    try:
        text = str(value)
    except ValueError:  # Python refuses to print a number of thousands of digits
        text = "a number of thousands of digits"
    return one_line(text if len(text) <= MAX_FIELD_LENGTH else text[:MAX_FIELD_LENGTH] + "…")


def lines(text: str) -> str:
    """Escape control characters but new lines and tabs; text in any language stays as it is.

    A carriage return before a new line is left out.
    """
    return _OBEYED.sub(lambda match: _escape(match[0]), text.replace("\r\n", "\n"))


def shell_word(text: str) -> str:
    """Quote a word for a shell; if it is not printable, for one that knows `$'…'`, such as bash."""
    if text.isprintable():
        return shlex.quote(text)
    escaped = (c if c.isprintable() and c not in "\\'" else _bytes_of(c) for c in text)
    return f"$'{''.join(escaped)}'"


def shell_words(words: Iterable[str]) -> str:
    """Quote the words of a command line."""
    return " ".join(map(shell_word, words))


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode()


def _bytes_of(character: str) -> str:
    is_byte = "\udc80" <= character <= "\udcff"  # one that Python could not read as UTF-8
    data = character.encode("utf-8", "surrogateescape" if is_byte else "surrogatepass")
    return "".join(f"\\x{byte:02x}" for byte in data)
