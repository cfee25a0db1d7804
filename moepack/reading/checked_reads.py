"""Reads in the thread that asks, and the check of whatever was read, by whomever.

What the mirror does not give, or gives wrongly, is read again from its first place here.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from moepack.errors import MachineError, MoepackError, PackError
from moepack.reading.decoded_read import DecodedRead

if TYPE_CHECKING:
    from moepack.reading.budget import Budget
    from moepack.reading.decoding import Decoder
    from moepack.reading.digest_check import DigestCheck
    from moepack.reading.expert_read import ExpertRead, Memory, ScatteredMemory
    from moepack.reading.mirror_use import MirrorUse
    from moepack.reading.open_work import OpenWork
    from moepack.reading.scheduler import PendingRead
    from moepack.storage.backend import Backend


class CheckedReads:
    """The reads of one reader that do not go through a queue; may be used from several threads."""

    def __init__(
        self,
        backend: Backend,
        budget: Budget,
        open_work: OpenWork,
        digest_check: DigestCheck,
        decoder: Decoder | None,
        mirror: MirrorUse | None,
    ) -> None:
        self._backend = backend
        self._budget = budget
        self._open_work = open_work
        self._digest_check = digest_check
        self._decoder = decoder
        self._mirror = mirror

    def fill(self, read: ExpertRead, memory: Memory) -> None:
        """Read into `memory`, in this thread, and check what came; raise what is wrong."""
        is_mirrored = self._mirror is not None and bool(self._mirror.takes(read))
        try:
            self._bring(read, memory, is_mirrored=is_mirrored)
            return
        except (PackError, MachineError) as error:
            if not is_mirrored:
                raise
            problem = error.with_traceback(None)  # which holds this frame, and that the memory
        self._read_again(read, memory, problem)

    def finish(self, pending: PendingRead) -> None:
        """Compare what a scheduler has read with its digests, if this reader does.

        Raises what the read ended with, and PackError for a digest that differs.
        """
        try:
            if pending.error is not None:
                raise pending.error
            assert pending.memory is not None
            self._check(pending.read, pending.memory, is_mirrored=pending.is_mirrored)
            return
        except (PackError, MachineError) as error:
            if not pending.is_mirrored or pending.memory is None:
                raise
            pending.error = None
            problem = error.with_traceback(None)
        self._read_again(pending.read, pending.memory, problem)

    def _read_again(
        self, read: ExpertRead, memory: Memory | ScatteredMemory, problem: MoepackError
    ) -> None:
        """Read from its first place what had a problem in the mirror; raise if it has one too."""
        assert self._mirror is not None
        self._bring(read, memory, is_mirrored=False)
        self._mirror.fail(problem)

    def _bring(
        self, read: ExpertRead, memory: Memory | ScatteredMemory, *, is_mirrored: bool
    ) -> None:
        """Read from one of the places into `memory`, in this thread, and check what came."""
        if not isinstance(read, DecodedRead):
            self._read(read, memory, None, is_mirrored=is_mirrored)
        else:
            assert self._decoder is not None
            scratch = self._decoder.scratch(read)
            self._read(read, memory, scratch, is_mirrored=is_mirrored)
            problem = self._decoder.decode(read, memory, scratch)
            if problem is not None:
                try:
                    raise problem
                finally:
                    del problem  # as in `_read`
        self._check(read, memory, is_mirrored=is_mirrored)

    def _check(
        self, read: ExpertRead, memory: Memory | ScatteredMemory, *, is_mirrored: bool
    ) -> None:
        try:
            self._digest_check.check(read, memory, is_mirrored=is_mirrored)
        except PackError:
            if not is_mirrored:
                self._budget.add_error()
            raise

    def _read(
        self,
        read: ExpertRead,
        memory: Memory | ScatteredMemory,
        scratch: Memory | None,
        *,
        is_mirrored: bool,
    ) -> None:
        """Read into `memory`, and frames into `scratch`, in this thread."""
        owner, mirror = threading.get_ident(), self._mirror
        for file_read in read.file_reads if read.length else ():
            problem: MoepackError | None = None
            got, failed = 0, True
            try:
                if mirror is not None:
                    mirror.begin(owner, file_read.length, is_mirrored=is_mirrored)
                if not self._budget.begin(owner, file_read.length, force=True):
                    self._open_work.check_open()
                place = memory if scratch is None else read.place_in(file_read, memory, scratch)
                request = read.request(file_read, place)
                if mirror is not None and is_mirrored:
                    request = mirror.redirect(request)
                _, length, error = self._backend.read(request)
                got = read.received(file_read, place, length)
                problem = read.problem(file_read, got, error)
                failed = problem is not None and not is_mirrored
            finally:
                self._budget.end(owner, 1, file_read.length, got, failed)
                if mirror is not None:
                    mirror.end(owner, file_read.length, got, is_mirrored=is_mirrored)
                    mirror.measure(unseen=0.0)
            if problem is not None:
                try:
                    raise problem
                finally:
                    del problem  # its traceback holds this frame, and that holds the buffer
