"""The source that a pack was made from, as the manifest states it (FORMAT.md, "The manifest").

Restoring the shards relies on it, so unlike other provenance it is checked.
"""

import re
from typing import Any, NamedTuple, NoReturn

from moepack.errors import PackError
from moepack.format import records

_SHA256 = re.compile(r"[0-9a-f]{64}\Z")
_MAX_NAME_LENGTH = 255


ExpertsUsed = int | list[int | None]
"""A number for all layers, or one for each layer from 0 on, None where there are no experts."""


class ShardEntry(NamedTuple):
    """A shard: its plain name, what identifies it, and its SHA-256 where that is known.

    `header_length` is all bytes before the tensor data, padding included; `header_sha256` is of
    these.
    """

    name: str
    length: int
    header_length: int
    header_sha256: str
    sha256: str | None = None


class SourceEntry(NamedTuple):
    """What is known of a source without its files.

    `experts_used` says by family how many experts a token uses. None is what the metadata does not
    say.
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
        """Return how many experts of a family a token uses in a layer; None where unknown."""
        used = self.experts_used.get(family)
        if isinstance(used, list):
            return used[layer] if layer < len(used) else None
        return used


def decode(body: dict[str, Any], path: str) -> SourceEntry:
    """Read `source` of a manifest; raise PackError where a rule of the format is broken."""
    shards = typed(body, "shards", list, path)
    if not 1 <= len(shards) <= records.MAX_SHARDS:
        _fail(path, "source.shards", "out of bounds", f"1 to {records.MAX_SHARDS:,}", len(shards))
    context_length = nullable(body, "context_length", int, path)
    if context_length is not None and not are_counts([context_length]):
        _fail(path, "source.context_length", "out of bounds", found=context_length)
    mtp_layers = typed(body, "mtp_layers", list, path)
    if not are_counts(mtp_layers):
        _fail(path, "source.mtp_layers", "wrong kind of value", "a list of numbers", mtp_layers)
    return SourceEntry(
        architecture=typed(body, "architecture", str, path),
        name=nullable(body, "name", str, path),
        experts_used=_experts_used(typed(body, "experts_used", dict, path), path),
        context_length=context_length,
        mtp_layers=mtp_layers,
        shards=tuple(_shard(shard, f"source.shards[{n}]", path) for n, shard in enumerate(shards)),
    )


def typed(body: dict[str, Any], key: str, kind: type, path: str) -> Any:
    """Return the value of a key, which has to be there and of that kind."""
    if key not in body:
        _fail(path, key, "missing")
    value = body[key]
    if not isinstance(value, kind) or isinstance(value, bool):
        _fail(path, key, "wrong kind of value", _KINDS[kind], _kind_of(value))
    return value


def nullable(body: dict[str, Any], key: str, kind: type, path: str) -> Any:
    """Return the value of a key, which has to be there, of that kind or null."""
    if key in body and body[key] is None:
        return None
    return typed(body, key, kind, path)


def are_counts(values: list[Any]) -> bool:
    """Say whether all values are whole numbers that the format has room for."""
    return all(type(value) is int and 0 <= value <= records.MAX_LENGTH for value in values)


def _experts_used(used: dict[str, Any], path: str) -> dict[str, ExpertsUsed]:
    for family, count in used.items():
        counts = [c for c in count if c is not None] if isinstance(count, list) else [count]
        if not are_counts(counts):
            place = f"source.experts_used.{family}"
            _fail(path, place, "wrong kind of value", "a number, or a list of them", count)
    return used


def _shard(entry: Any, place: str, path: str) -> ShardEntry:
    if not isinstance(entry, dict):
        _fail(path, place, "wrong kind of value", "an object", _kind_of(entry))
    name = typed(entry, "name", str, path)
    if not is_file_name(name):
        _fail(path, f"{place}.name", "not the name of a file", found=repr(name))
    length, header_length = (typed(entry, key, int, path) for key in ("length", "header_length"))
    if not are_counts([length]) or not 0 <= header_length <= length:
        expected = "0 <= header_length <= length < 2^63"
        _fail(path, place, "lengths out of bounds", expected, f"{header_length}, {length}")
    sha256s = [typed(entry, "header_sha256", str, path), nullable(entry, "sha256", str, path)]
    for sha256 in sha256s:
        if sha256 is not None and not _SHA256.match(sha256):
            _fail(path, place, "not a SHA-256", "64 hexadecimal digits", sha256)
    return ShardEntry(name, length, header_length, *sha256s)


def is_file_name(name: str) -> bool:
    """Say whether a name may be given to a file in any folder, and names nothing outside of it."""
    try:
        length = len(name.encode())
    except UnicodeEncodeError:
        return False
    return (
        1 <= length <= _MAX_NAME_LENGTH and name not in (".", "..") and not set(name) & set("/\0")
    )


_KINDS: dict[type, str] = {
    str: "a text",
    int: "a whole number",
    list: "a list",
    dict: "an object",
}


def _kind_of(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return str(value).lower().replace("none", "null")
    return _KINDS.get(type(value), "another number")


def _fail(
    path: str, place: str, problem: str, expected: object = None, found: object = None
) -> NoReturn:
    raise PackError(problem, path=path, place=place, expected=expected, found=found)
