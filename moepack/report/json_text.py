"""Facts as JSON."""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum

JsonValue = None | bool | int | float | str | list["JsonValue"] | dict[str, "JsonValue"]


def json_text(facts: object) -> str:
    """Return facts as the text of one JSON value; see `to_json`."""
    return escape_delete(json.dumps(to_json(facts), indent=2, allow_nan=False))


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
    if is_dataclass(facts):
        return {
            field.name.rstrip("_"): to_json(getattr(facts, field.name)) for field in fields(facts)
        }
    if isinstance(facts, tuple) and hasattr(facts, "_fields"):
        return {name: to_json(value) for name, value in zip(facts._fields, facts, strict=True)}
    if isinstance(facts, set | frozenset):
        return to_json(sorted(facts))
    if isinstance(facts, list | tuple):
        return [to_json(item) for item in facts]
    raise TypeError(f"JSON has no {type(facts).__name__}")
