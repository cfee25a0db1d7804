"""Where learned counts are kept: a file for each model in a folder that is the user's alone."""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from moepack.errors import MachineError, RequestError, TraceError, read_failure, write_failure
from moepack.hotness import learned as codec
from moepack.hotness.learned import LEAST_TOKENS, Learned, Window
from moepack.reading.pack import Pack
from moepack.storage.atomic import sync_directory
from moepack.storage.lock import lock
from moepack.storage.user_folder import user_folder

MOST_MODELS = 64
"""Of more, those are forgotten that were written longest ago."""
_SUFFIX = ".counts"
_PAUSE = 0.05
"""Seconds after which the lock is tried again."""


class LearnedStore:
    """What was learned of the model in `pack`, whichever file it lies in: its headers name it.

    `folder` is the user's state folder by default. Raises MachineError where there is none.
    """

    def __init__(self, pack: Pack, folder: Path | None = None) -> None:
        headers = "".join(shard.header_sha256 for shard in pack.manifest.source.shards)
        self._identity = hashlib.sha256(headers.encode()).digest()
        self._expert_counts = pack.shape.without_mtp().expert_counts
        self._folder = _default_folder() if folder is None else folder
        self.path = self._folder / f"{self._identity.hex()[:32]}{_SUFFIX}"

    def new(self) -> Learned:
        """Return what is to be learned in, with nothing in it."""
        return Learned(self._expert_counts)

    def read(self) -> Learned:
        """Return what was learned; nothing where there is no file.

        Raises TraceError for a damaged file, MachineError for one that cannot be read.
        """
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            with open(descriptor, "rb") as file:
                data = file.read(codec.most_length(self._expert_counts) + 1)
        except FileNotFoundError:
            return self.new()
        except OSError as error:
            raise read_failure(error, self.path, MachineError) from None
        return codec.decode(data, self._identity, self._expert_counts, os.fspath(self.path))

    def add(self, windows: Sequence[Window], seconds: float = 2.0) -> bool:
        """Add later windows to what other runs may write too; return whether they were written.

        They are not while they have too few tokens, and where other processes are writing for so
        many seconds. A damaged file is begun anew. Raises MachineError for what the system refuses.
        """
        try:
            with self._locked(seconds) as is_locked:
                if not is_locked:
                    return False
                try:
                    learned = self.read()
                except TraceError:
                    learned = self.new()
                learned.add(windows)
                learned.end()
                if learned.token_count < LEAST_TOKENS:
                    return False
                self._write(codec.encode(learned, self._identity))
                self._forget_others()
        except OSError as error:
            raise write_failure(error, self.path, "`learn=False` goes without it") from None
        return True

    def forget(self) -> bool:
        """Remove what was learned; return whether there was anything.

        Raises MachineError for what the system refuses.
        """
        try:
            with self._locked(2.0):
                is_there = self.path.exists()
                for path in (self.path, self._partial):
                    path.unlink(missing_ok=True)
                return is_there
        except OSError as error:
            raise write_failure(error, self.path, "remove the file") from None

    @property
    def _partial(self) -> Path:
        return self.path.with_suffix(".partial")

    @contextlib.contextmanager
    def _locked(self, seconds: float) -> Iterator[bool]:
        """Lock the folder; give whether that was possible in so many seconds."""
        descriptor = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            yield _lock(descriptor, self._folder, seconds)
        finally:
            os.close(descriptor)

    def _write(self, data: bytes) -> None:
        self._partial.unlink(missing_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(self._partial, flags, 0o600), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(self._partial, self.path)
        sync_directory(self._folder)

    def _forget_others(self) -> None:
        """Keep the files of as many models as may be, this one's among them."""
        times = {path: path.stat().st_mtime_ns for path in self._folder.glob(f"*{_SUFFIX}")}
        oldest = sorted(times.keys() - {self.path}, key=times.__getitem__)
        for path in oldest[: max(0, len(times) - MOST_MODELS)]:
            path.unlink(missing_ok=True)


def _default_folder() -> Path:
    folder = user_folder("XDG_STATE_HOME", ".local/state")
    if folder is None:
        hint = "set XDG_STATE_HOME to a folder of yours that nobody else may write to"
        raise MachineError("there is no folder for what is learned", hint=hint)
    learned = folder / "learned"
    try:
        learned.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise write_failure(error, learned, "`learn=False` goes without it") from None
    return learned


def _lock(descriptor: int, folder: Path, seconds: float) -> bool:
    """Lock a folder until it is closed; return whether that was possible in so many seconds."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            lock(descriptor, folder)
        except RequestError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_PAUSE)
        else:
            return True
