"""Make manual pages of docs/commands/: moepack.1, and one for each command.

The build of a wheel runs this without moepack and its libraries, so it reads the pages alone. They
have headings, paragraphs, lists, tables and code, and nothing within one another.
"""

import re
from collections.abc import Iterator
from pathlib import Path

COMMON = ("README", "common", "addresses", "trace-formats")
"""The pages of moepack.1, the index first."""


def write(pages: Path, target: Path, version: str) -> None:
    """Write the manual pages of a folder's pages into another folder."""
    commands = sorted(path.stem for path in pages.glob("*.md") if path.stem not in COMMON)
    for name, parts in {"": COMMON, **{name: (name,) for name in commands}}.items():
        title = f"moepack-{name}".rstrip("-")
        texts = [(pages / f"{part}.md").read_text() for part in parts]
        linked = re.findall(r"\]\(([\w-]+)\.md[#)]", "".join(texts)) if name else commands
        see = sorted({f"moepack-{one}(1)" for one in linked if one in commands and one != name})
        lines = [
            f'.TH {title.upper()} 1 "" "moepack {version}" "moepack"',
            *(".nh", ".ad l"),
            *(line for number, text in enumerate(texts) for line in _page(title, text, number)),
            *(".SH SEE ALSO", _text(", ".join([*(["moepack(1)"] if name else []), *see]))),
        ]
        (target / f"{title}.1").write_text("\n".join(lines) + "\n")


def _page(title: str, text: str, number: int) -> Iterator[str]:
    """Yield the lines of a page; the first of a manual has its name and synopsis."""
    text = re.sub(r"<!-- The rest .*?-->", "## Notes", text)
    heading, *blocks = _blocks(re.sub(r"<!--.*?-->\n+", "", text))
    if number:
        yield f".SH {_text(heading[2:].upper())}"
    else:
        usage, summary, *blocks = blocks
        yield from (".SH NAME", _text(f"{title} - {summary.rstrip('.')}"), ".SH SYNOPSIS")
        yield from (*_code(usage), ".SH DESCRIPTION", _text(summary))
    for block in blocks:
        yield from _block(block)


def _blocks(text: str) -> list[str]:
    """Return what blank lines separate; those within code separate nothing."""
    parts: list[str] = []
    for block in re.split(r"\n\n+", text.strip("\n")):
        if parts and (parts[-1].count("```") % 2 or (_is_code(parts[-1]) and _is_code(block))):
            parts[-1] += f"\n\n{block}"
        else:
            parts.append(block)
    return parts


def _is_code(block: str) -> bool:
    return block.startswith("    ")


def _block(block: str) -> Iterator[str]:
    """Yield the lines of a heading, code, a table, a list, or a paragraph."""
    if match := re.fullmatch(r"## (.+)", block):
        yield f".SH {_text(match[1].upper())}"
    elif match := re.fullmatch(r"\*\*(.+)\*\*", block):
        yield f".SS {_text(match[1])}"
    elif _is_code(block) or block.startswith("```"):
        yield from (".RS 4", *_code(block), ".RE")
    elif block.startswith("| "):
        yield from _table(block)
    else:
        for number, part in enumerate(re.split(r"(?:^|\n)- ", block)):
            if part.strip():
                yield ".IP \\(bu 2" if number else ".PP"
                yield _text(" ".join(part.split()))


def _code(block: str) -> list[str]:
    """Return the lines of code, as they are."""
    lines = re.sub(r"^(?: {4}|```.*\n?)", "", block, flags=re.MULTILINE).rstrip("\n").split("\n")
    return [".PP", ".nf", *map(_plain, lines), ".fi"]


def _table(block: str) -> Iterator[str]:
    """Yield the rows of a table: the first cell, and below it the others that are not empty."""
    cells = [re.split(r" *(?<!\\)\| *", line)[1:-1] for line in block.split("\n")]
    header, _, *rows = [[_text(cell) for cell in row if cell] for row in cells]
    yield from [".SH OPTIONS"] if header[0] == "option" else [".PP", f"\\fI{': '.join(header)}\\fR"]
    for first, *others in rows:
        yield from (".TP", first, "; ".join(others) or _text("–"))


def _text(text: str) -> str:
    """Return a paragraph in roff: code and strong words bold, links without their targets."""
    text = re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", text).replace("\\|", "|")
    pieces = re.split(r"`([^`]+)`", text)
    for number, piece in enumerate(pieces):
        plain = _plain(piece)
        if number % 2:
            pieces[number] = f"\\fB{plain}\\fR"
        else:
            plain = re.sub(r"\*\*(.+?)\*\*", r"\\fB\1\\fR", plain)
            pieces[number] = re.sub(r"(?<!\w)\*(\w[^*]*)\*(?!\w)", r"\\fI\1\\fR", plain)
    return "".join(pieces)


def _plain(text: str) -> str:
    """Return text in roff, as it is: no request, hyphen or quote is taken for another."""
    escaped = text.replace("\\", "\\e").replace("-", "\\-").replace("'", "\\(aq")
    letters = (one if one < "\x7f" else f"\\[u{ord(one):04X}]" for one in escaped)
    return re.sub(r"^\.", "\\&.", "".join(letters))
