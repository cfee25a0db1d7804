"""Stored models and files of theirs, for people."""

from moepack.common.sizes import count_text, size_text
from moepack.report.page import Block, Column, Page, Table
from moepack.report.values import UNKNOWN
from moepack.running.stored import HUB, StoredFacts, StoredItem

_COLUMNS = (
    Column("model", "l", least=20),
    Column("version", "l", rank=1),
    Column("kind", "l"),
    Column("length"),
    Column("last use", "l", rank=1),
    Column("", "l", rank=2),
)


def stored(facts: StoredFacts) -> Page:
    """Write stored files as a table, with their sum, and files of another origin."""
    if not facts.items and not facts.foreign:
        return Page("nothing: `moepack run hf://OWNER/NAME` fetches a model")
    blocks: list[Block] = [Table(_COLUMNS, [_row(item) for item in facts.items])]
    blocks.append(f"{size_text(facts.length)} in all, without the hub's own cache")
    if facts.foreign:
        blocks.append(f"{count_text(len(facts.foreign), 'file')} of another origin, left alone:")
        blocks += [f"  {path}" for path in facts.foreign]
    return Page(*blocks)


def _row(item: StoredItem) -> tuple[str, ...]:
    last_use = UNKNOWN if item.last_used is None else item.last_used.partition("T")[0]
    remark = "`hf cache rm` removes it" if item.kind == HUB else item.problem or ""
    return item.name, item.version or "", item.kind, size_text(item.length), last_use, remark


def what_is_removed(facts: StoredFacts) -> str:
    """Name the files to remove, and their length."""
    lines = [f"  {item.kind}, {size_text(item.length)}: {item.path}" for item in facts.items]
    return "\n".join([f"{size_text(facts.length)} will be removed:", *lines])


def removed(facts: StoredFacts) -> Page:
    """Write how much was removed."""
    return Page(f"{size_text(facts.length)} removed, {count_text(len(facts.items), 'item')}")
