"""A second source of a pack's bytes: a mirror, or the pack that a partial one came from.

Reads are spread over a pack and its mirror: each goes to the drive expected to finish first. That
is the one with less in flight, measured by its recent speed: the bytes that came while it had
anything in flight, divided by the seconds of that. A drive of unknown speed gets one read, and no
more until that has ended. The policy of a partial pack is in `origin`.
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
"""Seconds with reads in flight after which earlier measurements count half."""
_MAX_UNSEEN = 0.25
"""The share of a measured time in which nobody looked, since the last read ended, at most."""
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
    """The bytes in flight on one of the two drives, by owner, and its recent speed."""

    def __init__(self) -> None:
        self._owned: dict[Hashable, int] = {}
        self._length = self._seconds = 0.0
        self._came = 0
        self._since = self.last_begun = time.perf_counter()

    @property
    def is_busy(self) -> bool:
        """Whether anything is in flight."""
        return bool(self._owned)

    @property
    def is_known(self) -> bool:
        """Whether its speed was measured."""
        return self._seconds > 0

    def wait(self, length: int) -> float:
        """Return the seconds in which another read of `length` bytes is expected to end."""
        in_flight = sum(self._owned.values())
        seconds = self._seconds / self._length
        if in_flight:  # even if all of it ended this moment, it would have taken so long
            seconds = max(seconds, (time.perf_counter() - self._since) / in_flight)
        return (in_flight + length) * seconds

    def begin(self, owner: Hashable, length: int) -> None:
        """Count a read as begun."""
        self.last_begun = time.perf_counter()
        if not self._owned:
            self._since, self._came = self.last_begun, 0
        self._owned[owner] = self._owned.get(owner, 0) + length

    def end(self, owner: Hashable, length: int, received: int) -> None:
        """Count a read of `length` bytes as ended, of which `received` came."""
        left = self._owned.pop(owner, length) - length
        if left > 0:
            self._owned[owner] = left
        self._came += received

    def forget(self, owner: Hashable) -> None:
        """Count nothing as in flight any more of an owner."""
        self._owned.pop(owner, None)

    def measure(self, now: float, unseen: float) -> None:
        """Count the bytes that came until `now`; nobody looked in the last `unseen` seconds.

        If nothing is left in flight, all may have come at the beginning of these.
        """
        if not self._came:
            return
        seconds = now - self._since
        if self._owned or unseen <= _MAX_UNSEEN * seconds:
            if self._seconds > _MEMORY_SECONDS:
                self._length, self._seconds = self._length / 2, self._seconds / 2
            self._length += self._came
            self._seconds += max(seconds, 1e-9)
        self._since, self._came = now, 0


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

    def takes(self, read: ExpertRead) -> bool | None:
        """Return whether a read goes here: all its bytes are here, and will come sooner.

        None if no speed is known yet and both drives have their first read: better wait for one.
        """
        if self._is_retired or not all(map(self._covers, read.file_reads)):
            return False
        length = sum(file_read.length for file_read in read.file_reads)
        first, second = self._drives
        with self._lock:
            if not (first.is_known and second.is_known):
                return self._takes_unknown()
            waits = first.wait(length), second.wait(length)
            is_sooner = waits[1] < waits[0]
            idle = time.perf_counter() - self._drives[not is_sooner].last_begun
            return is_sooner != (idle > _PATIENCE * waits[not is_sooner])

    def _takes_unknown(self) -> bool | None:
        """Return where a read goes while the speed of a drive is not known."""
        for is_second, drive in enumerate(self._drives):
            if not (drive.is_known or drive.is_busy):
                return bool(is_second)
        return next((bool(n) for n, drive in enumerate(self._drives) if drive.is_known), None)

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

    def measure(self, unseen: float) -> None:
        """Measure the drives by the reads that were ended; for `unseen` seconds nobody looked."""
        now = time.perf_counter()
        with self._lock:
            for drive in self._drives:
                drive.measure(now, unseen)

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
