"""Values as text, for people: an unknown one is a dash, never 0."""

from moepack.common import sizes
from moepack.common.sizes import count_text, size_text

UNKNOWN = "–"
"""The text for an unknown fact."""


def length_text(length: float | None) -> str:
    """Write a length in bytes: `1.5 GiB`."""
    return UNKNOWN if length is None else size_text(round(length))


def number_text(number: int | None) -> str:
    """Write a number: `1,024`."""
    return UNKNOWN if number is None else f"{number:,}"


def tokens_text(count: int | None) -> str:
    """Write a number of tokens: `192 tokens`."""
    return "an unknown number of tokens" if count is None else count_text(count, "token")


def parameters_text(count: int | None) -> str:
    """Write a number of parameters: `30.5B`."""
    if count is None or count < 10**6:
        return number_text(count)
    millions = round(count / 10**6, 1)
    return f"{millions}M" if millions < 1000 else f"{count / 10**9:.1f}B"


def speed_text(bytes_per_second: float | None) -> str:
    """Write bytes a second: `1.5 GiB/s`."""
    return UNKNOWN if bytes_per_second is None else sizes.speed_text(bytes_per_second)


def seconds_text(seconds: float | None) -> str:
    """Write a time: `0.25 s`, `1.2 s`, `42 s`, `3 min 20 s`, `25 min`, `2 h 5 min`."""
    if seconds is None:
        return UNKNOWN
    if seconds < 59.5:
        digits = 2 if 0 < seconds < 0.995 else 1 if 0 < seconds < 9.95 else 0
        return f"{seconds:.{digits}f} s"
    if seconds < 600:
        return _in_units(round(seconds), "min", "s")
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else _in_units(minutes, "h", "min")


def _in_units(count: int, unit: str, smaller: str) -> str:
    """Write a count of sixtieths in both units, or in the larger one if nothing is left over."""
    whole, rest = divmod(count, 60)
    return f"{whole:,} {unit} {rest} {smaller}" if rest else f"{whole:,} {unit}"


def share_text(share: float | None) -> str:
    """Write a share of 0 to 1: `12.5%`."""
    return UNKNOWN if share is None else f"{share:.1%}"


def rate_text(value: float | None) -> str:
    """Write a rate with three digits and no exponent: `1,010`, `23.4`, `0.52`."""
    return UNKNOWN if value is None else sizes.rate_text(value)
