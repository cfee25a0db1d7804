"""Facts with their texts changed, such as by escapes: names in them come from files."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from pathlib import PurePath
from typing import Any, TypeVar

from moepack.common.escaping import one_line

Facts = TypeVar("Facts")


def printable(facts: Facts) -> Facts:
    """Return facts with all texts and paths in them escaped, each on one line.

    Records that need no escapes are returned as they are.
    """
    return with_texts(facts, one_line)


def with_texts(facts: Facts, change: Callable[[str], str]) -> Facts:
    """Return facts with all texts and paths in them as `change` returns them.

    Looks into all kinds of values that JSON has (see `json_text.to_json`). Records without a change
    are returned as they are.
    """
    changed: Any = _changed(facts, change)
    return changed  # type: ignore[no-any-return]


def _changed(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return value if isinstance(value, Enum) else change(value)
    if isinstance(value, PurePath):
        text = str(value)
        other = change(text)
        return value if other == text else type(value)(other)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value) if field.init]
        changes = _changes(value, names, change)
        return dataclasses.replace(value, **changes) if changes else value
    fields: Any = getattr(value, "_fields", None)
    if isinstance(value, tuple) and fields is not None:
        changes = _changes(value, fields, change)
        return type(value)(**dict(zip(fields, value, strict=True)) | changes) if changes else value
    if isinstance(value, Mapping):
        pairs = [(_changed(key, change), _changed(item, change)) for key, item in value.items()]
        both = zip(pairs, value.items(), strict=True)
        return value if all(a is c and b is d for (a, b), (c, d) in both) else dict(pairs)
    if isinstance(value, list | tuple | set | frozenset):
        items = [_changed(item, change) for item in value]
        is_same = all(a is b for a, b in zip(items, value, strict=True))
        return value if is_same else type(value)(items)
    return value


def _changes(record: Any, names: Iterable[str], change: Callable[[str], str]) -> dict[str, Any]:
    """Return the fields of a record with a change, and their new values."""
    values = ((name, getattr(record, name)) for name in names)
    triples = ((name, value, _changed(value, change)) for name, value in values)
    return {name: changed for name, value, changed in triples if changed is not value}
