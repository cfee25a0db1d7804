"""The source that a pack was made from, as the manifest states it (FORMAT.md, "The manifest").

Restoring the shards relies on it, so unlike other provenance it is checked.
"""

import re
from typing import Any, NamedTuple

from moepack.common.fields import Fields
from moepack.pack.format import records

_SHA256 = re.compile(r"[0-9a-f]{64}\Z")
_MAX_NAME_LENGTH = 255

ExpertsUsed = int | list[int | None]
"""A number for all layers, or one for each layer from 0 on, None for a layer without experts."""


class ShardEntry(NamedTuple):
    """A shard: its plain name, its length and header, and its SHA-256 if known.

    `header_length` is all bytes before the tensor data, padding included; `header_sha256` is of
    these.
    """

    name: str
    length: int
    header_length: int
    header_sha256: str
    sha256: str | None = None


class SourceEntry(NamedTuple):
    """The source's metadata; a value is None if the source does not state it.

    `experts_used` has the number of experts that a token uses, by family.
    """

    architecture: str
    name: str | None
    experts_used: dict[str, ExpertsUsed]
    context_length: int | None
    mtp_layers: list[int]
    shards: tuple[ShardEntry, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the entry as the manifest holds it."""
        return self._asdict() | {"shards": [shard._asdict() for shard in self.shards]}

    def experts_used_in(self, family: str, layer: int) -> int | None:
        """Return how many experts of a family a token uses in a layer; None if unknown."""
        used = self.experts_used.get(family)
        if isinstance(used, list):
            return used[layer] if layer < len(used) else None
        return used


def decode(fields: Fields) -> SourceEntry:
    """Read `source` of a manifest; raise PackError if it breaks a rule of the format."""
    shards = tuple(map(_shard, fields.objects("shards")))
    if not 1 <= len(shards) <= records.MAX_SHARDS:
        fields.fail("shards", "out of bounds", f"1 to {records.MAX_SHARDS:,}", f"{len(shards):,}")
    if len({shard.name for shard in shards}) != len(shards):
        fields.fail("shards", "two shards have the same name")
    is_known = fields.optional("context_length", int) is not None
    mtp_layers = fields.optional("mtp_layers", list) or []
    if not are_counts(mtp_layers):
        fields.fail("mtp_layers", "wrong kind of value", "a list of numbers", mtp_layers)
    return SourceEntry(
        architecture=fields.typed("architecture", str),
        name=fields.nullable("name", str),
        experts_used=_experts_used(fields),
        context_length=fields.number("context_length", 0, records.MAX_LENGTH) if is_known else None,
        mtp_layers=mtp_layers,
        shards=shards,
    )


def _experts_used(source: Fields) -> dict[str, ExpertsUsed]:
    if source.optional("experts_used", dict) is None:
        return {}
    fields = source.inner("experts_used")
    for family, count in fields.body.items():
        counts = [c for c in count if c is not None] if isinstance(count, list) else [count]
        if not are_counts(counts):
            fields.fail(family, "wrong kind of value", "a number, or a list of them", count)
    return fields.body


def _shard(fields: Fields) -> ShardEntry:
    name = fields.typed("name", str)
    if not is_file_name(name):
        fields.fail("name", "not the name of a file", actual=repr(name))
    length = fields.number("length", 1, records.MAX_LENGTH)
    has_sha256 = fields.nullable("sha256", str) is not None
    return ShardEntry(
        name=name,
        length=length,
        header_length=fields.number("header_length", 1, length),
        header_sha256=sha256(fields, "header_sha256"),
        sha256=sha256(fields, "sha256") if has_sha256 else None,
    )


def sha256(fields: Fields, key: str) -> str:
    """Return a SHA-256 in hexadecimal digits."""
    text: str = fields.typed(key, str)
    if not _SHA256.match(text):
        fields.fail(key, "not a SHA-256", "64 hexadecimal digits in lower case", text)
    return text


def are_counts(values: list[Any]) -> bool:
    """Return whether all values are whole numbers within the format's limits."""
    return all(type(value) is int and 0 <= value <= records.MAX_LENGTH for value in values)


def is_file_name(name: str) -> bool:
    """Return whether a name can be that of a file in any folder, and of nothing outside it."""
    is_folder = name in ("", ".", "..")
    return len(name.encode()) <= _MAX_NAME_LENGTH and not is_folder and not set(name) & set("/\0")
