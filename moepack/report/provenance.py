"""What a manifest says of its origin, as typed facts.

The format leaves `layout` and `hotness` to people: a pack reads well whatever stands there. So
nothing here is an error; what is missing, or is not of its kind, is None.
"""

from collections.abc import Callable
from typing import TypeVar

from moepack.format.source_entry import SourceEntry
from moepack.report.facts import (
    BlobRules,
    FileRules,
    HotnessFacts,
    LayoutFacts,
    PackedSourceFacts,
    PartRules,
    UsedExpertsFacts,
)

_MAX_NUMBER = (1 << 63) - 1

Item = TypeVar("Item")


def layout_facts(value: object) -> LayoutFacts:
    """Return the layout that a manifest states."""
    return LayoutFacts(
        name=_text(value, "name"),
        files=_inner(value, "files", _file_rules),
        blobs=_inner(value, "blobs", _blob_rules),
        parts=_inner(value, "parts", _part_rules),
    )


def source_facts(source: SourceEntry) -> PackedSourceFacts:
    """Return the source that a manifest states."""
    return PackedSourceFacts(
        architecture=source.architecture or None,
        name=source.name,
        experts_used=tuple(UsedExpertsFacts(*used) for used in source.experts_used.items()),
        context_length=source.context_length,
        mtp_layers=tuple(source.mtp_layers),
        shards=source.shards,
    )


def hotness_facts(value: object) -> HotnessFacts:
    """Return the hotness that a manifest states."""
    return HotnessFacts(
        digest=_text(value, "digest"),
        token_count=_number(value, "token_count"),
        request_count=_number(value, "request_count"),
        selection_count=_number(value, "selection_count"),
        measured_blob_count=_number(value, "measured_blob_count"),
        blob_count=_number(value, "blob_count"),
    )


def _file_rules(value: object) -> FileRules:
    return FileRules(_text(value, "group"), _text(value, "name"), _number(value, "max_length"))


def _blob_rules(value: object) -> BlobRules:
    return BlobRules(_text(value, "order"), _number(value, "alignment"))


def _part_rules(value: object) -> PartRules:
    return PartRules(
        projections=_texts(value, "projections"),
        alignment=_number(value, "alignment"),
        small_alignment=_number(value, "small_alignment"),
        codec=_text(value, "codec"),
    )


def _field(value: object, key: str) -> object:
    return value.get(key) if isinstance(value, dict) else None


def _text(value: object, key: str) -> str | None:
    text = _field(value, key)
    return text if isinstance(text, str) else None


def _number(value: object, key: str) -> int | None:
    number = _field(value, key)
    if not isinstance(number, int) or isinstance(number, bool):
        return None
    return number if 0 <= number <= _MAX_NUMBER else None


def _texts(value: object, key: str) -> tuple[str, ...] | None:
    texts = _field(value, key)
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        return None
    return tuple(texts)


def _inner(value: object, key: str, read: Callable[[object], Item]) -> Item | None:
    inner = _field(value, key)
    return read(inner) if isinstance(inner, dict) else None
