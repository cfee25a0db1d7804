"""Reads in the calling thread, and the check of all bytes that were read, in any thread.

An expert for which one source gives an error or wrong bytes is read again here from the other, if
that is its backup.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from moepack.common.errors import MachineError, MoepackError, PackError

if TYPE_CHECKING:
    from moepack.pack.reading.expert_read import AnyMemory, ExpertRead, FileRead
    from moepack.pack.reading.in_flight import InFlight
    from moepack.pack.reading.open_work import OpenWork
    from moepack.pack.reading.scheduler import PendingRead
    from moepack.pack.reading.second_source import SecondSource
    from moepack.storage.backend import Backend

CHECKS = ("always", "first", "never")


class CheckedReads:
    """The reads of one reader that do not go through a queue; may be used from several threads.

    `check` is one of CHECKS: when parts are compared with their digests. With `first` a part whose
    digest was right is not compared again: a drive that gave the right bytes once is trusted from
    then on. The parts of the `second` source, if there is one, are checked for themselves.
    """

    def __init__(
        self,
        backend: Backend,
        in_flight: InFlight,
        open_work: OpenWork,
        check: str,
        second: SecondSource | None,
    ) -> None:
        self._backend = backend
        self._in_flight = in_flight
        self._open_work = open_work
        self._is_checked = check != "never"
        self._right: set[tuple[int, int, str, bool]] | None = set() if check == "first" else None
        self._second = second

    def fill(self, read: ExpertRead, memory: AnyMemory) -> None:
        """Read into `memory`, in this thread, and check the bytes; raise their error."""
        is_second = self._second is not None and bool(self._second.takes(read))
        try:
            self._fill_from(read, memory, is_second=is_second)
            return
        except (PackError, MachineError) as error:
            if not self._has_backup(read, error, is_second=is_second):
                raise
            problem = error.with_traceback(None)  # which holds this frame, and that the memory
        self._read_again(read, memory, problem, is_second=is_second)

    def finish(self, pending: PendingRead) -> None:
        """Check the bytes that a scheduler has read.

        Raises the error that the read ended with, and PackError for a digest that differs.
        """
        read, memory, is_second = pending.read, pending.memory, pending.is_second
        try:
            if pending.error is not None:
                raise pending.error
            assert memory is not None
            self._check(read, memory, is_second=is_second)
            return
        except (PackError, MachineError) as error:
            if memory is None or not self._has_backup(read, error, is_second=is_second):
                raise
            pending.error = None
            problem = error.with_traceback(None)
        self._read_again(read, memory, problem, is_second=is_second)

    def _has_backup(self, read: ExpertRead, error: MoepackError, *, is_second: bool) -> bool:
        """Return whether a read that ended with an error can be done from the other source."""
        if self._second is None or self._second.is_backup != is_second:
            return self._second is not None
        self._second.explain(read, error)
        return False

    def _read_again(
        self, read: ExpertRead, memory: AnyMemory, problem: MoepackError, *, is_second: bool
    ) -> None:
        """Read from the other source, and then blame the first for the `problem` that it had."""
        assert self._second is not None
        try:
            self._fill_from(read, memory, is_second=not is_second)
        except (PackError, MachineError) as error:
            if is_second:  # so this is the pack's own error
                raise
            problem.hint = f"there it cannot be read either: {error.problem}"
            raise problem from None
        self._second.fail(problem)

    def _fill_from(self, read: ExpertRead, memory: AnyMemory, *, is_second: bool) -> None:
        """Read from one of the sources into `memory`, in this thread, and check the bytes."""
        for file_read in read.file_reads if read.length else ():
            self._read(read, file_read, memory, is_second=is_second)
        self._check(read, memory, is_second=is_second)

    def _check(self, read: ExpertRead, memory: AnyMemory, *, is_second: bool) -> None:
        if not self._is_checked:
            return
        try:
            if self._right is None:
                read.check_digests(memory, read.parts)
                return
            parts = {(read.layer, read.expert, part.name, is_second): part for part in read.parts}
            read.check_digests(memory, [parts[key] for key in parts if key not in self._right])
            self._right.update(parts)
        except PackError:
            if self._second is None or self._second.counts_errors(is_second=is_second):
                self._in_flight.add_error()
            raise

    def _read(
        self, read: ExpertRead, file_read: FileRead, memory: AnyMemory, *, is_second: bool
    ) -> None:
        """Do one of the reads of `read`, in this thread."""
        owner, second = threading.get_ident(), self._second
        problem: MoepackError | None = None
        received, failed = 0, True
        try:
            if second is not None:
                second.begin(owner, file_read.length, is_second=is_second)
            if not self._in_flight.begin(owner, file_read.length, force=True):
                self._open_work.check_open()
            request = read.request(file_read, memory)
            if second is not None and is_second:
                request = second.redirect(request)
            _, length, error = self._backend.read(request)
            received = read.received(file_read, memory, length)
            problem = read.problem(file_read, received, error)
            failed = problem is not None and (
                second is None or second.counts_errors(is_second=is_second)
            )
        finally:
            self._in_flight.end(owner, 1, file_read.length, received, failed)
            if second is not None:
                second.end(owner, file_read.length, received, is_second=is_second)
                second.measure(unseen=0.0)
        if problem is not None:
            try:
                raise problem
            finally:
                del problem  # its traceback holds this frame, and that holds the buffer
