"""Partial packs: some bytes of a pack that is elsewhere, in a directory of this machine.

    .pull.json           the record of the bytes there, and of the pack that they came from
    .pull.manifest       its manifest, byte for byte
    index.bin            its index
    experts-00000.bin    named as there, and as long; what is not there is a hole

There is no manifest.json, so nobody takes it for a pack. What makes one is
`moepack.packing.copies.pull`; its last step is to turn it into the pack.
"""

from __future__ import annotations

from pathlib import Path

from moepack.common import digest, pack_files
from moepack.common.errors import MachineError, PackError
from moepack.common.escaping import shell_word
from moepack.common.paths import RemotePath, parse_address
from moepack.pack.format import manifest
from moepack.pack.reading import copy_record
from moepack.pack.reading.copy_record import CopyRecord
from moepack.storage.ranges import RangeSet
from moepack.storage.regular_file import read_back

NAME = pack_files.PARTIAL_NAME
MANIFEST_NAME = ".pull.manifest"
_MAX_PADDING = 64 << 10


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

    def has_all_of(self, name: str, length: int) -> bool:
        """Return whether a file of `length` bytes is there, but for padding at its end."""
        ranges = self.record.ranges(name)
        return len(ranges) == 1 and ranges[0][0] == 0 and length - ranges[0][1] < _MAX_PADDING

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
    manifest_bytes = None
    try:
        record = load(folder)
        if record is not None:
            manifest_bytes = read_back(folder / MANIFEST_NAME, manifest.MAX_LENGTH)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:
        raise MachineError(f"cannot read: {error.strerror}", path=folder) from None
    if record is None:
        raise PackError("not a partial pack", path=folder, expected=NAME)
    if manifest_bytes is None or digest.xxh3(manifest_bytes) != record.pack_digest:
        problem = "the manifest of a partial pack is missing or damaged"
        hint = f"`moepack pull {shell_word(record.origin)} -o {shell_word(str(folder))}` mends it"
        raise PackError(problem, path=folder / MANIFEST_NAME, hint=hint)
    return Partial(folder, record, manifest_bytes)


def load(folder: Path) -> CopyRecord | None:
    """Return the record of the partial pack in a folder; None if there is none.

    Raises PackError if it is damaged, and OSError.
    """
    try:
        record = copy_record.load(folder / NAME)
        if record is not None:
            parse_address(record.origin)
    except (PackError, ValueError) as error:
        problem = error.problem if isinstance(error, PackError) else f"{NAME} is damaged: {error}"
        hint = "pull the pack into this folder again: bytes that are right are kept"
        raise PackError(problem, path=folder / NAME, hint=hint) from None
    return record
