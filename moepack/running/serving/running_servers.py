"""The running servers of this user: a small private file for each, which `moepack ps` reads.

A server keeps its file locked until it has ended, however that happens, and a file without a lock
is left over: nothing depends on process ids, which are used again, nor on this machine or
container, which may share the folder with others.
"""

import contextlib
import fcntl
import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moepack.common.closing import Closing
from moepack.storage.folders import user_folder

_LENGTH = 1 << 12
"""Bytes of a file, always the same: it is written at once, over the last one."""
_SUFFIX = ".json"


class ServerFile(Closing):
    """The file of this process; without a folder for it, or a lock, there is none.

    A context manager, which removes it.
    """

    def __init__(self) -> None:
        self._path: Path | None = None
        self._descriptor = -1
        self._last = b""
        if (folder := _folder()) is None:
            return
        path = folder / f"{os.getpid()}-{secrets.token_hex(4)}"
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            self._descriptor = os.open(path, flags, 0o600)
            stack.callback(os.close, self._descriptor)
            stack.callback(path.unlink)
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)  # which not every file system has
            self._path = path.rename(path.with_suffix(_SUFFIX))
            stack.pop_all()

    def write(self, facts: Mapping[str, Any]) -> None:
        """Write facts, if they are new."""
        data = json.dumps({"process": os.getpid(), **facts}).encode().ljust(_LENGTH)
        if self._path is not None and data != self._last and len(data) == _LENGTH:
            with contextlib.suppress(OSError):
                os.pwrite(self._descriptor, data, 0)
                self._last = data

    def close(self) -> None:
        """Remove the file."""
        if self._path is not None:
            with contextlib.suppress(OSError):
                self._path.unlink()
            os.close(self._descriptor)
            self._path = None


def read_servers() -> list[dict[str, Any]]:
    """Return the facts of all running servers, the oldest first; remove leftover files."""
    if (folder := _folder()) is None:
        return []
    servers = []
    for path in folder.glob(f"*{_SUFFIX}"):
        with contextlib.suppress(OSError, ValueError):  # it ends at this moment
            if (facts := _read(path)) is not None:
                servers.append(facts)
    return sorted(servers, key=lambda facts: float(facts["began"]))


def _read(path: Path) -> dict[str, Any] | None:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            facts: dict[str, Any] = json.loads(os.pread(descriptor, _LENGTH, 0))
            return facts
        path.unlink()
        return None
    finally:
        os.close(descriptor)


def _folder() -> Path | None:
    state = user_folder("XDG_STATE_HOME", ".local/state")
    if state is None:
        return None
    folder = state / "servers"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError:
        return None
    return folder
