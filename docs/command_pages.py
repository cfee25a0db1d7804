"""Write what `--help` says at the beginning of each page in docs/commands/: `make docs`."""

import inspect
import re
import textwrap
from pathlib import Path

import click

from moepack.cli import main
from moepack.cli.words.front import GROUPS, commands_below

FOLDER = Path(__file__).parent / "commands"
INDEX = FOLDER / "README.md"
BEGIN = "<!-- `make docs` writes this part, from the help of the command line. -->"
END = "<!-- The rest is written by hand: what the help cannot say. -->"


def page_of(name: str) -> Path:
    """Return the page of a command."""
    return FOLDER / f"{name.replace(' ', '-')}.md"


def pages() -> dict[Path, str]:
    """Return the text of the index and of each page as it should be, by path."""
    heads = {INDEX: "\n\n".join([*_head("", main.cli), *_groups()])}
    for name, command in commands_below(main.cli):
        heads[page_of(name)] = "\n\n".join([*_head(name, command), *_options(name, command)])
    return {path: f"{head}\n\n{END}{_rest(path)}" for path, head in heads.items()}


def _rest(path: Path) -> str:
    """Return what is written by hand on a page."""
    return path.read_text().partition(END)[2] if path.exists() else "\n"


def _head(name: str, command: click.Command) -> list[str]:
    """Return heading, usage, description and examples of a command."""
    title = f"moepack {name}".strip()
    usage = " ".join(command.get_usage(_context(title, command)).split()).removeprefix("Usage: ")
    paragraphs = re.split(r"\n\n+", inspect.cleandoc(command.help or ""))
    examples = [one for one in paragraphs if one.startswith("Example: ")]
    prose = [
        textwrap.fill(" ".join(one.split()), 120, break_long_words=False, break_on_hyphens=False)
        for one in paragraphs
        if one not in examples
    ]
    block = "\n".join(f"    {line.removeprefix('Example: ')}" for line in examples)
    heading = f"# {title}" if name else "# Commands"
    return [heading, BEGIN, f"    {usage}", *prose, *([block] if block else [])]


def _context(title: str, command: click.Command) -> click.Context:
    return click.Context(command, info_name=title, **command.context_settings)


def _groups() -> list[str]:
    """Return the groups of commands, as `moepack --help` has them, with links to the pages."""
    names = [name for name, _ in commands_below(main.cli)]
    blocks = []
    for title, commands in GROUPS.items():
        rows = ["| command | what it does |", "| --- | --- |"]
        for entry, text in commands.items():
            below = [name for name in names if name == entry or name.startswith(f"{entry} ")]
            links = ", ".join(f"[{name}]({page_of(name).name})" for name in below)
            rows.append(f"| {links} | {text} |")
        blocks += [f"**{title}**", "\n".join(rows)]
    return blocks


def _options(name: str, command: click.Command) -> list[str]:
    """Return the table of a command's options, or nothing if it has none."""
    context = _context(f"moepack {name}", command)
    records = [
        record
        for one in command.get_params(context)
        if isinstance(one, click.Option) and (record := one.get_help_record(context))
    ]
    rows = [_row(term, text) for term, text in records if "--help" not in term]
    return ["\n".join(["| option | meaning |", "| --- | --- |", *rows])] if rows else []


def _row(term: str, text: str) -> str:
    """Return the row of an option; a bar within a cell would end it."""
    names = re.sub(r"(?<!\S)(--?[\w-]+)", r"`\1`", term)
    cells = [cell.replace("|", "\\|") for cell in (names, text)]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text)
