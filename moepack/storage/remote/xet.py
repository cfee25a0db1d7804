"""Files of the hub that lie in Xet, its store of chunks that files share: ranges by its client.

Facts, of hf_xet 1.8: a stream may end early without an error; the first failure of a group ends all
of its streams, also those that begin later; its retries take 4.5 minutes if a server answers 503,
and no Ctrl-C ends them, so most are made here; and it renews its token at the hub, which alone gets
the user's.
"""

from __future__ import annotations

import errno
import os
import re
import threading
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

from moepack.common import extras
from moepack.storage.remote import hub
from moepack.storage.remote.calls import wait_for_blocking
from moepack.storage.remote.store import (
    RemoteError,
    RemoteStamp,
    check_process,
    failure_of,
    status_failure,
    wait_after,
)
from moepack.version import __version__

_STATUS = re.compile(r"\((\d{3} [A-Za-z -]*\w)\)")
_OTHER_STREAM = "Previous task error"
_RETRIED = ("429", "500", "502", "503", "504")


def what_is_missing() -> str | None:
    """Return what to do so that Xet's client is used, None if it is."""
    if hub.is_xet_disabled():
        return "unset HF_HUB_DISABLE_XET"
    try:
        import hf_xet
    except ImportError:
        return extras.package_hint("hf_xet")
    is_new = hasattr(hf_xet, "XetSession") and hasattr(hf_xet, "XetConfig")
    return None if is_new else extras.package_hint("hf_xet>=1.8")


class XetFiles:
    """The files of a repository that lie in Xet, at a commit; `hashes` are theirs.

    `token_address` is where the hub gives tokens for reading them, to those with `headers`.
    """

    def __init__(
        self, hashes: Mapping[str, str], token_address: str, headers: Mapping[str, str]
    ) -> None:
        self._hashes = hashes
        self._token_address = token_address
        self._headers = headers
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._group: Any = None

    def __contains__(self, key: str) -> bool:
        return key in self._hashes

    def stream(self, key: str, offset: int, length: int, stamp: RemoteStamp) -> Iterator[bytes]:
        """Yield exactly `length` bytes of a file from `offset` on, piece by piece.

        An interrupted stream is resumed where it stopped. Raises RemoteError, FileNotFoundError.
        """
        import hf_xet

        check_process(self._process)
        file = hf_xet.XetFileInfo(self._hashes[key], stamp.length)
        end, attempt = offset + length, 0
        while offset < end:
            group = None
            try:
                group = self._open_group()
                for piece in _pieces(group.download_stream(file, start=offset, end=end)):
                    if len(piece) > end - offset:
                        problem = "the store sends more bytes than were asked for"
                        raise failure_of(errno.EPROTO, problem)
                    offset, attempt = offset + len(piece), 0
                    yield piece
                if offset < end:
                    raise failure_of(errno.ECONNRESET, f"the stream ended at byte {offset:,}")
            except (OSError, RuntimeError, ValueError) as error:
                with self._lock:
                    if self._group is group:  # others may have a new one in its place already
                        self._group = None
                wait_after(_translated(error), attempt, _RETRIED)
                attempt += 1

    def _open_group(self) -> Any:
        with self._lock:
            if self._group is None:
                self._group = _session().new_download_stream_group(
                    token_refresh_url=self._token_address,
                    token_refresh_headers=dict(self._headers),
                    custom_headers={"User-Agent": f"moepack/{__version__}"},
                )
            return self._group


def _pieces(stream: Any) -> Iterator[bytes]:
    """Yield the pieces of a stream, which is cancelled if nobody waits for one any more."""
    while piece := wait_for_blocking(lambda: next(stream, b""), stream.cancel):
        yield piece


@lru_cache(maxsize=1)
def _session() -> Any:
    """Return the session of this process: its threads, and its connections."""
    import hf_xet

    return hf_xet.XetSession(hf_xet.XetConfig().with_config("client.retry_max_attempts", 2))


def _translated(error: Exception) -> OSError:
    """Return the error for one of the client's, whose texts have addresses."""
    if isinstance(error, RemoteError):
        return error
    text = str(error)
    if status := _STATUS.search(text):
        return status_failure(status[1])
    if isinstance(error, OSError) and error.errno is not None:
        return error
    if _OTHER_STREAM in text:
        return failure_of(errno.ECONNRESET, "another range of the file could not be read")
    # Once the hub has listed its files, a network that is gone may come back.
    number = errno.ECONNRESET if isinstance(error, ConnectionError) else errno.EIO
    return failure_of(number, text.partition("\n")[0].partition(", domain:")[0])
