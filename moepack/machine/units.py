"""Amounts as people write them in a machine's file: `23.5 GiB`, `31.5 GB/s`, `245 GFLOP/s`.

Exact both ways: what is written is read as the same number.
"""

import re
from collections.abc import Mapping
from decimal import Decimal
from typing import NamedTuple

from moepack.sizes import unit_length

_DECIMAL = ("B", "KB", "MB", "GB", "TB")
_BINARY = ("B", "KiB", "MiB", "GiB", "TiB")
_LENGTHS = {unit: 1024**n for n, unit in enumerate(_BINARY)}
_SPEEDS = _LENGTHS | {unit: 1000**n for n, unit in enumerate(_DECIMAL)}
"""Of speeds a GB is 10⁹ bytes, as drives and memory are sold; of lengths it is a GiB."""
_FLOPS = {f"{prefix}FLOP/s": 1000**n for n, prefix in enumerate("GTP", 3)}
_AMOUNT = re.compile(r"(\d{1,25}(?:\.\d{1,25})?) ?([A-Za-z]{1,5}(?:/s)?)\Z", re.ASCII)


class Amount(NamedTuple):
    """A number with its unit, as it was written; `unit` may be none that is known here."""

    number: Decimal
    unit: str

    @property
    def is_speed(self) -> bool:
        """Whether it is bytes a second."""
        return self.unit.endswith("/s")

    @property
    def bytes(self) -> float | None:
        """The bytes, of a second or not; None where the unit is of something else."""
        if self.is_speed:
            factor = _SPEEDS.get(self.unit.removesuffix("/s"))
        else:
            factor = unit_length(self.unit)
        return None if factor is None else float(self.number * factor)

    @property
    def flops(self) -> float | None:
        """The operations a second; None where the unit is of something else."""
        factor = _FLOPS.get(self.unit)
        return None if factor is None else float(self.number * factor)


def parse_amount(text: str) -> Amount | None:
    """Read a number with a unit; None for what is none."""
    match = _AMOUNT.match(text)
    return None if match is None else Amount(Decimal(match[1]), match[2])


def length_text(length: float) -> str:
    """Write bytes in the unit that takes the fewest digits: it has no quotient that was rounded."""
    return _shortest(length, _LENGTHS)


def speed_text(speed: float) -> str:
    """Write bytes a second, in the unit that takes the fewest digits."""
    return f"{_shortest(speed, _SPEEDS)}/s"


def _shortest(value: float, units: Mapping[str, int]) -> str:
    by_length = sorted(units, key=lambda unit: units[unit], reverse=True)
    fitting = [unit for unit in by_length if value >= units[unit] or unit == "B"]
    numbers = {unit: _plain(_quotient(value, units[unit])) for unit in fitting}
    shortest = min(numbers, key=lambda unit: len(numbers[unit].replace(".", "").strip("0")))
    return f"{numbers[shortest]} {shortest}"


def _quotient(value: float, unit: int) -> Decimal:
    # A float is divided by a power of two without rounding, its digits are not.
    is_power_of_two = unit & (unit - 1) == 0
    return _exact(value / unit) if is_power_of_two else _exact(value) / unit


def compute_text(speed: float) -> str:
    """Write floating-point operations a second."""
    number = _exact(speed)
    unit = next((unit for unit in reversed(_FLOPS) if number >= _FLOPS[unit]), "GFLOP/s")
    return f"{_plain(number / _FLOPS[unit])} {unit}"


def _exact(value: float) -> Decimal:
    """Return a number by the digits that tell it from all others."""
    return Decimal(repr(value))


def _plain(number: Decimal) -> str:
    return f"{number.normalize():f}"
