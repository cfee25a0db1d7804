"""The record beside a copy of some bytes of a pack: the pack, the request, and the bytes there.

A mirror has it as mirror.json, a partial pack as .pull.json. Bytes that a record names had their
digests when they were copied, and were synced before they were named.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, unquote_to_bytes

from moepack.common import digest, strict_json
from moepack.common.errors import PackError
from moepack.pack.format import manifest
from moepack.pack.format.names import is_plain_name
from moepack.storage.ranges import Ranges, read_ranges
from moepack.storage.regular_file import read_back

_FORMAT = "moepack copy"
_VERSION = 1
_MAX_LENGTH = 256 << 20


class CopyRequest(NamedTuple):
    """The requested experts: those of `layers`, and the `hottest` up to so many bytes.

    If it `is_all`, all of them.
    """

    is_all: bool
    layers: tuple[int, ...] = ()
    hottest: int = 0


class CopiedFile(NamedTuple):
    """The ranges of a file that are there, and its mtime when they were named.

    The mtime is 0 in a mirror: whoever adds to one reads it all.
    """

    mtime_ns: int
    ranges: Ranges


class CopyRecord(NamedTuple):
    """The values of a record: the address or path of the pack, its digest, and its files.

    `pack_digest` is the digest of its manifest for a partial pack, which has that manifest; for a
    mirror, which outlives a new ranking, `Index.content_digest`. `request` is all that was ever
    requested.
    """

    origin: str
    pack_digest: int
    request: CopyRequest
    files: Mapping[str, CopiedFile]

    @property
    def length(self) -> int:
        """The bytes that are there."""
        return sum(end - start for file in self.files.values() for start, end in file.ranges)

    def ranges(self, name: str) -> Ranges:
        """Return the ranges of a file that are there."""
        return self.files[name].ranges if name in self.files else ()


def encode(record: CopyRecord) -> bytes:
    """Return the bytes of a record, its own digest among them."""
    return manifest.seal(
        {
            "format": _FORMAT,
            "format_version": _VERSION,
            "origin": quote(os.fsencode(record.origin)),
            "digest": digest.to_text(record.pack_digest),
            "all": record.request.is_all,
            "layers": list(record.request.layers),
            "hottest": record.request.hottest,
            "files": {
                name: {"mtime_ns": file.mtime_ns, "ranges": list(map(list, file.ranges))}
                for name, file in record.files.items()
            },
        }
    )


def decode(data: bytes, path: Path) -> CopyRecord:
    """Read the bytes of a record; raise PackError for bytes that `encode` did not write."""
    try:
        record = _record(strict_json.parse(data))
        if encode(record) != data:
            raise ValueError("it was changed after it was written")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        problem = f"{path.name} is damaged, or of another version: {error}"
        raise PackError(problem, path=path) from None
    return record


def _record(body: Any) -> CopyRecord:
    if (body["format"], body["format_version"]) != (_FORMAT, _VERSION):
        raise ValueError("of another version")
    files = {}
    for name, file in body["files"].items():
        if not is_plain_name(name):
            raise ValueError("no such file")
        files[name] = CopiedFile(_number(file["mtime_ns"]), read_ranges(file["ranges"]))
    layers = tuple(map(_number, body["layers"]))
    request = CopyRequest(bool(body["all"]), layers, _number(body["hottest"]))
    origin = os.fsdecode(unquote_to_bytes(body["origin"]))
    return CopyRecord(origin, digest.from_text(body["digest"]), request, files)


def _number(value: Any) -> int:
    if type(value) is not int:
        raise TypeError("not a number")
    return value


def load(path: Path) -> CopyRecord | None:
    """Return the record at `path`; None if there is none.

    Raises PackError if it is damaged, and OSError.
    """
    try:
        data = read_back(path, _MAX_LENGTH)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return decode(data, path)
