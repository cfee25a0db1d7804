"""The manifest of a pack (FORMAT.md, "The manifest").

`encode` and `decode` are a pair. The manifest is JSON whose last key is the digest of all bytes
before that key's line, so that a flipped bit anywhere in it is found.
"""

import json
from typing import Any, NamedTuple

from moepack.common import digest, pack_files
from moepack.common.errors import ErrorCode, PackError
from moepack.common.fields import Fields, parse_json
from moepack.common.sizes import divide_up
from moepack.pack.format import records, source_entry
from moepack.pack.format.names import is_index_name, is_plain_name
from moepack.pack.format.source_entry import SourceEntry

NAME = pack_files.MANIFEST_NAME
INDEX_NAME = "index.bin"
MAX_LENGTH = 8 << 20
PAGE_LENGTH = 64 << 10
FORMAT = pack_files.FORMAT


class FileEntry(NamedTuple):
    """A file by its plain name, and its length in bytes."""

    name: str
    length: int


class IndexEntry(NamedTuple):
    """The index: its length, its digest, those of its pages of PAGE_LENGTH bytes, and its name.

    `page_digests` are for readers that take the index by ranges; a manifest may leave them out, and
    `sha256`, which is of the whole file, in lower-case hexadecimal digits.
    """

    length: int
    digest: int
    page_digests: tuple[int, ...] | None
    name: str = INDEX_NAME
    sha256: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the entry as the manifest holds it."""
        entry: dict[str, Any] = {
            "name": self.name,
            "length": self.length,
            "digest": digest.to_text(self.digest),
        }
        if self.sha256 is not None:
            entry["sha256"] = self.sha256
        if self.page_digests is None:
            return entry
        digests = [digest.to_text(page) for page in self.page_digests]
        return entry | {"pages": {"length": PAGE_LENGTH, "digests": digests}}


class Manifest(NamedTuple):
    """A decoded manifest.

    A pack that `is_whole` has all of the source. `layout` and `hotness` are provenance for people:
    plain JSON values as FORMAT.md lists them. `layers` are the selected ones, None for all.
    `digest_matches` is false if the manifest's own digest is wrong.
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

    @property
    def blob_order(self) -> str:
        """The order of blobs on disk: `hotness` or `source`."""
        rules = self.layout.get("blobs")
        by_hotness = isinstance(rules, dict) and rules.get("order") == "hotness"
        return "hotness" if by_hotness and self.hotness else "source"


def describe_index(index: bytes | memoryview) -> IndexEntry:
    """Return the entry of an index by its bytes."""
    view = memoryview(index)
    starts = range(0, len(view), PAGE_LENGTH)
    return IndexEntry(
        length=len(view),
        digest=digest.xxh3(view[: -records.TRAILER.size]),
        page_digests=tuple(digest.xxh3(view[start : start + PAGE_LENGTH]) for start in starts),
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
        "files": [entry._asdict() for entry in manifest.files],
    }
    return seal(body)


def seal(body: dict[str, Any]) -> bytes:
    """Return the bytes of a manifest of these keys; its own digest is added to them."""
    text = json.dumps(body, indent=2, ensure_ascii=True, allow_nan=False)
    signed = text[: text.rindex("\n}")].encode()
    return signed + _end(signed)


def _end(signed: bytes) -> bytes:
    return f',\n  "manifest_digest": "{digest.to_text(digest.xxh3(signed))}"\n}}\n'.encode()


_END_LENGTH = len(_end(b""))
"""Of the bytes of a manifest that are not under its digest: those of the digest's own line."""


def decode(data: bytes, path: str) -> Manifest:
    """Read the bytes of a manifest; raise PackError when a rule of the format is broken.

    A wrong own digest is reported in `digest_matches`, not raised: the verifier goes on from there.
    """
    if len(data) > MAX_LENGTH:
        expected = f"<= {MAX_LENGTH:,} bytes"
        raise PackError("too long", path=path, expected=expected, found=f"{len(data):,}")
    fields = parse_json(data, path)
    _check_version(fields)
    files = tuple(map(_file, fields.objects("files")))
    index_entry = _index(fields.inner("index"))
    if index_entry.name.lower() in {file.name.lower() for file in files}:
        fields.fail("index.name", "the name of a data file", actual=index_entry.name)
    layers = fields.nullable("layers", list)
    if layers is not None and not source_entry.are_counts(layers):
        fields.fail("layers", "wrong kind of value", "null or a list of numbers", layers)
    signed, end = data[:-_END_LENGTH], data[-_END_LENGTH:]
    return Manifest(
        tool=fields.typed("tool", str),
        is_whole=fields.typed("whole", bool),
        source=source_entry.decode(fields.inner("source")),
        layout=fields.typed("layout", dict),
        hotness=fields.nullable("hotness", dict),
        layers=layers,
        index_entry=index_entry,
        files=files,
        digest_matches=end == _end(signed),
    )


def _check_version(fields: Fields) -> None:
    name = fields.body.get("format")
    if name != FORMAT:
        problem, code = "not a moepack manifest", ErrorCode.UNKNOWN_FORMAT
        path = fields.path
        raise PackError(problem, path=path, place="format", expected=FORMAT, found=name, code=code)
    version = fields.body.get("format_version")
    if type(version) is not int or version != records.FORMAT_VERSION:
        raise records.unknown_version(version, fields.path)


def _index(fields: Fields) -> IndexEntry:
    name = fields.typed("name", str)
    if not is_index_name(name):
        fields.fail("name", "not a plain file name", actual=repr(name))
    length = fields.number("length", 1, records.MAX_INDEX_LENGTH)
    has_sha256 = fields.optional("sha256", str) is not None
    has_pages = fields.body.get("pages") is not None
    return IndexEntry(
        length=length,
        digest=fields.digest("digest"),
        page_digests=_pages(fields.inner("pages"), length) if has_pages else None,
        name=name,
        sha256=source_entry.sha256(fields, "sha256") if has_sha256 else None,
    )


def _pages(fields: Fields, length: int) -> tuple[int, ...]:
    fields.number("length", PAGE_LENGTH, PAGE_LENGTH)
    texts = fields.typed("digests", list)
    expected = divide_up(length, PAGE_LENGTH)
    if len(texts) != expected:
        fields.fail("digests", "not one for each page", f"{expected:,}", f"{len(texts):,}")
    try:
        return tuple(map(digest.from_text, texts))
    except (ValueError, TypeError):
        fields.fail("digests", "not digests", "each xxh3: and 16 hexadecimal digits")


def _file(fields: Fields) -> FileEntry:
    name = fields.typed("name", str)
    if not is_plain_name(name):
        fields.fail("name", "not a plain file name", actual=repr(name))
    return FileEntry(name, fields.number("length", 1, records.MAX_LENGTH))
