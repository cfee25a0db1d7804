"""Copies of some bytes of a pack: its mirror on another drive, and a partial pack of one elsewhere.

    PACK/.mirror                a link to the folder of the mirror, made last
    folder/mirror.json          the record of the bytes there
    folder/experts-00000.bin    named as in the pack, and as long; what is not mirrored is a hole

    .pull.json                  the record of the bytes there, and of the pack that they came from
    .pull.manifest              its manifest, byte for byte
    index.bin                   its index
    experts-00000.bin           named as there, and as long; what is not there is a hole

All of a mirror lies beside the pack's format: the pack is the same with and without it. A partial
pack has no manifest.json, so nobody takes it for a pack. Bytes that a record names had their
digests when they were copied, and were synced before they were named. What makes both is
`moepack.packing.copies`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, unquote_to_bytes

from moepack.common import digest, pack_files
from moepack.common.errors import MachineError, PackError
from moepack.common.escaping import shell_word
from moepack.common.fields import parse_strictly
from moepack.common.paths import RemotePath, parse_address
from moepack.pack.format import manifest
from moepack.pack.format.index import Index
from moepack.pack.format.names import MIRROR_NAME, is_plain_name
from moepack.storage.extents import Ranges, RangeSet, read_ranges
from moepack.storage.regular_file import read_back

MIRROR_RECORD = "mirror.json"
PARTIAL_RECORD = pack_files.PARTIAL_NAME
PARTIAL_MANIFEST = ".pull.manifest"

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
        record = _record(parse_strictly(data))
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
    data = _read(path, _MAX_LENGTH)
    return None if data is None else decode(data, path)


def _read(path: Path, limit: int) -> bytes | None:
    try:
        return read_back(path, limit)
    except (FileNotFoundError, NotADirectoryError):
        return None


class Mirror(NamedTuple):
    """The mirror of an open pack, in the folder at `path`.

    `problem` is the reason why it must not be read; None for a sound one, which has a `record`.
    """

    path: Path
    record: CopyRecord | None
    problem: str | None


def linked_folder(pack: Path) -> Path | None:
    """Return the folder that the link of a pack leads to, there or not; None without a link."""
    try:
        return pack / os.readlink(pack / MIRROR_NAME)
    except OSError:
        return None


def find_mirror(pack: Path, index: Index) -> Mirror | None:
    """Return the mirror of the pack in a directory; None if it has none."""
    folder = linked_folder(pack)
    if folder is None:
        return None
    try:
        record = load(folder / MIRROR_RECORD)
    except PackError as error:
        return Mirror(folder, None, error.problem)
    except OSError as error:
        return Mirror(folder, None, f"cannot be read: {error.strerror}")
    problem = None
    if record is None:
        problem = "not there: the drive is missing, or its files were removed"
    elif record.pack_digest != index.content_digest():
        problem = "of another pack, or of this one before it was made anew"
    return Mirror(folder, record, problem)


class Partial:
    """A partial pack in the directory `folder`, with the bytes of the pack's manifest."""

    def __init__(self, folder: Path, record: CopyRecord, manifest_bytes: bytes) -> None:
        self.folder = folder
        self.record = record
        self.manifest_bytes = manifest_bytes
        self.origin: RemotePath = parse_address(record.origin)
        self._ranges = {name: RangeSet(file.ranges) for name, file in record.files.items()}

    def covers(self, name: str, start: int, end: int) -> bool:
        """Return whether all bytes from `start` to `end` of a file are there."""
        ranges = self._ranges.get(name)
        return start == end or (ranges is not None and ranges.covers(start, end))

    def path_of(self, path: Path, offset: int, length: int) -> Path:
        """Return where a range of the file at `path` is read: there, or at the origin."""
        if self.covers(path.name, offset, offset + length):
            return path
        return self.origin / path.name

    @property
    def arguments(self) -> str:
        """The words after `moepack pull` for more of it."""
        return f"{shell_word(str(self.origin))} -o {shell_word(str(self.folder))}"


def open_partial(folder: Path) -> Partial:
    """Return the partial pack in a directory.

    Raises PackError if it is damaged or not there, MachineError if it cannot be read.
    """
    try:
        record = load_partial(folder)
        manifest_bytes = _read(folder / PARTIAL_MANIFEST, manifest.MAX_LENGTH)
    except OSError as error:
        raise MachineError(f"cannot read: {error.strerror}", path=folder) from None
    if record is None:
        raise PackError("not a partial pack", path=folder, expected=PARTIAL_RECORD)
    if manifest_bytes is None or digest.xxh3(manifest_bytes) != record.pack_digest:
        problem = "the manifest of a partial pack is missing or damaged"
        hint = f"`moepack pull {shell_word(record.origin)} -o {shell_word(str(folder))}` mends it"
        raise PackError(problem, path=folder / PARTIAL_MANIFEST, hint=hint)
    return Partial(folder, record, manifest_bytes)


def load_partial(folder: Path) -> CopyRecord | None:
    """Return the record of the partial pack in a folder; None if there is none.

    Raises PackError if it is damaged, and OSError.
    """
    path = folder / PARTIAL_RECORD
    try:
        record = load(path)
        if record is not None:
            parse_address(record.origin)
    except (PackError, ValueError) as error:
        problem = (
            error.problem if isinstance(error, PackError) else f"{path.name} is damaged: {error}"
        )
        hint = "pull the pack into this folder again: bytes that are right are kept"
        raise PackError(problem, path=path, hint=hint) from None
    return record
