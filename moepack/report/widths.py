"""The width of text on a terminal: measured, wrapped at words, shortened in the middle."""

import re
import unicodedata

_UNIT = r"[(]?[\d.,]+ (?:[KMGT]?i?B|%|s|ms|min|h|tok|[GTP]FLOP)(?!\w)\S*"
_WORD = re.compile(rf"\s*[^\s`]*(?:`[^`]*`[^\s`]*)+|\s*{_UNIT}|\s*\S+")
"""A word with the space before it; a number and its unit are one, and a command in backquotes."""
_PLAIN_WORD = re.compile(r"\s*\S+")
_LABEL = re.compile(r"\s*\S+(?: \S+)*\s{2,}(?=\S)")
_WIDEST_LABEL = 0.4
"""Of a line: text goes on below itself behind a label that is no wider."""


def text_width(text: str) -> int:
    """Return how many columns of a terminal a text takes: two for wide characters, such as CJK."""
    return len(text) if text.isascii() else sum(map(_width, text))


def _width(character: str) -> int:
    if unicodedata.category(character) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def padded(text: str, width: int, *, is_right: bool = False) -> str:
    """Return a text with spaces up to `width` columns, before it if it is to stand on the right."""
    space = " " * (width - text_width(text))
    return space + text if is_right else text + space


def shortened(text: str, width: int) -> str:
    """Return a text in up to `width` columns, its middle replaced by `…` if it takes more.

    More is left of the end, where names of files have their numbers.
    """
    if text_width(text) <= width:
        return text
    end = _start_of(text[::-1], (width - 1) * 3 // 4)[::-1]
    return f"{_start_of(text, width - 1 - text_width(end))}…{end}"


def _start_of(text: str, width: int) -> str:
    count = 0
    for character in text:
        width -= _width(character)
        if width < 0:
            break
        count += 1
    return text[:count]


def wrapped(line: str, width: int) -> list[str]:
    """Break a line at words if it takes more than `width` columns.

    It goes on below its text: behind a label with two spaces, else two columns further in than it
    began. A word that is longer than a line is left whole, as a path is copied.
    """
    if text_width(line) <= width:
        return [line]
    indent = " " * _hang(line, width)
    lines = [""]
    for word in _words(line, width - len(indent)):
        if not lines[-1].strip() or text_width(lines[-1] + word) <= width:
            lines[-1] += word
        else:
            lines.append(indent + word.lstrip())
    return lines


def _hang(line: str, width: int) -> int:
    label = _LABEL.match(line)
    if label is not None and (hang := text_width(label[0])) <= _WIDEST_LABEL * width:
        return hang
    return len(line) - len(line.lstrip()) + 2


def _words(line: str, width: int) -> list[str]:
    """Return the words with the space before them; quoted commands stay whole if they fit."""
    words: list[str] = []
    for word in _WORD.findall(line):
        fits = text_width(word.strip()) <= width
        words += [word] if fits else _PLAIN_WORD.findall(word)
    return words
