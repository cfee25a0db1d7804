"""Lengths, alignments and runs of numbers, as arithmetic and as people write them."""

import math
import re
from collections.abc import Iterable, Iterator, Sequence

_UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
# Compiled when they are needed: whoever only reads packs waits for neither.
_SIZE = r"(\d{1,18}) ?(B|KiB|MiB|GiB|TiB)?\Z"
_RANGE = r"\s*(\d{1,5})(?:-(\d{1,5}))?\s*\Z"


def divide_up(length: int, divisor: int) -> int:
    """Return how many pieces of `divisor` hold `length`."""
    return -(-length // divisor)


def align(offset: int, alignment: int) -> int:
    """Round `offset` up to a multiple of `alignment`."""
    return divide_up(offset, alignment) * alignment


def size_text(length: int) -> str:
    """Write a length in bytes for people: `1.5 GiB`."""
    value = float(length)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def speed_text(bytes_per_second: float) -> str:
    """Write bytes a second for people: `1.5 GiB/s`."""
    return f"{size_text(round(bytes_per_second))}/s"


def rate_text(value: float) -> str:
    """Write a rate with three digits and no exponent: `1,010`, `23.4`, `0.52`."""
    rounded = float(f"{value:.3g}")
    decimals = max(0, 2 - math.floor(math.log10(abs(rounded)))) if rounded else 0
    text = f"{rounded:,.{decimals}f}"
    return text.rstrip("0").rstrip(".") if decimals else text


def exact_size_text(length: int) -> str:
    """Write a length for people, and to the byte: `1.5 GiB (1,610,612,736 bytes)`."""
    exact = count_text(length, "byte")
    return exact if length < 1024 else f"{size_text(length)} ({exact})"


def count_text(count: int, noun: str) -> str:
    """Write how many there are of something: `1 file`, `1,024 files`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def parse_size(text: str) -> int:
    """Read a length in bytes, such as `4096`, `64 KiB` or `4GiB`; raise ValueError."""
    match = re.match(_SIZE, text, re.ASCII)
    if not match:
        raise ValueError(
            f"expected a whole number of bytes, KiB, MiB, GiB or TiB, found {text[:40]!r}"
        )
    return int(match[1]) * _UNITS[match[2] or "B"]


def ranges_text(numbers: Iterable[int]) -> str:
    """Write ascending numbers as ranges: `0-3,7`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def named_text(noun: str, numbers: Sequence[int]) -> str:
    """Write which ones of something, by ascending numbers: `layer 3`, `layers 0-3,7`."""
    return f"{noun}{'' if len(numbers) == 1 else 's'} {ranges_text(numbers)}"


def parse_ranges(text: str) -> tuple[int, ...]:
    """Read ranges of numbers up to 65535, such as `0-3,7`, ascending; raise ValueError."""
    numbers: set[int] = set()
    for item in text.split(","):
        match = re.match(_RANGE, item, re.ASCII)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if first > last or last >= 1 << 16:
            raise ValueError(f"expected numbers and ranges such as 0-3,7, found {item[:40]!r}")
        numbers.update(range(first, last + 1))
    return tuple(sorted(numbers))


def gaps(start: int, end: int, ranges: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield what lies between `start` and `end` and in none of `ranges`, which rise."""
    for range_start, range_end in ranges:
        if range_start > start:
            yield start, range_start
        start = max(start, range_end)
    if end > start:
        yield start, end
