"""The manifest: what a pack is (FORMAT.md, "The manifest").

`encode` and `decode` are a pair. The manifest is JSON whose last key is the digest of all bytes
before that key's line, so that a flipped bit anywhere in it is found.
"""

import json
import math
from collections.abc import Container
from typing import Any, NamedTuple, NoReturn

from moepack import digest
from moepack.errors import PackError
from moepack.format import records
from moepack.format.names import is_plain_name

NAME = "manifest.json"
INDEX_NAME = "index.bin"
MAX_LENGTH = 2 << 20
FORMAT = "moepack"

_DIGEST_KEY = b',\n  "manifest_digest": '
_DIGEST_ENTRY_LENGTH = len(_DIGEST_KEY) + len('"xxh3:0123456789abcdef"\n}\n')


class FileEntry(NamedTuple):
    """A file of the pack: plain name, length in bytes, digest of all its bytes."""

    name: str
    length: int
    digest: int

    def to_json(self) -> dict[str, Any]:
        """Return the entry as the manifest holds it."""
        return {"name": self.name, "length": self.length, "digest": digest.to_text(self.digest)}


class Manifest(NamedTuple):
    """A decoded manifest.

    `source`, `layout` and `hotness` are provenance for people and for `verify`: plain JSON values
    as FORMAT.md lists them. `digest_matches` says whether the manifest's own digest was right.
    """

    tool: str
    source: dict[str, Any]
    layout: dict[str, Any]
    hotness: dict[str, Any] | None
    layers: list[int] | None
    index_file: FileEntry
    files: tuple[FileEntry, ...]
    digest_matches: bool


def encode(
    *,
    tool: str,
    source: dict[str, Any],
    layout: dict[str, Any],
    hotness: dict[str, Any] | None,
    layers: list[int] | None,
    index_file: FileEntry,
    files: tuple[FileEntry, ...],
) -> bytes:
    """Return the bytes of manifest.json; the same values give the same bytes."""
    body = {
        "format": FORMAT,
        "format_version": records.FORMAT_VERSION,
        "tool": tool,
        "source": source,
        "layout": layout,
        "hotness": hotness,
        "layers": layers,
        "index": index_file.to_json(),
        "files": [entry.to_json() for entry in files],
    }
    text = json.dumps(body, indent=2, ensure_ascii=True, allow_nan=False)
    signed = text[: text.rindex("\n}")].encode()
    return signed + _DIGEST_KEY + f'"{digest.to_text(digest.of(signed))}"\n}}\n'.encode()


def decode(data: bytes, path: str) -> Manifest:
    """Read the bytes of a manifest; raise PackError when a rule of the format is broken.

    A wrong own digest is reported in `digest_matches`, not raised: the verifier goes on from there.
    """
    return _ManifestDecoder(path).decode(data)


class _ManifestDecoder:
    def __init__(self, path: str) -> None:
        self.path = path

    def decode(self, data: bytes) -> Manifest:
        if len(data) > MAX_LENGTH:
            self.fail("", "too long", f"<= {MAX_LENGTH} bytes", len(data))
        body = self.json(data)
        if body.get("format") != FORMAT:
            self.fail("format", "not a moepack manifest", FORMAT, body.get("format"))
        version = body.get("format_version")
        if type(version) is not int or version != records.FORMAT_VERSION:
            raise PackError(
                "unknown format version",
                path=self.path,
                place="format_version",
                expected=records.FORMAT_VERSION,
                found=version,
                hint="read it with a newer moepack",
            )
        files = tuple(
            self.file(entry, f"files[{number}]")
            for number, entry in enumerate(self.typed(body, "files", list))
        )
        return Manifest(
            tool=self.typed(body, "tool", str),
            source=self.typed(body, "source", dict),
            layout=self.typed(body, "layout", dict),
            hotness=self.nullable(body, "hotness", dict),
            layers=self.layers(body),
            index_file=self.file(self.typed(body, "index", dict), "index", {INDEX_NAME}),
            files=files,
            digest_matches=self.digest_matches(data, self.typed(body, "manifest_digest", str)),
        )

    def json(self, data: bytes) -> dict[str, Any]:
        try:
            body = json.loads(
                data.decode(),
                object_pairs_hook=self.no_duplicates,
                parse_constant=self.no_constant,
                parse_float=self.finite,
            )
        except (ValueError, RecursionError) as error:
            self.fail("", f"not JSON ({error})")
        if not isinstance(body, dict):
            self.fail("", "wrong kind of JSON", "an object", type(body).__name__)
        return body

    def no_duplicates(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len({key for key, _ in pairs}) != len(pairs):
            raise ValueError("an object has the same key twice")
        return dict(pairs)

    def no_constant(self, text: str) -> NoReturn:
        raise ValueError(f"{text} is not JSON")

    def finite(self, text: str) -> float:
        value = float(text)
        if not math.isfinite(value):
            raise ValueError(f"{text[:40]} is beyond all numbers")
        return value

    def digest_matches(self, data: bytes, stored: str) -> bool:
        signed = memoryview(data)[: max(0, len(data) - _DIGEST_ENTRY_LENGTH)]
        try:
            expected = digest.from_text(stored)
        except ValueError:
            return False
        in_place = bytes(data[len(signed) : len(signed) + len(_DIGEST_KEY)]) == _DIGEST_KEY
        return in_place and data.endswith(b'"\n}\n') and digest.of(signed) == expected

    def typed(self, body: dict[str, Any], key: str, kind: type) -> Any:
        value = body.get(key)
        if not isinstance(value, kind) or isinstance(value, bool):
            self.fail(key, "wrong kind of value", kind.__name__, type(value).__name__)
        return value

    def nullable(self, body: dict[str, Any], key: str, kind: type) -> Any:
        if key not in body:
            self.fail(key, "missing")
        return None if body[key] is None else self.typed(body, key, kind)

    def layers(self, body: dict[str, Any]) -> list[int] | None:
        layers: list[int] | None = self.nullable(body, "layers", list)
        if layers is not None and not all(type(layer) is int for layer in layers):
            self.fail("layers", "wrong kind of value", "null or a list of numbers", layers)
        return layers

    def file(self, entry: Any, place: str, names: Container[str] | None = None) -> FileEntry:
        if not isinstance(entry, dict):
            self.fail(place, "wrong kind of value", "an object", type(entry).__name__)
        name = self.typed(entry, "name", str)
        if names is not None and name not in names:
            self.fail(place, "not its name", found=name)
        if names is None and not is_plain_name(name):
            self.fail(place, "not a plain file name", found=name)
        length = self.typed(entry, "length", int)
        if not 0 <= length <= records.MAX_LENGTH:
            self.fail(place, "length out of bounds", f"0 to {records.MAX_LENGTH}", length)
        try:
            return FileEntry(name, length, digest.from_text(self.typed(entry, "digest", str)))
        except ValueError as error:
            self.fail(place, f"not a digest: {error}")

    def fail(
        self, place: str, problem: str, expected: object = None, found: object = None
    ) -> NoReturn:
        raise PackError(
            problem, path=self.path, place=place or None, expected=expected, found=found
        )
