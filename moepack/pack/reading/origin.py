"""Reads of a partial pack that go to where it came from: for bytes that are not here, or damaged.

The pack there has to be the same still, by its manifest; that is looked at before the first read.
"""

from __future__ import annotations

import errno
import threading
from typing import TYPE_CHECKING

from moepack.common.errors import MoepackError, PackError
from moepack.common.escaping import shell_word
from moepack.common.paths import RemotePath
from moepack.pack.format import manifest
from moepack.pack.reading.in_flight import SecondSource
from moepack.storage.backend import Backend, Completion, ReadRequest
from moepack.storage.remote.store import RemoteError
from moepack.storage.remote.stores import store_of
from moepack.storage.threaded import RemoteBackend, ThreadedBackend

if TYPE_CHECKING:
    from moepack.pack.reading.copies import Partial
    from moepack.pack.reading.expert_read import ExpertRead
    from moepack.pack.reading.in_flight import DriveReads


class OriginBackend(RemoteBackend):
    """Reads files that are here by `local`, and others where a partial pack came from.

    As long as the pack there is the same.
    """

    def __init__(self, partial: Partial, local: Backend) -> None:
        super().__init__()
        self.name = local.name
        self._local = local
        self._partial = partial
        self._is_checked = False
        self._checking = threading.Lock()

    def do(self, number: int, request: ReadRequest) -> Completion:
        """Do one request now, in this thread."""
        if not isinstance(request.path, RemotePath):
            return self._read_here(number, request)
        try:
            with self._checking:
                if not self._is_checked:
                    self._check()
                    self._is_checked = True
        except OSError as error:
            return Completion(number, 0, error)
        return super().do(number, request)

    def _read_here(self, number: int, request: ReadRequest) -> Completion:
        if not isinstance(self._local, ThreadedBackend):  # the caller's
            return self._local.read(request)._replace(number=number)
        completion = self._local.do(number, request)
        self.name = self._local.name
        return completion

    def warn(self) -> None:
        """Warn once if files that are here are not read as they were any more."""
        if isinstance(self._local, ThreadedBackend):
            self._local.warn()

    def close(self) -> None:
        """End the threads, and close all files."""
        super().close()
        self._local.close()

    def _check(self) -> None:
        """Raise RemoteError if the pack is not there any more, or another one."""
        path = self._partial.origin / manifest.NAME
        try:
            data = store_of(path).read(path.key, manifest.MAX_LENGTH)
        except FileNotFoundError:
            raise RemoteError(errno.ESTALE, "the pack is not there any more") from None
        except MoepackError as error:  # the store cannot be set up, or the hub asked
            failure = RemoteError(errno.EIO, error.problem)
            failure.hint = error.hint
            raise failure from None
        if data != self._partial.manifest_bytes:
            failure = RemoteError(errno.ESTALE, "another pack is there now")
            failure.hint = f"pull that one into a new folder: `moepack pull {self._partial.origin}`"
            raise failure


class OriginUse(SecondSource):
    """The origin of a partial pack: what is missing in its folder is read there, and no more."""

    is_backup = True

    def __init__(self, partial: Partial) -> None:
        super().__init__(partial.origin, {})
        self._partial = partial

    def takes(self, read: ExpertRead, drives: tuple[DriveReads, DriveReads]) -> bool:
        """Return whether a read was planned at the origin, since its bytes are not here."""
        return any(isinstance(one.path, RemotePath) for one in read.file_reads)

    def explain(self, read: ExpertRead, error: MoepackError) -> None:
        """Add to the error of a read at the origin how to bring the expert here."""
        error.problem = f"not in {self._partial.folder}, and {error.problem}"
        if isinstance(error, PackError) or "moepack pull" in (error.hint or ""):
            return
        command = f"`moepack pull {self._partial.arguments} --layers {read.layer}`"
        if read.layer < 0:  # a tensor
            command = f"`moepack pull {self._partial.arguments}`"
        advice = f"when it can be reached again, bring it here: {command}"
        error.hint = advice if error.hint is None else f"{error.hint}; {advice}"

    def warning(self, problem: str) -> str:
        """Return the text that warns of wrong bytes in the folder."""
        folder, origin = self._partial.folder, self._partial.origin
        command = f"`moepack repair {shell_word(str(folder))}`"
        return f"{folder}: damaged here, and read from {origin}: {problem}; {command} mends it"
