"""Servers and stored models as text for people."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from moepack.common.sizes import count_text, size_text
from moepack.report.page import Column, Page, Table
from moepack.report.values import (
    UNKNOWN,
    length_text,
    number_text,
    rate_text,
    seconds_text,
    share_text,
    tokens_text,
)

if TYPE_CHECKING:
    from moepack.running.serving.served_model import ServedModel
    from moepack.running.stored import StoredFacts, StoredItem

_SERVERS = (
    *(Column("process"), Column("model", "l", least=12), Column("address", "l")),
    *(Column("up", rank=4), Column("context", rank=6), Column("requests", rank=5)),
    *(Column("tok/s", rank=1), Column("hits", rank=2), Column("experts in memory", rank=3)),
)


def served_model(model: ServedModel) -> str:
    """Write a model, and the texts that it computes at once."""
    texts = UNKNOWN if model.text_count is None else count_text(model.text_count, "text")
    return (
        f"model: {model.name}, {model.quantisation or UNKNOWN}, {length_text(model.length)}; "
        f"a context of {tokens_text(model.context)}, up to {texts} at once"
    )


def servers(servers: Sequence[Mapping[str, Any]]) -> Page:
    """Write the list of running servers."""
    if not servers:
        return Page("no server is running")
    return Page(Table(_SERVERS, list(map(_server_cells, servers))))


def _server_cells(server: Mapping[str, Any]) -> list[str]:
    waiting = f", {server['open_requests']:,} open" if server["open_requests"] else ""
    return [
        str(server["process"]),
        server["name"],
        server["url"],
        seconds_text(time.time() - server["began"]),
        number_text(server["context"]),
        f"{server['requests']:,}{waiting}",
        rate_text(server["tokens_per_second"]),
        share_text(server["hit_rate"]),
        f"{length_text(server['resident_length'])} of {length_text(server['budget'])}",
    ]


_STORED = (
    Column("model", "l", least=20),
    Column("version", "l", rank=1),
    Column("kind", "l"),
    Column("length"),
    Column("last use", "l", rank=1),
    Column("", "l", rank=2),
)


def stored(facts: StoredFacts) -> Page:
    """Write stored files as a table, with their sum."""
    if not facts.items:
        return Page("nothing: `moepack run hf://OWNER/NAME` fetches a model")
    table = Table(_STORED, [_item_cells(item) for item in facts.items])
    return Page(table, f"{size_text(facts.length)} in all, without the hub's own cache")


def _item_cells(item: StoredItem) -> tuple[str, ...]:
    from moepack.running.stored import HUB

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
