"""Checked JSON and TOML: values are of their kind, and an error names the place of any other."""

import json
import math
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, NoReturn

from moepack.common import digest
from moepack.common.errors import MoepackError, PackError, RequestError

MAX_DEPTH = 64
"""Objects and lists inside of each other, the outermost included."""
MIN_WHOLE, MAX_WHOLE = -(1 << 63), (1 << 63) - 1
_MAX_NUMBER_LENGTH = 400
_END = object()
_TOO_DEEP = f"it is nested more than {MAX_DEPTH} levels deep"


class Fields:
    """The keys of one object of a JSON file, or of one table of a TOML file.

    `place` is its name in messages, empty for all of a file; `error` is the class of its errors.
    """

    def __init__(
        self, body: Any, place: str, path: str, error: type[MoepackError] = PackError
    ) -> None:
        self.place = place
        self.path = path
        self._error = error
        self.body: dict[str, Any] = body
        if not isinstance(body, dict):
            self.fail("", "wrong kind of value", _KINDS[dict], kind_of(body))

    def __contains__(self, key: str) -> bool:
        return key in self.body

    def allow(self, *keys: str) -> None:
        """Refuse all other keys."""
        for key in self.body:
            if key not in keys:
                self.fail(key[:40], "unknown key", ", ".join(keys))

    def typed(self, key: str, kind: type) -> Any:
        """Return the value of a key, which has to be there and of that kind."""
        if key not in self.body:
            self.fail(key, "missing")
        value = self.body[key]
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            self.fail(key, "wrong kind of value", _KINDS[kind], kind_of(value))
        return value

    def nullable(self, key: str, kind: type) -> Any:
        """Return the value of a key, which has to be there, of that kind or null."""
        if key in self.body and self.body[key] is None:
            return None
        return self.typed(key, kind)

    def optional(self, key: str, kind: type) -> Any:
        """Return the value of a key, of that kind; None if it is null or missing."""
        return None if self.body.get(key) is None else self.typed(key, kind)

    def number(self, key: str, least: int, most: int) -> int:
        """Return a whole number between two bounds."""
        value: int = self.typed(key, int)
        if not least <= value <= most:
            self.fail(key, "out of bounds", f"{least:,} to {most:,}", value)
        return value

    def digest(self, key: str) -> int:
        """Return a digest."""
        try:
            return digest.from_text(self.typed(key, str))
        except ValueError:
            self.fail(key, "not a digest", "xxh3: and 16 hexadecimal digits", self.body[key])

    def line(self, key: str, most: int) -> str | None:
        """Return a text of one line, of up to `most` characters; None if it is missing."""
        value = self.body.get(key)
        if value is None or (isinstance(value, str) and value.isprintable() and len(value) <= most):
            return value
        self.fail(key, "not a line of text", actual=value)

    def choice(self, key: str, choices: Sequence[str], default: str | None = None) -> str:
        """Return a text that is one of `choices`."""
        value = self.body.get(key, default)
        if not isinstance(value, str) or value not in choices:
            problem = "missing" if value is None else "unknown value"
            self.fail(key, problem, " or ".join(choices), value)
        return value

    def inner(self, key: str) -> "Fields":
        """Return the object that is the value of a key."""
        return Fields(self.typed(key, dict), self.at(key), self.path, self._error)

    def objects(self, key: str) -> list["Fields"]:
        """Return the objects in the list that is the value of a key."""
        values, place = self.typed(key, list), self.at(key)
        return [
            Fields(value, f"{place}[{number}]", self.path, self._error)
            for number, value in enumerate(values)
        ]

    def fail(
        self,
        key: str,
        problem: str,
        expected: object = None,
        actual: object = None,
        hint: str | None = None,
    ) -> NoReturn:
        """Raise an error for a key, or for the object itself if the key is empty."""
        raise self._error(
            problem,
            path=self.path,
            place=self.at(key) or None,
            expected=expected,
            found=actual,
            hint=hint,
        )

    def at(self, key: str) -> str:
        """Return the place of a key."""
        return ".".join(filter(None, (self.place, key)))


def parse_json(data: bytes, path: str) -> Fields:
    """Parse the object that is all of a JSON file. Raises PackError."""
    try:
        body = parse_strictly(data)
    except ValueError as error:
        raise PackError(f"not JSON ({error})", path=path) from None
    if not isinstance(body, dict):
        raise PackError("wrong kind of JSON", path=path, expected="an object", found=kind_of(body))
    return Fields(body, "", path)


def parse_toml(data: bytes, path: str, most: int) -> dict[str, Any]:
    """Parse a TOML file of at most so many bytes. Raises RequestError."""
    import tomllib  # reading packs needs none of it

    if len(data) > most:
        raise RequestError("too long", path=path, expected=f"up to {most:,} bytes")
    try:
        return tomllib.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise RequestError(f"not TOML ({str(error)[:80]})", path=path) from None


def kind_of(value: Any) -> str:
    """Return the kind of a value, in words of JSON."""
    if value is None or isinstance(value, bool):
        return str(value).lower().replace("none", "null")
    return _KINDS.get(type(value), "another number")


_KINDS: dict[type, str] = {
    bool: "true or false",
    str: "a text",
    int: "a whole number",
    list: "a list",
    dict: "an object",
}


def parse_strictly(data: bytes) -> Any:
    """Return the value of a JSON text in UTF-8; raises ValueError with the problem.

    Anything that parsers may read differently is refused: keys that stand twice, numbers beyond 64
    bits or beyond a double, lone surrogates, great depth, and all of these in unknown values.
    """
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


def _check_depth_and_texts(value: Any) -> None:
    # The rest of each object and list that is open: no more values at a time than levels.
    levels: list[Iterator[Any]] = [iter((value,))]
    while levels:
        inner = next(levels[-1], _END)
        if inner is _END:
            levels.pop()
        elif isinstance(inner, str) and not inner.isascii():
            try:
                inner.encode()
            except UnicodeEncodeError:
                raise ValueError("a text has half of a surrogate pair") from None
        elif isinstance(inner, dict | list):
            if len(levels) > MAX_DEPTH:
                raise ValueError(_TOO_DEEP)
            levels.append(
                iter(inner) if isinstance(inner, list) else chain.from_iterable(inner.items())
            )


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
