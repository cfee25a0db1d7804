"""Values of JSON files that other programs may have written: each of its kind, or ValueError."""

from typing import Any

_MOST = 1 << 62


def number(entry: Any, key: str) -> int:
    """Return a whole number, 0 or more; raise ValueError for anything else."""
    value = entry[key]
    if type(value) is not int or not 0 <= value < _MOST:
        raise ValueError(f"{key} is no whole number")
    return value


def text(entry: Any, key: str) -> str:
    """Return a text; raise ValueError for anything else."""
    value = entry[key]
    if not isinstance(value, str) or "\0" in value:
        raise ValueError(f"{key} is no text")
    return value
