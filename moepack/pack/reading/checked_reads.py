"""Reads in the calling thread, and the check of all bytes that were read, in any thread.

An expert for which one source gives an error or wrong bytes is read again here from the other, if
that is its backup. Errors are values until the last: a traceback would hold the memory.
"""

from __future__ import annotations

import itertools
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moepack.common.errors import MoepackError, PackError
    from moepack.pack.reading.expert_read import AnyMemory, ExpertRead, FileRead
    from moepack.pack.reading.in_flight import InFlight

CHECKS = ("always", "first", "never")
LATER_PERIOD = 997
"""How many later reads one is checked of, as native/reads.c has it."""


class PendingRead:
    """One expert on its way: the plan of its reads, its memory, and its error, if any.

    `memory` is None until the first of its reads begins, unless it is the caller's own. All of it
    comes from one source, the second if `is_second`, which is chosen when the first read begins.
    """

    __slots__ = ("begun_count", "ended_count", "error", "is_second", "memory", "number", "read")

    def __init__(self, number: int, read: ExpertRead, memory: AnyMemory | None) -> None:
        self.number = number
        self.read = read
        self.memory = memory
        self.error: MoepackError | None = None
        self.begun_count = self.ended_count = 0
        self.is_second = False


class CheckedReads:
    """The reads of one reader that do not go through a queue; may be used from several threads.

    `check` is one of CHECKS: when parts are compared with their digests. With `first` a part whose
    digest was right is trusted from then on, but memory and drives fail late: of the reads of such
    parts alone, each LATER_PERIOD-th is compared again. The parts of a second source, if there is
    one, are checked for themselves.
    """

    def __init__(self, in_flight: InFlight, check: str) -> None:
        self.in_flight = in_flight
        self._second = in_flight.second
        self._is_checked = check != "never"
        self._right: set[tuple[int, int, str, bool]] | None = set() if check == "first" else None
        self._later = itertools.count(1)  # a call of next is one step for all threads

    def fill(self, read: ExpertRead, memory: AnyMemory) -> None:
        """Read into `memory`, in this thread, and check the bytes; raise their error."""
        is_second = self.in_flight.takes_second(read)
        self._end(read, memory, self._read(read, memory, is_second), is_second)

    def finish(self, pending: PendingRead) -> None:
        """Check the bytes that a batch has read.

        Raises the error that the read ended with, and PackError for a digest that differs.
        """
        read, memory, is_second = pending.read, pending.memory, pending.is_second
        if memory is None:
            assert pending.error is not None
            raise pending.error
        self._end(read, memory, pending.error or self._check(read, memory, is_second), is_second)
        pending.error = None

    def _end(
        self, read: ExpertRead, memory: AnyMemory, problem: MoepackError | None, is_second: bool
    ) -> None:
        """Raise the problem of a read, if it has one and cannot be done from its backup."""
        second = self._second
        if problem is not None and second is not None:
            if second.is_backup == is_second:
                second.explain(read, problem)
            else:
                other = self._read(read, memory, not is_second)
                if other is None:
                    second.fail(problem)
                elif not is_second:
                    problem.hint = f"there it cannot be read either: {other.problem}"
                    other = problem
                problem = other
        if problem is not None:
            try:
                raise problem
            finally:
                del problem  # its traceback holds this frame, and that holds the memory

    def _read(self, read: ExpertRead, memory: AnyMemory, is_second: bool) -> MoepackError | None:
        """Read from one of the sources, in this thread, and check the bytes; return the error."""
        for file_read in read.file_reads if read.length else ():
            problem = self._read_range(read, file_read, memory, is_second)
            if problem is not None:
                return problem
        return self._check(read, memory, is_second)

    def _check(self, read: ExpertRead, memory: AnyMemory, is_second: bool) -> PackError | None:
        if not self._is_checked:
            return None
        if self._right is None:
            problem = read.wrong_digest(memory, read.parts)
        else:
            parts = {(read.layer, read.expert, part.name, is_second): part for part in read.parts}
            unchecked = [part for key, part in parts.items() if key not in self._right]
            is_later = not unchecked and any(part.digest is not None for part in read.parts)
            if is_later and next(self._later) % LATER_PERIOD == 0:
                unchecked = [*read.parts]
                self.in_flight.add_recheck()
            problem = read.wrong_digest(memory, unchecked)
            if problem is None:
                self._right.update(parts)
        if problem is not None:
            self.in_flight.add_error(is_second=is_second)
        return problem

    def _read_range(
        self, read: ExpertRead, file_read: FileRead, memory: AnyMemory, is_second: bool
    ) -> MoepackError | None:
        """Do one of the reads of `read`, in this thread; return its error."""
        owner, in_flight, second = threading.get_ident(), self.in_flight, self._second
        length, received, failed = file_read.length, 0, True
        try:
            if not in_flight.begin(owner, length, is_second=is_second, force=True):
                in_flight.check_open()
            request = read.request(file_read, memory)
            if second is not None and is_second:
                request = second.redirect(request)
            _, request_length, error = in_flight.backend.read(request)
            received = read.received(file_read, memory, request_length)
            problem = read.problem(file_read, received, error)
            failed = problem is not None
            return problem
        finally:
            in_flight.end(owner, length, received, is_second=is_second, failed=failed)
