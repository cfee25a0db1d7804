"""The manifest: what a pack is (FORMAT.md, "The manifest").

`encode` and `decode` are a pair. The manifest is JSON whose last key is the digest of all bytes
before that key's line, so that a flipped bit anywhere in it is found.
"""

import json
import math
from typing import Any, NamedTuple, NoReturn

from moepack import digest
from moepack.errors import PackError
from moepack.format import records, source_entry
from moepack.format.names import is_plain_name
from moepack.format.source_entry import SourceEntry
from moepack.sizes import divide_up

NAME = "manifest.json"
INDEX_NAME = "index.bin"
MAX_LENGTH = 2 << 20
PAGE_LENGTH = 64 << 10
FORMAT = "moepack"

_DIGEST_KEY = b',\n  "manifest_digest": '
_DIGEST_ENTRY_LENGTH = len(_DIGEST_KEY) + len('"xxh3:0123456789abcdef"\n}\n')


class FileEntry(NamedTuple):
    """A data file of the pack: plain name, length in bytes."""

    name: str
    length: int

    def to_json(self) -> dict[str, Any]:
        """Return the entry as the manifest holds it."""
        return self._asdict()


class IndexEntry(NamedTuple):
    """The index: its length, its digest, and those of its pages of PAGE_LENGTH bytes.

    `page_digests` are for readers that take the index by ranges; a manifest may leave them out.
    """

    length: int
    digest: int
    page_digests: tuple[int, ...] | None

    def to_json(self) -> dict[str, Any]:
        """Return the entry as the manifest holds it."""
        entry = {"name": INDEX_NAME, "length": self.length, "digest": digest.to_text(self.digest)}
        if self.page_digests is None:
            return entry
        digests = [digest.to_text(page) for page in self.page_digests]
        return entry | {"pages": {"length": PAGE_LENGTH, "digests": digests}}


class Manifest(NamedTuple):
    """A decoded manifest.

    `is_whole` says that the pack holds all of the source. `layout` and `hotness` are provenance for
    people: plain JSON values as FORMAT.md lists them. `layers` are those that were chosen, None for
    all. `digest_matches` says whether the manifest's own digest was right.
    """

    tool: str
    is_whole: bool
    source: SourceEntry
    layout: dict[str, Any]
    hotness: dict[str, Any] | None
    layers: list[int] | None
    index_entry: IndexEntry
    files: tuple[FileEntry, ...]
    digest_matches: bool = True


def describe_index(index: bytes | memoryview) -> IndexEntry:
    """Return the entry of an index by its bytes."""
    view = memoryview(index)
    starts = range(0, len(view), PAGE_LENGTH)
    return IndexEntry(
        length=len(view),
        digest=digest.of(view[: -records.TRAILER.size]),
        page_digests=tuple(digest.of(view[start : start + PAGE_LENGTH]) for start in starts),
    )


def encode(manifest: Manifest) -> bytes:
    """Return the bytes of manifest.json; the same values give the same bytes."""
    body = {
        "format": FORMAT,
        "format_version": records.FORMAT_VERSION,
        "tool": manifest.tool,
        "whole": manifest.is_whole,
        "source": manifest.source.to_json(),
        "layout": manifest.layout,
        "hotness": manifest.hotness,
        "layers": manifest.layers,
        "index": manifest.index_entry.to_json(),
        "files": [entry.to_json() for entry in manifest.files],
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
        return Manifest(
            tool=self.typed(body, "tool", str),
            is_whole=self.flag(body, "whole"),
            source=source_entry.decode(self.typed(body, "source", dict), self.path),
            layout=self.typed(body, "layout", dict),
            hotness=self.nullable(body, "hotness", dict),
            layers=self.layers(body),
            index_entry=self.index(self.typed(body, "index", dict)),
            files=self.files(self.typed(body, "files", list)),
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
        return source_entry.typed(body, key, kind, self.path)

    def nullable(self, body: dict[str, Any], key: str, kind: type) -> Any:
        return source_entry.nullable(body, key, kind, self.path)

    def flag(self, body: dict[str, Any], key: str) -> bool:
        value = body.get(key)
        if not isinstance(value, bool):
            self.fail(key, "wrong kind of value", "true or false", type(value).__name__)
        return value

    def layers(self, body: dict[str, Any]) -> list[int] | None:
        layers: list[int] | None = self.nullable(body, "layers", list)
        if layers is not None and not source_entry.are_counts(layers):
            self.fail("layers", "wrong kind of value", "null or a list of numbers", layers)
        return layers

    def index(self, entry: dict[str, Any]) -> IndexEntry:
        if entry.get("name") != INDEX_NAME:
            self.fail("index.name", "not its name", INDEX_NAME, entry.get("name"))
        length = self.length(entry, "index")
        pages = entry.get("pages")
        return IndexEntry(
            length=length,
            digest=self.digest(entry.get("digest"), "index.digest"),
            page_digests=None if pages is None else self.pages(pages, length),
        )

    def pages(self, pages: Any, length: int) -> tuple[int, ...]:
        if not isinstance(pages, dict) or pages.get("length") != PAGE_LENGTH:
            self.fail("index.pages", "not pages", f'"length": {PAGE_LENGTH}', pages)
        digests = self.typed(pages, "digests", list)
        expected = divide_up(length, PAGE_LENGTH)
        if len(digests) != expected:
            self.fail("index.pages", "wrong number of digests", expected, len(digests))
        return tuple(
            self.digest(text, f"index.pages.digests[{number}]")
            for number, text in enumerate(digests)
        )

    def files(self, entries: list[Any]) -> tuple[FileEntry, ...]:
        return tuple(self.file(entry, f"files[{n}]") for n, entry in enumerate(entries))

    def file(self, entry: Any, place: str) -> FileEntry:
        if not isinstance(entry, dict):
            self.fail(place, "wrong kind of value", "an object", type(entry).__name__)
        name = self.typed(entry, "name", str)
        if not is_plain_name(name):
            self.fail(place, "not a plain file name", found=name)
        return FileEntry(name, self.length(entry, place))

    def length(self, entry: dict[str, Any], place: str) -> int:
        length: int = self.typed(entry, "length", int)
        if not 1 <= length <= records.MAX_LENGTH:
            self.fail(place, "length out of bounds", f"1 to {records.MAX_LENGTH:,}", length)
        return length

    def digest(self, text: Any, place: str) -> int:
        try:
            return digest.from_text(text if isinstance(text, str) else "")
        except ValueError as error:
            self.fail(place, f"not a digest: {error}")

    def fail(
        self, place: str, problem: str, expected: object = None, found: object = None
    ) -> NoReturn:
        raise PackError(
            problem, path=self.path, place=place or None, expected=expected, found=found
        )
