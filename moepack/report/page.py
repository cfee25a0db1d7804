"""Pages for people: lines and tables, laid out for a terminal or as wide as they are."""

from collections.abc import Callable, Iterator

from moepack.report.table import Table
from moepack.report.widths import wrapped


class Verbatim(str):
    """A command to paste, or a file's text, which is never wrapped."""

    __slots__ = ()


Block = str | Table


class Page:
    """Blocks under one another: lines of text, commands and tables."""

    def __init__(self, *blocks: Block) -> None:
        self.blocks = blocks

    def __str__(self) -> str:
        return self.text()

    def with_texts(self, change: Callable[[str], str]) -> "Page":
        """Return the page with all texts changed but those of tables and verbatim ones."""
        changed = (
            block if isinstance(block, Table | Verbatim) else change(block) for block in self.blocks
        )
        return Page(*changed)

    def text(self, width: int | None = None) -> str:
        """Return the page in lines of up to `width` columns; without, nothing is wrapped.

        Longer are only verbatim texts, and words that are longer by themselves.
        """
        return "\n".join(line for block in self.blocks for line in _lines(block, width))


def _lines(block: Block, width: int | None) -> Iterator[str]:
    if isinstance(block, Table):
        yield from block.lines(width)
    elif width is None or isinstance(block, Verbatim):
        yield block
    else:
        for line in block.split("\n"):
            yield from wrapped(line, width)
