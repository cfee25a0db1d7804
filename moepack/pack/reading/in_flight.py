"""The reads that a reader has in flight: their limits, their drives, and statistics of all so far.

Beyond about 100 MB in flight drives get slower, not faster, and memory is better used for experts.

Reads are spread over a pack and its mirror: each goes to the drive expected to finish first, by the
bytes that it has in flight and its recent speed, as native/cache.c does. A drive that was never
read, or not for long, gets a read for its speed. The policy of a partial pack is in `origin`.

A forked child has a copy of the reader and none of its threads: every call is refused there, and
closing does nothing.
"""

from __future__ import annotations

import os
import threading
import time
import warnings
import weakref
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from moepack.common.closing import Closing
from moepack.common.errors import MirrorWarning, MoepackError, RequestError
from moepack.storage.extents import RangeSet

if TYPE_CHECKING:
    from moepack.pack.reading.expert_read import ExpertRead, FileRead
    from moepack.storage.backend import Backend, ReadRequest

DEPTH = 32
MAX_LENGTH = 64 << 20
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


class Statistics(NamedTuple):
    """Counts of a reader's reads so far.

    `seconds` is the time during which anything was in flight, counted until it was taken, so that
    `read_length` / `seconds` is a lower bound of the throughput. `in_flight_*` is the current
    value, `peak_length` the maximum. `mirror` counts the reads from the pack's mirror; None if none
    is read. `rechecked_count` reads had parts that were right before, and were compared with their
    digests again. Lengths are bytes.
    """

    backend: str
    read_count: int
    error_count: int
    read_length: int
    seconds: float
    in_flight_count: int
    in_flight_length: int
    peak_length: int
    mirror: MirrorUsage | None = None
    rechecked_count: int = 0


class DriveReads:
    """The reads in flight on one drive, by their owners, and its speed while it is busy.

    `owned` has the count of an owner's reads and their bytes; `speed` is in bytes a second, 0 if
    nothing was read.
    """

    def __init__(self) -> None:
        self.owned: dict[Hashable, tuple[int, int]] = {}
        self.read_count = self.read_length = 0
        self.speed = self._length = 0.0
        self._since = self.last_begun = time.perf_counter()

    @property
    def in_flight_length(self) -> int:
        """The bytes in flight."""
        return sum(length for _, length in tuple(self.owned.values()))

    def begin(self, owner: Hashable, length: int) -> None:
        """Count a read as begun."""
        self.last_begun = time.perf_counter()
        if not self.owned:
            self._since, self._length = self.last_begun, 0.0
        count, owned_length = self.owned.get(owner, (0, 0))
        self.owned[owner] = count + 1, owned_length + length

    def end(self, owner: Hashable, length: int, received: int) -> None:
        """Count a read of `length` bytes as ended, of which `received` came."""
        count, owned_length = self.owned.get(owner, (1, length))
        if count > 1:
            self.owned[owner] = count - 1, owned_length - length
        else:
            self.owned.pop(owner, None)
        self.read_count += 1
        self.read_length += received
        self._length += received
        seconds = time.perf_counter() - self._since
        self.speed = self._length / (seconds or 1e-9)
        if seconds > _MEMORY_SECONDS:
            self._since, self._length = self._since + seconds / 2, self._length / 2


class SecondSource:
    """Files in the folder `place`, named as the pack's own, for one reader with all its threads.

    They have the `ranges` of the pack's files, by the paths of these, and are read if that is
    sooner. If one source gives an error or wrong bytes, the other may be its backup: this one if it
    `is_backup`, else the pack's own files, and then nothing more is read here: it `is_retired`.
    """

    is_backup = False

    def __init__(self, place: Path, ranges: Mapping[Path, RangeSet]) -> None:
        self._place = place
        self._ranges = ranges
        self._lock = threading.RLock()  # with which a signal's handler may come in again
        self.error_count = 0
        self.is_retired = False

    @property
    def mirror(self) -> Path | None:
        """The folder of a mirror, as long as it is read."""
        return None if self.is_retired or self.is_backup else self._place

    def takes(self, read: ExpertRead, drives: tuple[DriveReads, DriveReads]) -> bool:
        """Return whether a read goes here: all its bytes are here, and will come sooner.

        `drives` are that of the pack's files, and that of these.
        """
        if self.is_retired or not all(map(self._covers, read.file_reads)):
            return False
        for is_second, drive in enumerate(drives):
            if not drive.speed and not drive.owned:  # never read
                return bool(is_second)
        length = sum(file_read.length for file_read in read.file_reads)
        waits = [
            (drive.in_flight_length + length) / (drive.speed or _UNKNOWN_SPEED) for drive in drives
        ]
        is_sooner = waits[1] < waits[0]
        idle = time.perf_counter() - drives[not is_sooner].last_begun
        return is_sooner != (idle > _PATIENCE * waits[not is_sooner])

    def _covers(self, read: FileRead) -> bool:
        ranges = self._ranges.get(read.path)
        return ranges is not None and ranges.covers(read.offset, read.offset + read.length)

    def redirect(self, request: ReadRequest) -> ReadRequest:
        """Return the same request of the file here."""
        return request._replace(path=self._place / request.path.name)

    def fail(self, error: MoepackError) -> None:
        """Count an expert that came from the backup, since a source gave an `error`; warn once."""
        self.is_retired = True
        with self._lock:
            self.error_count += 1
            is_first = self.error_count == 1
        if is_first:
            text = self.warning(": ".join(filter(None, (error.place, error.problem))))
            warnings.warn(text, MirrorWarning, stacklevel=2)

    def warning(self, problem: str) -> str:
        """Return the text that warns of a problem."""
        return f"{self._place}: this mirror is not read: {problem}; the pack itself serves"

    def explain(self, read: ExpertRead, error: MoepackError) -> None:
        """Add to the error of a read without a backup what can be done."""


class InFlight(Closing):
    """The reads in flight of one reader, over all of its threads and batches.

    `depth` limits their number, `max_length` their bytes. A batch that has nothing in flight may
    always begin one read: so a batch never deadlocks, and a read may exceed the limit. Reads are
    counted by their owner: a batch, or a thread. `drives` are that of the pack's files, and that of
    the second source.
    """

    def __init__(
        self, backend: Backend, depth: int, max_length: int, second: SecondSource | None
    ) -> None:
        self.backend = backend
        self.depth = depth
        self.second = second
        self.drives = DriveReads(), DriveReads()
        self._max_length = max_length
        self._process = os.getpid()
        self._changed = threading.Condition()
        self._closing = threading.RLock()
        self._batches: weakref.WeakSet[Closing] = weakref.WeakSet()
        self._peak = self._errors = self._rechecked = 0
        self._busy_seconds = 0.0
        self._busy_since: float | None = None
        self.is_closed = self._is_over = False

    @property
    def is_forked(self) -> bool:
        """Whether this is the copy in a forked child."""
        return os.getpid() != self._process

    def check_process(self) -> None:
        """Raise RequestError in a forked child."""
        if self.is_forked:
            problem = "the reader belongs to the process that this one was forked from"
            raise RequestError(problem, hint="open the pack again in the child")

    def check_open(self) -> None:
        """Raise RequestError if the reader is closed, or in a forked child."""
        self.check_process()
        if self.is_closed:
            raise RequestError("the reader is closed")

    def adopt(self, batch: Closing) -> None:
        """Let `close` end a batch too. Raises RequestError if the reader is closed."""
        with self._changed:
            self.check_open()
            self._batches.add(batch)

    def release(self, batch: Closing) -> None:
        """Forget a batch, which has ended."""
        self._batches.discard(batch)

    def _total(self) -> tuple[int, int]:
        """Return the count and the bytes of all reads in flight."""
        count = length = 0
        for drive in self.drives:
            for owned_count, owned_length in tuple(drive.owned.values()):
                count += owned_count
                length += owned_length
        return count, length

    def takes_second(self, read: ExpertRead) -> bool:
        """Return whether a read goes to the second source."""
        if self.second is None:
            return False
        with self._changed:
            return self.second.takes(read, self.drives)

    def begin(
        self, owner: Hashable, length: int, *, is_second: bool = False, force: bool = False
    ) -> bool:
        """Count a read of `length` bytes as begun; return False if it may not begin now.

        It may not if that exceeds a limit, unless `force`, or if the reader is closed.
        """
        with self._changed:
            count, total = self._total()
            total += length
            is_full = count >= self.depth or total > self._max_length
            if self.is_closed or (is_full and not force):
                return False
            drive = self.drives[is_second]
            drive.begin(owner, length)
            if self._busy_since is None:
                self._busy_since = drive.last_begun
            if total > self._peak:
                self._peak = total
        return True

    def end(
        self, owner: Hashable, length: int, received: int, *, is_second: bool, failed: bool
    ) -> None:
        """Count a read of `length` bytes as ended, with `received` bytes."""
        with self._changed:
            drive = self.drives[is_second]
            drive.end(owner, length, received)
            if owner not in drive.owned:
                self._note_end()
        if failed:
            self.add_error(is_second=is_second)

    def forget(self, owner: Hashable) -> None:
        """Count nothing as in flight any more of an owner whose reads nobody takes."""
        with self._changed:
            for drive in self.drives:
                drive.owned.pop(owner, None)
            self._note_end()

    def _note_end(self) -> None:
        """Note that an owner has nothing in flight any more, and perhaps nobody has."""
        if self._busy_since is not None and not any(drive.owned for drive in self.drives):
            self._busy_seconds += time.perf_counter() - self._busy_since
            self._busy_since = None
        self._changed.notify_all()

    def add_error(self, *, is_second: bool) -> None:
        """Count an error of a read or of its bytes; one of a mirror is none of the reader's."""
        if self.second is None or self.second.is_backup or not is_second:
            with self._changed:
                self._errors += 1

    def add_recheck(self) -> None:
        """Count a read of parts that were right before, and are compared again."""
        with self._changed:
            self._rechecked += 1

    def statistics(self) -> Statistics:
        """Return the numbers as they are now."""
        with self._changed:
            count, length = self._total()
            since = self._busy_since
            busy = 0.0 if since is None else time.perf_counter() - since
            _, there = self.drives
            mirror = None
            if self.second is not None and not self.second.is_backup:
                mirror = MirrorUsage(there.read_count, self.second.error_count, there.read_length)
            return Statistics(
                backend=self.backend.name,
                read_count=sum(drive.read_count for drive in self.drives),
                error_count=self._errors,
                read_length=sum(drive.read_length for drive in self.drives),
                seconds=self._busy_seconds + busy,
                in_flight_count=count,
                in_flight_length=length,
                peak_length=self._peak,
                mirror=mirror,
                rechecked_count=self._rechecked,
            )

    def _threads(self) -> set[Hashable]:
        """Return the threads that read by themselves; what batches read is closed, or dropped."""
        owners = (owner for drive in self.drives for owner in tuple(drive.owned))
        return {owner for owner in owners if isinstance(owner, int)}

    def close(self) -> None:
        """End all batches, let nothing begin, wait for other threads, close the backend."""
        if self.is_forked:
            return
        with self._closing:
            with self._changed:
                self.is_closed = True
            for batch in list(self._batches):
                batch.close()
            this_thread = {threading.get_ident()}
            with self._changed:
                self._changed.wait_for(lambda: self._threads() <= this_thread)
            if not self._is_over:
                self.backend.close()
                self._is_over = True
