"""The JSON of a manifest: strictly parsed, and each key of its kind."""

from typing import Any, NoReturn

from moepack.common import digest, strict_json
from moepack.common.errors import PackError
from moepack.pack.format import records


def parse(data: bytes, path: str) -> "Fields":
    """Parse the object that is all of a manifest; raise PackError."""
    try:
        body = strict_json.parse(data)
    except ValueError as error:
        raise PackError(f"not JSON ({error})", path=path) from None
    if not isinstance(body, dict):
        raise PackError("wrong kind of JSON", path=path, expected="an object", found=kind_of(body))
    return Fields(body, "", path)


class Fields:
    """The keys of one object of the manifest; `place` is its name in messages."""

    def __init__(self, body: Any, place: str, path: str) -> None:
        self.place = place
        self.path = path
        self.body: dict[str, Any] = body
        if not isinstance(body, dict):
            self.fail("", "wrong kind of value", _KINDS[dict], kind_of(body))

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

    def number(self, key: str, least: int, most: int = records.MAX_LENGTH) -> int:
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

    def inner(self, key: str) -> "Fields":
        """Return the object that is the value of a key."""
        return Fields(self.typed(key, dict), self._at(key), self.path)

    def objects(self, key: str) -> list["Fields"]:
        """Return the objects in the list that is the value of a key."""
        values: list[Any] = self.typed(key, list)
        place = self._at(key)
        return [Fields(value, f"{place}[{n}]", self.path) for n, value in enumerate(values)]

    def fail(
        self, key: str, problem: str, expected: object = None, actual: object = None
    ) -> NoReturn:
        """Raise PackError for a key, or for the object itself if the key is empty."""
        raise PackError(
            problem, path=self.path, place=self._at(key) or None, expected=expected, found=actual
        )

    def _at(self, key: str) -> str:
        return ".".join(filter(None, (self.place, key)))


def are_counts(values: list[Any]) -> bool:
    """Return whether all values are whole numbers within the format's limits."""
    return all(type(value) is int and 0 <= value <= records.MAX_LENGTH for value in values)


def kind_of(value: Any) -> str:
    """Return the kind of JSON of a value, in words."""
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
