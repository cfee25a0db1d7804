"""Values that may be unknown, in tests that know them."""

from typing import TypeVar

T = TypeVar("T")


def some(value: T | None) -> T:
    """Return a value that has to be known."""
    assert value is not None
    return value
