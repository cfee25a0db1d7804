"""Values as text, for people: what is not known is a dash, never 0."""

import math

from moepack.sizes import size_text

UNKNOWN = "–"
"""What stands for a fact that is not known."""


def length_text(length: float | None) -> str:
    """Write a length in bytes: `1.5 GiB`."""
    return UNKNOWN if length is None else size_text(round(length))


def share_text(share: float | None) -> str:
    """Write a share of 0 to 1: `12.5%`."""
    return UNKNOWN if share is None else f"{share:.1%}"


def rate_text(value: float | None) -> str:
    """Write a rate with three digits and no exponent: `1,010`, `23.4`, `0.52`."""
    if value is None:
        return UNKNOWN
    rounded = float(f"{value:.3g}")
    decimals = max(0, 2 - math.floor(math.log10(abs(rounded)))) if rounded else 0
    text = f"{rounded:,.{decimals}f}"
    return text.rstrip("0").rstrip(".") if decimals else text
