"""Reads of a partial pack that go to where it came from: for bytes that are not here, or damaged.

The pack there has to be the same still, by its manifest; that is looked at before the first read.
"""

from __future__ import annotations

import errno
import threading
import warnings
from typing import TYPE_CHECKING

from moepack.common.errors import MirrorWarning, MoepackError, PackError
from moepack.common.remote_path import RemotePath
from moepack.pack.format import manifest
from moepack.storage.backend import Completion, ReadRequest
from moepack.storage.remote.store import RemoteError
from moepack.storage.remote.stores import store_of
from moepack.storage.remote_backend import RemoteBackend

if TYPE_CHECKING:
    from moepack.pack.reading.expert_read import ExpertRead
    from moepack.pack.reading.partial import Partial


class OriginBackend(RemoteBackend):
    """Reads the files of the pack that a partial pack came from, as long as it is that pack."""

    def __init__(self, partial: Partial) -> None:
        super().__init__()
        self._partial = partial
        self._is_checked = False
        self._checking = threading.Lock()

    def do(self, number: int, request: ReadRequest) -> Completion:
        """Do one request now, in this thread."""
        try:
            with self._checking:
                if not self._is_checked:
                    self._check()
                    self._is_checked = True
        except OSError as error:
            return Completion(number, 0, error)
        return super().do(number, request)

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


class OriginUse:
    """The reads of one reader that go to the origin, and their errors."""

    def __init__(self, partial: Partial) -> None:
        self._partial = partial
        self._has_warned = False

    def elsewhere(self, read: ExpertRead) -> ExpertRead | None:
        """Return the same read at the origin; None if all of it goes there already."""
        reads = read.file_reads
        if all(isinstance(one.path, RemotePath) for one in reads):
            return None
        origin = self._partial.origin
        moved = tuple(one._replace(path=origin / one.path.name) for one in reads)
        return read._replace(file_reads=moved)

    def explain(self, read: ExpertRead, error: MoepackError) -> None:
        """Add to the error of a read at the origin how to bring the expert here."""
        if error.path is None or not error.path.startswith(str(self._partial.origin)):
            return
        error.problem = f"not in {self._partial.folder}, and {error.problem}"
        if isinstance(error, PackError) or "moepack pull" in (error.hint or ""):
            return
        command = f"`moepack pull {self._partial.arguments} --layers {read.layer}`"
        if read.layer < 0:  # a tensor
            command = f"`moepack pull {self._partial.arguments}`"
        advice = f"when it can be reached again, bring it here: {command}"
        error.hint = advice if error.hint is None else f"{error.hint}; {advice}"

    def warn(self, error: MoepackError) -> None:
        """Warn once that bytes which are here are wrong."""
        if self._has_warned:
            return
        self._has_warned = True
        folder, origin = self._partial.folder, self._partial.origin
        where = ": ".join(filter(None, (error.place, error.problem)))
        command = f"`moepack pull {self._partial.arguments} --check`"
        text = f"{folder}: damaged here, and read from {origin}: {where}; {command} mends it"
        warnings.warn(text, MirrorWarning, stacklevel=2)
