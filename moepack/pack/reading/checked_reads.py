"""Reads in the calling thread, and the check of all bytes that were read, in any thread.

An expert for which the mirror gives an error or wrong bytes is read again from the pack here; one
of a partial pack, from where that pack came from.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from moepack.common.errors import MachineError, MoepackError, PackError

if TYPE_CHECKING:
    from moepack.pack.reading.expert_read import AnyMemory, ExpertRead, FileRead
    from moepack.pack.reading.in_flight import InFlight
    from moepack.pack.reading.mirror_use import MirrorUse
    from moepack.pack.reading.open_work import OpenWork
    from moepack.pack.reading.origin import OriginUse
    from moepack.pack.reading.scheduler import PendingRead
    from moepack.storage.backend import Backend

CHECKS = ("always", "first", "never")


class CheckedReads:
    """The reads of one reader that do not go through a queue; may be used from several threads.

    `check` is one of CHECKS: when parts are compared with their digests. With `first` a part whose
    digest was right is not compared again: a drive that gave the right bytes once is trusted from
    then on. The mirror's parts are checked for themselves. With `origin` the pack is a partial one.
    """

    def __init__(
        self,
        backend: Backend,
        in_flight: InFlight,
        open_work: OpenWork,
        check: str,
        mirror: MirrorUse | None,
        origin: OriginUse | None = None,
    ) -> None:
        self._backend = backend
        self._in_flight = in_flight
        self._open_work = open_work
        self._is_checked = check != "never"
        self._right: set[tuple[int, int, str, bool]] | None = set() if check == "first" else None
        self._mirror = mirror
        self._origin = origin

    def fill(self, read: ExpertRead, memory: AnyMemory) -> None:
        """Read into `memory`, in this thread, and check the bytes; raise their error."""
        is_mirrored = self._mirror is not None and bool(self._mirror.takes(read))
        try:
            self._fill_from(read, memory, is_mirrored=is_mirrored)
            return
        except (PackError, MachineError) as error:
            if not self._is_elsewhere(read, error, is_mirrored=is_mirrored):
                raise
            problem = error.with_traceback(None)  # which holds this frame, and that the memory
        self._read_again(read, memory, problem)

    def finish(self, pending: PendingRead) -> None:
        """Check the bytes that a scheduler has read.

        Raises the error that the read ended with, and PackError for a digest that differs.
        """
        try:
            if pending.error is not None:
                raise pending.error
            assert pending.memory is not None
            self._check(pending.read, pending.memory, is_mirrored=pending.is_mirrored)
            return
        except (PackError, MachineError) as error:
            is_mirrored = pending.is_mirrored
            is_elsewhere = self._is_elsewhere(pending.read, error, is_mirrored=is_mirrored)
            if not is_elsewhere or pending.memory is None:
                raise
            pending.error = None
            problem = error.with_traceback(None)
        self._read_again(pending.read, pending.memory, problem)

    def _is_elsewhere(self, read: ExpertRead, error: MoepackError, *, is_mirrored: bool) -> bool:
        """Return whether a read that ended with an error can be done at another place."""
        if is_mirrored or self._origin is None:
            return is_mirrored
        self._origin.explain(read, error)
        return self._origin.elsewhere(read) is not None

    def _read_again(self, read: ExpertRead, memory: AnyMemory, problem: MoepackError) -> None:
        """Read at the other place, and then blame the first one for the `problem` that it had."""
        if self._origin is not None:
            self._read_at_origin(self._origin, read, memory, problem)
            return
        assert self._mirror is not None
        self._fill_from(read, memory, is_mirrored=False)
        self._mirror.fail(problem)

    def _read_at_origin(
        self, origin: OriginUse, read: ExpertRead, memory: AnyMemory, problem: MoepackError
    ) -> None:
        """Read at the origin of a partial pack; if that fails too, raise the first `problem`."""
        again = origin.elsewhere(read)
        assert again is not None
        try:
            self._fill_from(again, memory, is_mirrored=False)
        except (PackError, MachineError) as error:
            problem.hint = f"there it cannot be read either: {error.problem}"
            raise problem from None
        if self._right is not None:  # which they are not where they are read first
            self._right -= {(read.layer, read.expert, p.name, False) for p in read.parts}
        origin.warn(problem)

    def _fill_from(self, read: ExpertRead, memory: AnyMemory, *, is_mirrored: bool) -> None:
        """Read from the pack or its mirror into `memory`, in this thread, and check the bytes."""
        for file_read in read.file_reads if read.length else ():
            self._read(read, file_read, memory, is_mirrored=is_mirrored)
        self._check(read, memory, is_mirrored=is_mirrored)

    def _check(self, read: ExpertRead, memory: AnyMemory, *, is_mirrored: bool) -> None:
        if not self._is_checked:
            return
        try:
            if self._right is None:
                read.check_digests(memory, read.parts)
                return
            parts = {(read.layer, read.expert, part.name, is_mirrored): part for part in read.parts}
            read.check_digests(memory, [parts[key] for key in parts if key not in self._right])
            self._right.update(parts)
        except PackError:
            if not is_mirrored:
                self._in_flight.add_error()
            raise

    def _read(
        self, read: ExpertRead, file_read: FileRead, memory: AnyMemory, *, is_mirrored: bool
    ) -> None:
        """Do one of the reads of `read`, in this thread."""
        owner, mirror = threading.get_ident(), self._mirror
        problem: MoepackError | None = None
        received, failed = 0, True
        try:
            if mirror is not None:
                mirror.begin(owner, file_read.length, is_mirrored=is_mirrored)
            if not self._in_flight.begin(owner, file_read.length, force=True):
                self._open_work.check_open()
            request = read.request(file_read, memory)
            if mirror is not None and is_mirrored:
                request = mirror.redirect(request)
            _, length, error = self._backend.read(request)
            received = read.received(file_read, memory, length)
            problem = read.problem(file_read, received, error)
            failed = problem is not None and not is_mirrored
        finally:
            self._in_flight.end(owner, 1, file_read.length, received, failed)
            if mirror is not None:
                mirror.end(owner, file_read.length, received, is_mirrored=is_mirrored)
                mirror.measure(unseen=0.0)
        if problem is not None:
            try:
                raise problem
            finally:
                del problem  # its traceback holds this frame, and that holds the buffer
