"""JSON that all parsers read alike; anything that one might read otherwise is refused.

Parsers differ in keys that stand twice, in numbers beyond 64 bits or beyond a double, in lone
surrogates, and in how deep they go. The rules bind values that no reader looks at as well.
"""

import json
import math
from collections.abc import Iterator
from itertools import chain
from typing import Any, NoReturn

MAX_DEPTH = 64
"""Objects and lists inside of each other, the outermost included."""
MIN_WHOLE, MAX_WHOLE = -(1 << 63), (1 << 63) - 1
_MAX_NUMBER_LENGTH = 400


def parse(data: bytes) -> Any:
    """Return the value of a JSON text in UTF-8; raises ValueError with the problem."""
    try:
        value = json.loads(
            data.decode(),
            object_pairs_hook=_without_duplicates,
            parse_constant=_no_constant,
            parse_float=_bounded_float,
            parse_int=_bounded_int,
        )
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    _check_depth_and_texts(value)
    return value


_END = object()
_TOO_DEEP = f"it is nested more than {MAX_DEPTH} levels deep"


def _check_depth_and_texts(value: Any) -> None:
    # The rest of each object and list that is open: no more values at a time than levels.
    levels: list[Iterator[Any]] = [iter((value,))]
    while levels:
        inner = next(levels[-1], _END)
        if inner is _END:
            levels.pop()
        elif isinstance(inner, str):
            _check_text(inner)
        elif isinstance(inner, dict | list):
            if len(levels) > MAX_DEPTH:
                raise ValueError(_TOO_DEEP)
            levels.append(
                iter(inner) if isinstance(inner, list) else chain.from_iterable(inner.items())
            )


def _check_text(text: str) -> None:
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("a text has half of a surrogate pair") from None


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({key for key, _ in pairs}) != len(pairs):
        raise ValueError("an object has the same key twice")
    return dict(pairs)


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


def _bounded_float(text: str) -> float:
    value = float(text) if len(text) <= _MAX_NUMBER_LENGTH else math.inf
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]} is beyond all numbers")
    return value


def _bounded_int(text: str) -> int:
    value = int(text) if len(text) <= len(str(MIN_WHOLE)) else MAX_WHOLE + 1
    if not MIN_WHOLE <= value <= MAX_WHOLE:
        raise ValueError(f"{text[:40]} is beyond all numbers")
    return value
