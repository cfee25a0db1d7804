"""Facts as JSON and CSV, and with their texts escaped: names in them come from files."""

import csv
import dataclasses
import io
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from pathlib import PurePath
from typing import Any, TypeVar

from moepack.common.escaping import one_line

JsonValue = None | bool | int | float | str | list["JsonValue"] | dict[str, "JsonValue"]
Facts = TypeVar("Facts")


def json_text(facts: object) -> str:
    """Return facts as the text of one JSON value; see `to_json`."""
    return escape_delete(json.dumps(to_json(facts), indent=2, allow_nan=False))


def csv_text(rows: Iterable[Mapping[str, object]], columns: Sequence[str]) -> str:
    """Return rows as CSV with a heading. Unknown cells are empty."""
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def rows_csv(facts: object, names: Iterable[str]) -> str:
    """Return the rows in the first of these fields that facts have as CSV.

    The columns are the fields of rows in JSON, and `terms.0.name` those within others and in lists.
    """
    body = to_json(facts)
    assert isinstance(body, dict)
    rows = next(rows for name in names if isinstance(rows := body.get(name), list))
    flat = [dict(_flattened("", row)) for row in rows]
    return csv_text(flat, list(dict.fromkeys(key for row in flat for key in row)))


def _flattened(name: str, value: JsonValue) -> Iterator[tuple[str, JsonValue]]:
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, inner in items:
            yield from _flattened(f"{name}.{key}" if name else str(key), inner)
    else:
        yield name, str(value).lower() if isinstance(value, bool) else value


def escape_delete(text: str) -> str:
    """Escape DEL in a JSON text: the only control character that JSON does not escape."""
    return text.replace("\x7f", "\\u007f")


def to_json(facts: object) -> JsonValue:
    """Return facts as values that JSON has.

    A dataclass, a named tuple or a mapping is an object with its fields in their order; other
    tuples and lists are arrays, sets are sorted arrays; a path is its text, an enumeration its
    value; an underscore that ends a name (`from_`) is Python's. None, and a number that JSON lacks
    (infinity), is null. Raises TypeError for all else.
    """
    if isinstance(facts, Enum):
        return to_json(facts.value)
    if facts is None or isinstance(facts, bool | int | str):
        return facts
    if isinstance(facts, float):
        return facts if math.isfinite(facts) else None
    if isinstance(facts, os.PathLike):
        return os.fsdecode(facts)
    if isinstance(facts, Mapping):
        return {str(to_json(key)): to_json(value) for key, value in facts.items()}
    if dataclasses.is_dataclass(facts):
        names = (field.name for field in dataclasses.fields(facts))
        return {name.rstrip("_"): to_json(getattr(facts, name)) for name in names}
    if isinstance(facts, tuple) and hasattr(facts, "_fields"):
        return {name: to_json(value) for name, value in zip(facts._fields, facts, strict=True)}
    if isinstance(facts, set | frozenset):
        return to_json(sorted(facts))
    if isinstance(facts, list | tuple):
        return [to_json(item) for item in facts]
    raise TypeError(f"JSON has no {type(facts).__name__}")


def printable(facts: Facts) -> Facts:
    """Return facts with all texts and paths in them escaped, each on one line."""
    return with_texts(facts, one_line)


def with_texts(facts: Facts, change: Callable[[str], str]) -> Facts:
    """Return facts with all texts and paths in them as `change` returns them.

    Looks into all kinds of values that JSON has (see `to_json`).
    """

    def changed(value: Any) -> Any:
        if isinstance(value, str):
            return value if isinstance(value, Enum) else change(value)
        if isinstance(value, PurePath):
            text = change(str(value))
            return value if text == str(value) else type(value)(text)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            names = [field.name for field in dataclasses.fields(value) if field.init]
            changes = {name: changed(getattr(value, name)) for name in names}
            return dataclasses.replace(value, **changes)
        if isinstance(value, Mapping):
            return {changed(key): changed(item) for key, item in value.items()}
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*map(changed, value))
        if isinstance(value, list | tuple | set | frozenset):
            return type(value)(map(changed, value))
        return value

    result: Facts = changed(facts)
    return result
