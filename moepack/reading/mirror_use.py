"""Reads spread over a pack and its mirror: each goes where it is expected to end sooner.

That is the drive with less in flight, measured by how fast it was lately. One that has much in
flight takes longer for each read and no longer for all of them, so its speed is the bytes that were
in flight when a read began, its own among them, by the seconds until it ended.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from moepack.errors import MirrorWarning, MoepackError
from moepack.reading.budget import MirrorUsage
from moepack.reading.mirror import Coverage, Mirror

if TYPE_CHECKING:
    from moepack.reading.expert_read import ExpertRead
    from moepack.storage.backend import ReadRequest

_MEMORY = 0.9
"""How much of what was measured before counts beside the next read: ten reads are remembered."""
_PATIENCE = 100
"""A drive is tried again when it has had nothing for so many times as long as a read takes there.

So one that was slow for a moment is not lost for ever, and trying costs one part in so many.
"""


class Begun(NamedTuple):
    """A read in flight: where, its bytes, those in flight there with it, and since when."""

    is_mirrored: bool
    length: int
    ahead: int
    since: float


class _Drive:
    """What one of the two places has in flight, by owner, and how fast it was lately."""

    def __init__(self) -> None:
        self.in_flight: dict[Hashable, int] = {}
        self.last_begun = time.perf_counter()
        self._length = self._seconds = 0.0

    @property
    def speed(self) -> float | None:
        """Bytes a second; None where nothing was measured."""
        return self._length / self._seconds if self._seconds else None

    def wait(self, length: int, other: _Drive) -> float:
        """Return the seconds until a read of `length` bytes is expected to end."""
        speed = self.speed or other.speed or 1.0
        return (sum(self.in_flight.values()) + length) / speed

    def measure(self, ahead: int, seconds: float, *, is_prompt: bool) -> None:
        """Take in that so many bytes took so long, or less where the end was not waited for."""
        if not is_prompt and ahead < (self.speed or 0.0) * seconds:
            return
        self._length = self._length * _MEMORY + ahead
        self._seconds = self._seconds * _MEMORY + max(seconds, 1e-6)


class MirrorUse:
    """The reads of one reader, over all of its threads, from two places.

    `file_paths` are the pack's files. Once the mirror has failed it is not read any more: what it
    did not give is read from the pack.
    """

    def __init__(self, mirror: Mirror, file_paths: Sequence[Path]) -> None:
        assert mirror.description is not None
        ranges = mirror.description.ranges
        self.path = mirror.path
        self._files = {
            path: (mirror.path / path.name, Coverage(ranges[path.name]))
            for path in file_paths
            if path.name in ranges
        }
        self._drives = _Drive(), _Drive()
        self._lock = threading.RLock()  # with which a signal's handler may come in again
        self._read_count = self._error_count = self._read_length = 0
        self._failure: str | None = None

    @property
    def is_retired(self) -> bool:
        """Whether the mirror has failed."""
        return self._failure is not None

    @property
    def usage(self) -> MirrorUsage:
        """What was read from the mirror so far."""
        return MirrorUsage(self._read_count, self._error_count, self._read_length)

    def takes(self, read: ExpertRead) -> bool:
        """Return whether a read goes to the mirror: all of it is there, and is expected sooner."""
        if self.is_retired or not self._holds(read):
            return False
        length = sum(file_read.length for file_read in read.file_reads)
        first, mirror = self._drives
        with self._lock:
            waits = first.wait(length, mirror), mirror.wait(length, first)
            is_sooner = waits[1] < waits[0]
            idle = time.perf_counter() - self._drives[not is_sooner].last_begun
        return is_sooner != (idle > _PATIENCE * waits[not is_sooner])

    def _holds(self, read: ExpertRead) -> bool:
        for path, offset, length, _ in read.file_reads:
            place = self._files.get(path)
            if place is None or not place[1].holds(offset, offset + length):
                return False
        return True

    def redirect(self, request: ReadRequest) -> ReadRequest:
        """Return the same request of the mirror's file."""
        return request._replace(path=self._files[request.path][0])

    def begin(self, owner: Hashable, length: int, *, is_mirrored: bool) -> Begun:
        """Count a read as begun; `owner` is who forgets it if nobody ends it."""
        drive = self._drives[is_mirrored]
        with self._lock:
            drive.in_flight[owner] = drive.in_flight.get(owner, 0) + length
            drive.last_begun = time.perf_counter()
            return Begun(is_mirrored, length, sum(drive.in_flight.values()), drive.last_begun)

    def end(self, owner: Hashable, begun: Begun, received: int, *, is_prompt: bool) -> None:
        """Count a read as ended, with `received` bytes; `is_prompt`: its end was waited for."""
        drive = self._drives[begun.is_mirrored]
        with self._lock:
            left = drive.in_flight.pop(owner, begun.length) - begun.length
            if left > 0:
                drive.in_flight[owner] = left
            if received >= begun.length:
                seconds = time.perf_counter() - begun.since
                drive.measure(begun.ahead, seconds, is_prompt=is_prompt)
            if begun.is_mirrored:
                self._read_count += 1
                self._read_length += received

    def forget(self, owner: Hashable) -> None:
        """Count nothing as in flight any more of an owner that has nothing in flight."""
        with self._lock:
            for drive in self._drives:
                drive.in_flight.pop(owner, None)

    def retire(self, error: MoepackError) -> None:
        """Read nothing more from the mirror, which gave the `error`."""
        with self._lock:
            if self._failure is None:
                self._failure = ": ".join(filter(None, (error.place, error.problem)))

    def fail(self, error: MoepackError) -> None:
        """Count an expert for which the mirror gave the `error`; retire it, and warn once."""
        self.retire(error)
        with self._lock:
            self._error_count += 1
            is_first = self._error_count == 1
        if is_first and self._failure is not None:
            warn_of(self.path, self._failure)


def warn_of(path: Path, problem: str) -> None:
    """Warn that a mirror is not read."""
    text = f"{path}: this mirror is not read: {problem}; the pack itself serves"
    warnings.warn(text, MirrorWarning, stacklevel=2)
