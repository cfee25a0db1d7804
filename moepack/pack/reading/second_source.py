"""A second source of a pack's bytes: a mirror, or the pack that a partial one came from.

Reads are spread over a pack and its mirror: each goes to the drive expected to finish first, by the
bytes that it has in flight and its recent speed, as native/cache.c does. A drive that was never
read, or not for long, gets a read for its speed. The policy of a partial pack is in `origin`.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from moepack.common.errors import MirrorWarning, MoepackError
from moepack.storage.extents import RangeSet

if TYPE_CHECKING:
    from moepack.pack.reading.expert_read import ExpertRead, FileRead
    from moepack.storage.backend import ReadRequest

_MEMORY_SECONDS = 0.5
"""Seconds of a drive's work after which earlier bytes count half."""
_UNKNOWN_SPEED = 1e6
"""Bytes a second, less than any drive's: one of unknown speed gets no second read meanwhile."""
_PATIENCE = 100
"""A drive is tried again after an idle time of so many of its reads.

So one that was slow for a moment is not lost for ever, and trying costs one part in so many.
"""


class MirrorUsage(NamedTuple):
    """Reads from a mirror.

    For `error_count` experts the mirror gave an error or wrong bytes, and the pack served instead.
    """

    read_count: int
    error_count: int
    read_length: int


class _Drive:
    """The bytes in flight on one of the two drives, by owner, and its speed while it is busy."""

    def __init__(self) -> None:
        self._owned: dict[Hashable, int] = {}
        self._speed = self._length = 0.0
        self._since = self.last_begun = time.perf_counter()

    @property
    def is_new(self) -> bool:
        """Whether it was never read."""
        return not self._speed and not self._owned

    def wait(self, length: int) -> float:
        """Return the seconds in which another read of `length` bytes is expected to end."""
        return (sum(self._owned.values()) + length) / (self._speed or _UNKNOWN_SPEED)

    def begin(self, owner: Hashable, length: int) -> None:
        """Count a read as begun."""
        self.last_begun = time.perf_counter()
        if not self._owned:
            self._since, self._length = self.last_begun, 0.0
        self._owned[owner] = self._owned.get(owner, 0) + length

    def end(self, owner: Hashable, length: int, received: int) -> None:
        """Count a read of `length` bytes as ended, of which `received` came."""
        left = self._owned.pop(owner, length) - length
        if left > 0:
            self._owned[owner] = left
        self._length += received
        seconds = max(time.perf_counter() - self._since, 1e-9)
        self._speed = self._length / seconds
        if seconds > _MEMORY_SECONDS:
            self._since, self._length = self._since + seconds / 2, self._length / 2

    def forget(self, owner: Hashable) -> None:
        """Count nothing as in flight any more of an owner."""
        self._owned.pop(owner, None)


class SecondSource:
    """Files in the folder `place`, named as the pack's own, for one reader with all its threads.

    They have the `ranges` of the pack's files, by the paths of these, and are read if that is
    sooner. If one source gives an error or wrong bytes, the other may be its backup: this one if it
    `is_backup`, else the pack's own files, and then nothing more is read here.
    """

    is_backup = False

    def __init__(self, place: Path, ranges: Mapping[Path, RangeSet]) -> None:
        self._place = place
        self._ranges = ranges
        self._drives = _Drive(), _Drive()
        self._lock = threading.RLock()  # with which a signal's handler may come in again
        self._read_count = self._error_count = self._read_length = 0
        self._is_retired = False

    @property
    def mirror(self) -> Path | None:
        """The folder of a mirror, as long as it is read."""
        return None if self._is_retired or self.is_backup else self._place

    @property
    def usage(self) -> MirrorUsage | None:
        """Counts of the reads from a mirror so far."""
        if self.is_backup:
            return None
        return MirrorUsage(self._read_count, self._error_count, self._read_length)

    def takes(self, read: ExpertRead) -> bool:
        """Return whether a read goes here: all its bytes are here, and will come sooner."""
        if self._is_retired or not all(map(self._covers, read.file_reads)):
            return False
        length = sum(file_read.length for file_read in read.file_reads)
        with self._lock:
            for is_second, drive in enumerate(self._drives):
                if drive.is_new:
                    return bool(is_second)
            waits = [drive.wait(length) for drive in self._drives]
            is_sooner = waits[1] < waits[0]
            idle = time.perf_counter() - self._drives[not is_sooner].last_begun
            return is_sooner != (idle > _PATIENCE * waits[not is_sooner])

    def _covers(self, read: FileRead) -> bool:
        ranges = self._ranges.get(read.path)
        return ranges is not None and ranges.covers(read.offset, read.offset + read.length)

    def redirect(self, request: ReadRequest) -> ReadRequest:
        """Return the same request of the file here."""
        return request._replace(path=self._place / request.path.name)

    def begin(self, owner: Hashable, length: int, *, is_second: bool) -> None:
        """Count a read of an `owner` as begun."""
        with self._lock:
            self._drives[is_second].begin(owner, length)

    def end(self, owner: Hashable, length: int, received: int, *, is_second: bool) -> None:
        """Count a read of `length` bytes as ended, of which `received` came."""
        with self._lock:
            self._drives[is_second].end(owner, length, received)
            if is_second:
                self._read_count += 1
                self._read_length += received

    def forget(self, owner: Hashable) -> None:
        """Count nothing as in flight any more of an owner that has nothing in flight."""
        with self._lock:
            for drive in self._drives:
                drive.forget(owner)

    def retire(self) -> None:
        """Read nothing more here, since it gave an error."""
        self._is_retired = True

    def fail(self, error: MoepackError) -> None:
        """Count an expert that came from the backup, since a source gave an `error`; warn once."""
        self.retire()
        with self._lock:
            self._error_count += 1
            is_first = self._error_count == 1
        if is_first:
            text = self.warning(": ".join(filter(None, (error.place, error.problem))))
            warnings.warn(text, MirrorWarning, stacklevel=2)

    def warning(self, problem: str) -> str:
        """Return the text that warns of a problem."""
        return f"{self._place}: this mirror is not read: {problem}; the pack itself serves"

    def explain(self, read: ExpertRead, error: MoepackError) -> None:
        """Add to the error of a read without a backup what can be done."""
