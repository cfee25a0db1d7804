"""Quantities as people write them in a machine's file: `23.5 GiB`, `31.5 GB/s`, `245 GFLOP/s`.

Exact both ways: text that was written is read as the same number.
"""

import re
from collections.abc import Mapping
from decimal import Decimal

from moepack.common.sizes import unit_length

_LENGTHS = {unit: 1024**n for n, unit in enumerate(("B", "KiB", "MiB", "GiB", "TiB"))}
_SPEEDS = {f"{unit}/s": factor for unit, factor in _LENGTHS.items()}
_SPEEDS |= {f"{unit}/s": 1000**n for n, unit in enumerate(("B", "KB", "MB", "GB", "TB"))}
"""Of speeds a GB is 10⁹ bytes, as drives and memory are sold; of lengths it is a GiB."""
_COMPUTE = {f"{prefix}FLOP/s": 1000**n for n, prefix in enumerate("GTP", 3)}
_QUANTITY = re.compile(r"(\d{1,25}(?:\.\d{1,25})?) ?([A-Za-z]{1,5}(?:/s)?)\Z", re.ASCII)


def parse_quantity(text: str) -> tuple[Decimal, str] | None:
    """Return a number and its unit, whether that is known or not; None for other texts."""
    match = _QUANTITY.match(text)
    return None if match is None else (Decimal(match[1]), match[2])


def unit_factor(unit: str, kind: str) -> int | None:
    """Return a unit in bytes, bytes a second or operations a second.

    `kind` is `length`, `bandwidth` or `compute`. None for units of something else.
    """
    if kind == "length":
        return unit_length(unit)
    return (_SPEEDS if kind == "bandwidth" else _COMPUTE).get(unit)


def length_text(length: float) -> str:
    """Write bytes in the unit that takes the fewest digits, without rounding."""
    return _shortest(length, _LENGTHS)


def speed_text(speed: float) -> str:
    """Write bytes a second in the unit that takes the fewest digits, without rounding."""
    return _shortest(speed, _SPEEDS)


def _shortest(value: float, units: Mapping[str, int]) -> str:
    by_length = sorted(units, key=lambda unit: units[unit], reverse=True)
    numbers = {
        unit: _plain(_quotient(value, units[unit]))
        for unit in by_length
        if value >= units[unit] or units[unit] == 1
    }
    shortest = min(numbers, key=lambda unit: len(numbers[unit].replace(".", "").strip("0")))
    return f"{numbers[shortest]} {shortest}"


def _quotient(value: float, unit: int) -> Decimal:
    # A float is divided by a power of two without rounding, its digits are not.
    is_power_of_two = unit & (unit - 1) == 0
    return Decimal(repr(value / unit)) if is_power_of_two else Decimal(repr(value)) / unit


def compute_text(speed: float) -> str:
    """Write floating-point operations a second."""
    number = Decimal(repr(speed))
    unit = next((unit for unit in reversed(_COMPUTE) if number >= _COMPUTE[unit]), "GFLOP/s")
    return f"{_plain(number / _COMPUTE[unit])} {unit}"


def _plain(number: Decimal) -> str:
    return f"{number.normalize():f}"
