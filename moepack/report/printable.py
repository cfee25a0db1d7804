"""Facts with control characters escaped: names in them come from files."""

import dataclasses
from collections.abc import Mapping
from enum import Enum
from pathlib import PurePath
from typing import Any, TypeVar

from moepack.escaping import one_line

Facts = TypeVar("Facts")


def printable(facts: Facts) -> Facts:
    """Return facts with all texts and paths in them escaped, each on one line.

    Looks into what has a form in JSON (see `json_text.to_json`). What needs no escapes is given
    back as it is, the same object.
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
        changed = _changed({name: getattr(value, name) for name in names})
        return dataclasses.replace(value, **changed) if changed else value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        items = [_printable(item) for item in value]
        is_same = all(a is b for a, b in zip(items, value, strict=True))
        return value if is_same else type(value)(*items)
    if isinstance(value, Mapping):
        pairs = [(_printable(key), _printable(item)) for key, item in value.items()]
        both = zip(pairs, value.items(), strict=True)
        return value if all(a is c and b is d for (a, b), (c, d) in both) else dict(pairs)
    if isinstance(value, list | tuple | set | frozenset):
        items = [_printable(item) for item in value]
        is_same = all(a is b for a, b in zip(items, value, strict=True))
        return value if is_same else type(value)(items)
    return value


def _changed(values: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return those of several values that were escaped, by their names."""
    pairs = ((name, value, _printable(value)) for name, value in values.items())
    return {name: escaped for name, value, escaped in pairs if escaped is not value}
