"""Lengths, alignments and ranges of numbers, as arithmetic and as people write them."""

import math
import operator
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import SupportsIndex, TypeVar, cast

from moepack.common.errors import RequestError

Item = TypeVar("Item", bound=SupportsIndex | str)

Size = int | str
"""Bytes, or a text such as `8GiB`; where a whole is known, also a share such as `25%`."""

_PREFIXES = "kmgt"
_MAX_SIZE = 1 << 63
LEAST_BARE = 1 << 12
"""A text without a unit and below that lacks its unit."""
_MOST_GIB = 1 << 8
"""Below that it was probably GiB."""
_EXAMPLES = "such as 8GiB, 512M or 1.5G"
# Compiled when they are needed: whoever only reads packs waits for neither.
_SIZE = r"(\d{1,20}|\d{1,3}(?:_\d{3}){1,6})(?:\.(\d{1,25}))? ?(%|[A-Za-z]{0,9})\Z"
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
    for unit, decimals in (("B", 0), ("KiB", 1), ("MiB", 1), ("GiB", 1)):
        if round(value, decimals) < 1024:  # the unit is that of the rounded number
            return f"{value:.{decimals}f} {unit}"
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
    """Write a number of things: `1 file`, `1,024 files`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def unit_length(unit: str) -> int | None:
    """Return the bytes of a unit: K, KB and KiB are 1024, in small letters too; None for others."""
    unit = unit.lower()
    if unit in ("", "b"):
        return 1
    prefix, rest = unit[:1], unit[1:]
    if rest not in ("", "b", "ib") or prefix not in _PREFIXES:
        return None
    return 1 << 10 * (_PREFIXES.index(prefix) + 1)


def parse_size(
    size: Size | SupportsIndex,
    argument: str | None = None,
    *,
    whole: int | None = None,
    least: int = LEAST_BARE,
) -> int:
    """Return the bytes of a size: a number, or a text such as `8GiB`.

    8G, 8GB and 8GiB are the same: 8 × 1024³ bytes. `50%` is of `whole` bytes. Parts of a byte are
    left out. A text without a unit is bytes, but 0 or no fewer than `least`. Raises RequestError,
    which names `argument`.
    """
    if not isinstance(size, str):
        return _whole_number(size, argument)
    match = re.match(_SIZE, size.strip(), re.ASCII)
    unit = None if match is None else 1 if match[3] == "%" else unit_length(match[3])
    if match is None or unit is None:
        raise _no_size(size, argument, None)
    fraction = match[2] or ""
    amount = int(match[1] + fraction) * unit
    divisor: int = 10 ** len(fraction)
    if match[3] == "%":
        return _share(size, argument, amount, divisor * 100, whole)
    length = amount // divisor
    if not match[3] and fraction:
        raise _no_size(size, argument, _forgotten_unit(match[1], fraction))
    if not match[3] and 0 < length < least:
        problem = f"{count_text(length, 'byte')} {'is' if length == 1 else 'are'} too few"
        hint = _forgotten_unit(match[1], "")
        raise RequestError(problem, argument=argument, hint=hint)
    if length >= _MAX_SIZE:
        raise RequestError("too large a size", argument=argument, found=size.strip()[:40])
    return length


def as_list(items: Item | Sequence[Item]) -> list[Item]:
    """Return one number or text, or several, as a list."""
    if isinstance(items, Iterable) and not isinstance(items, str):
        return list(items)
    return [cast(Item, items)]


def is_share(size: object) -> bool:
    """Return whether a size is a share such as `25%`, which means nothing without its whole."""
    return isinstance(size, str) and size.rstrip().endswith("%")


def _whole_number(size: SupportsIndex, argument: str | None) -> int:
    try:
        length = operator.index(size)
    except TypeError:
        raise _no_size(size, argument, "bytes are a whole number") from None
    if isinstance(size, bool) or length < 0:
        raise _no_size(size, argument, None)
    return length


def _share(size: str, argument: str | None, amount: int, divisor: int, whole: int | None) -> int:
    if amount > divisor:
        text = size.strip()
        raise RequestError("more than all", argument=argument, expected="up to 100%", found=text)
    if whole is None:
        hint = "a percentage says nothing here: give a size such as 8GiB"
        raise _no_size(size, argument, hint)
    return whole * amount // divisor


def _forgotten_unit(whole: str, fraction: str) -> str:
    unit = "GiB" if int(whole) < _MOST_GIB else "MiB"
    number = f"{int(whole)}{'.' * bool(fraction)}{fraction}"
    return f"a number without a unit is bytes: {number}{unit}?"


def _no_size(size: object, argument: str | None, hint: str | None) -> RequestError:
    shown = repr(size[:40]) if isinstance(size, str) else size
    return RequestError("not a size", argument=argument, expected=_EXAMPLES, found=shown, hint=hint)


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
    """Write a noun with ascending numbers: `layer 3`, `layers 0-3,7`."""
    return f"{noun}{'' if len(numbers) == 1 else 's'} {ranges_text(numbers)}"


def parse_layers(layers: str | Iterable[int], argument: str | None = None) -> tuple[int, ...]:
    """Return layers, ascending: their numbers, or ranges of these up to 65535, such as `0-3,7`.

    Raises RequestError for any other text, which names `argument`.
    """
    if not isinstance(layers, str):
        return tuple(sorted(set(layers)))
    numbers: set[int] = set()
    for item in layers.split(","):
        match = re.match(_RANGE, item, re.ASCII)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if first > last or last >= 1 << 16:
            problem, expected = "not a list of layers", "numbers and ranges such as 0-3,7"
            raise RequestError(problem, argument=argument, expected=expected, found=repr(item))
        numbers.update(range(first, last + 1))
    return tuple(sorted(numbers))


def gaps(start: int, end: int, ranges: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield the gaps between `start` and `end` that rising `ranges` leave."""
    for range_start, range_end in ranges:
        if range_start > start:
            yield start, range_start
        start = max(start, range_end)
    if end > start:
        yield start, end
