"""Partial packs: some bytes of a pack that is elsewhere, in a directory of this machine.

    .pull.json           which bytes are there, and where the pack is that they came from
    .pull.manifest       its manifest, byte for byte
    index.bin            its index
    experts-00000.bin    named as there, and as long; what is not there is a hole

There is no manifest.json, so nobody takes it for a pack. Bytes that `.pull.json` names had their
digests when they came, and were synced before they were named. What makes one is
`moepack.packing.copies.pull`; its last step is to turn it into the pack.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from moepack.common import digest, pack_files, strict_json
from moepack.common.errors import MachineError, PackError
from moepack.common.escaping import shell_word
from moepack.common.remote_path import RemotePath, parse
from moepack.pack.format import manifest
from moepack.pack.format.names import is_plain_name
from moepack.storage.ranges import Ranges, RangeSet, read_ranges
from moepack.storage.regular_file import read_back

NAME = pack_files.PARTIAL_NAME
MANIFEST_NAME = ".pull.manifest"
_FORMAT = "moepack partial pack"
_VERSION = 1
_MAX_LENGTH = 256 << 20
_MAX_PADDING = 64 << 10


class PullRequest(NamedTuple):
    """The experts that were asked for: those of `layers`, and the `hottest` up to so many bytes.

    If it `is_all`, all of them.
    """

    is_all: bool
    layers: tuple[int, ...] = ()
    hottest: int = 0


class PartialFile(NamedTuple):
    """The ranges of a file that are there, and its mtime when they were named."""

    mtime_ns: int
    ranges: Ranges


class PartialRecord(NamedTuple):
    """The values of .pull.json: the pack's address, the digest of its manifest, and its files.

    `request` is all that was ever asked for.
    """

    origin: str
    manifest_digest: int
    request: PullRequest
    files: Mapping[str, PartialFile]


class Partial:
    """A partial pack in the directory `folder`, with the bytes of the pack's manifest."""

    def __init__(self, folder: Path, record: PartialRecord, manifest_bytes: bytes) -> None:
        self.folder = folder
        self.record = record
        self.manifest_bytes = manifest_bytes
        self.origin: RemotePath = parse(record.origin)
        self._ranges = {name: RangeSet(file.ranges) for name, file in record.files.items()}

    def covers(self, name: str, start: int, end: int) -> bool:
        """Return whether all bytes from `start` to `end` of a file are there."""
        ranges = self._ranges.get(name)
        return start == end or (ranges is not None and ranges.covers(start, end))

    def has_bytes_of(self, name: str) -> bool:
        """Return whether any byte of a file is there."""
        return name in self.record.files and bool(self.record.files[name].ranges)

    def has_all_of(self, name: str, length: int) -> bool:
        """Return whether a file of `length` bytes is there, but for padding at its end."""
        ranges = self.record.files[name].ranges if name in self.record.files else ()
        return len(ranges) == 1 and ranges[0][0] == 0 and length - ranges[0][1] < _MAX_PADDING

    def path_of(self, path: Path, offset: int, length: int) -> Path:
        """Return where a range of the file at `path` is read: there, or at the origin."""
        if self.covers(path.name, offset, offset + length):
            return path
        return self.origin / path.name

    @property
    def length(self) -> int:
        """The bytes that are there."""
        files = self.record.files.values()
        return sum(end - start for file in files for start, end in file.ranges)

    @property
    def arguments(self) -> str:
        """The words after `moepack pull` for more of it."""
        return f"{shell_word(str(self.origin))} -o {shell_word(str(self.folder))}"


def encode(record: PartialRecord) -> bytes:
    """Return the bytes of .pull.json, its own digest among them."""
    return manifest.seal(
        {
            "format": _FORMAT,
            "format_version": _VERSION,
            "origin": record.origin,
            "manifest": digest.to_text(record.manifest_digest),
            "all": record.request.is_all,
            "layers": list(record.request.layers),
            "hottest": record.request.hottest,
            "files": {
                name: {"mtime_ns": file.mtime_ns, "ranges": list(map(list, file.ranges))}
                for name, file in record.files.items()
            },
        }
    )


def decode(data: bytes, path: Path) -> PartialRecord:
    """Read the bytes of .pull.json; raise PackError for bytes that `encode` did not write."""
    try:
        record = _record(strict_json.parse(data))
        parse(record.origin)
        if encode(record) != data:
            raise ValueError("it was changed after it was written")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        problem = f"{NAME} is damaged, or of another version: {error}"
        hint = "pull the pack into this folder again: bytes that are right are kept"
        raise PackError(problem, path=path, hint=hint) from None
    return record


def _record(body: Any) -> PartialRecord:
    if (body["format"], body["format_version"]) != (_FORMAT, _VERSION):
        raise ValueError("of another version")
    files = {}
    for name, file in body["files"].items():
        if not is_plain_name(name):
            raise ValueError("no such file")
        files[name] = PartialFile(_number(file["mtime_ns"]), read_ranges(file["ranges"]))
    layers = tuple(map(_number, body["layers"]))
    request = PullRequest(bool(body["all"]), layers, _number(body["hottest"]))
    manifest_digest = digest.from_text(body["manifest"])
    return PartialRecord(body["origin"], manifest_digest, request, files)


def _number(value: Any) -> int:
    if type(value) is not int:
        raise TypeError("not a number")
    return value


def load(folder: Path) -> PartialRecord | None:
    """Return the values of .pull.json in a folder; None if there is none.

    Raises PackError if it is damaged, and OSError.
    """
    data = _read(folder / NAME, _MAX_LENGTH)
    return None if data is None else decode(data, folder / NAME)


def open_partial(folder: Path) -> Partial:
    """Return the partial pack in a directory.

    Raises PackError if it is damaged or not there, MachineError if it cannot be read.
    """
    try:
        record = load(folder)
        data = _read(folder / MANIFEST_NAME, manifest.MAX_LENGTH)
    except OSError as error:
        raise MachineError(f"cannot read: {error.strerror}", path=folder) from None
    if record is None:
        raise PackError("not a partial pack", path=folder, expected=NAME)
    if data is None or digest.xxh3(data) != record.manifest_digest:
        problem = "the manifest of a partial pack is missing or damaged"
        hint = f"`moepack pull {shell_word(record.origin)} -o {shell_word(str(folder))}` mends it"
        raise PackError(problem, path=folder / MANIFEST_NAME, hint=hint)
    return Partial(folder, record, data)


def _read(path: Path, limit: int) -> bytes | None:
    try:
        return read_back(path, limit)
    except (FileNotFoundError, NotADirectoryError):
        return None
