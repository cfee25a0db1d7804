"""Servers as text for people: their models at the start, and the list of those that run."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from moepack.common.sizes import count_text
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

_COLUMNS = (
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
    return Page(Table(_COLUMNS, list(map(_row, servers))))


def _row(server: Mapping[str, Any]) -> list[str]:
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
