"""Values as text, for people: what is not known is a dash, never 0."""

from moepack.sizes import size_text

UNKNOWN = "–"
"""What stands for a fact that is not known."""


def length_text(length: float | None) -> str:
    """Write a length in bytes: `1.5 GiB`."""
    return UNKNOWN if length is None else size_text(round(length))


def share_text(share: float | None) -> str:
    """Write a share of 0 to 1: `12.5%`."""
    return UNKNOWN if share is None else f"{share:.1%}"
