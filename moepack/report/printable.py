"""Facts with control characters escaped: names in them come from files."""

import dataclasses
from collections.abc import Iterable, Mapping
from enum import Enum
from pathlib import PurePath
from typing import Any, TypeVar

from moepack.common.escaping import one_line

Facts = TypeVar("Facts")


def printable(facts: Facts) -> Facts:
    """Return facts with all texts and paths in them escaped, each on one line.

    Looks into all kinds of values that JSON has (see `json_text.to_json`). Records that need no
    escapes are returned as they are.
    """
    escaped: Any = _printable(facts)
    return escaped  # type: ignore[no-any-return]


def _printable(value: Any) -> Any:
    if isinstance(value, str):
        return value if isinstance(value, Enum) else one_line(value)
    if isinstance(value, PurePath):
        text = str(value)
        return value if text.isprintable() else type(value)(one_line(text))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value) if field.init]
        changes = _changes(value, names)
        return dataclasses.replace(value, **changes) if changes else value
    fields: Any = getattr(value, "_fields", None)
    if isinstance(value, tuple) and fields is not None:
        changes = _changes(value, fields)
        return type(value)(**dict(zip(fields, value, strict=True)) | changes) if changes else value
    if isinstance(value, Mapping):
        pairs = [(_printable(key), _printable(item)) for key, item in value.items()]
        both = zip(pairs, value.items(), strict=True)
        return value if all(a is c and b is d for (a, b), (c, d) in both) else dict(pairs)
    if isinstance(value, list | tuple | set | frozenset):
        items = [_printable(item) for item in value]
        is_same = all(a is b for a, b in zip(items, value, strict=True))
        return value if is_same else type(value)(items)
    return value


def _changes(record: Any, names: Iterable[str]) -> dict[str, Any]:
    """Return the fields of a record that need escapes, with them."""
    values = ((name, getattr(record, name)) for name in names)
    escaped = ((name, value, _printable(value)) for name, value in values)
    return {name: changed for name, value, changed in escaped if changed is not value}
