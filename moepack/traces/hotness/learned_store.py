"""The store of learned counts: a file for each model in a private folder of the user."""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from moepack.common.errors import MachineError, TraceError, read_failure, write_failure
from moepack.pack.reading.pack import Pack
from moepack.storage.atomic import write_whole
from moepack.storage.folders import try_lock, user_folder
from moepack.storage.regular_file import read_back
from moepack.traces.hotness import learned as codec
from moepack.traces.hotness.learned import LEAST_TOKENS, Learned, LearnedWindow

MOST_MODELS = 64
"""Of more, the files that were written longest ago are removed."""
_SUFFIX = ".csv"
_PAUSE = 0.05
"""Seconds between attempts to lock."""


class LearnedStore:
    """The learned counts of the model in `pack`, identified by its headers.

    Raises MachineError if the user has no state folder.
    """

    def __init__(self, pack: Pack) -> None:
        headers = "".join(shard.header_sha256 for shard in pack.manifest.source.shards)
        self._shape = pack.shape.without_mtp()
        self._folder = _state_folder()
        name = hashlib.sha256(headers.encode()).hexdigest()[:32]
        self.path = self._folder / f"{name}{_SUFFIX}"

    def new(self) -> Learned:
        """Return empty counts."""
        return Learned(self._shape.expert_counts)

    def read(self) -> Learned:
        """Return the counts; empty ones without a file.

        Raises TraceError for a damaged file, MachineError for one that cannot be read.
        """
        try:
            data = read_back(self.path, codec.MAX_LENGTH, os.O_RDONLY | os.O_NOFOLLOW)
        except FileNotFoundError:
            return self.new()
        except OSError as error:
            raise read_failure(error, self.path, MachineError) from None
        return codec.decode(data, self._shape, os.fspath(self.path))

    def add(self, windows: Sequence[LearnedWindow], seconds: float = 2.0) -> bool:
        """Add later windows; return whether they were written.

        They are not if there are too few tokens, or if other processes write for so many seconds. A
        damaged file is begun anew. Raises MachineError for system errors.
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
                write_whole(self.path, codec.encode(learned), mode=0o600)
                self._remove_oldest()
        except OSError as error:
            raise write_failure(error, self.path, "`learn=False` goes without it") from None
        return True

    def forget(self) -> bool:
        """Remove the counts; return whether there were any. Raises MachineError."""
        try:
            with self._locked(2.0):
                is_there = self.path.exists()
                for path in (self.path, Path(f"{self.path}.partial")):
                    path.unlink(missing_ok=True)
                return is_there
        except OSError as error:
            raise write_failure(error, self.path, "remove the file") from None

    @contextlib.contextmanager
    def _locked(self, seconds: float) -> Iterator[bool]:
        """Lock the folder; yield whether that was possible within so many seconds."""
        descriptor = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        deadline = time.monotonic() + seconds
        try:
            while not (is_locked := try_lock(descriptor, self._folder)):
                if time.monotonic() >= deadline:
                    break
                time.sleep(_PAUSE)
            yield is_locked
        finally:
            os.close(descriptor)

    def _remove_oldest(self) -> None:
        """Keep the files of MOST_MODELS models, this one's among them."""
        times = {path: path.stat().st_mtime_ns for path in self._folder.glob(f"*{_SUFFIX}")}
        oldest = sorted(times.keys() - {self.path}, key=times.__getitem__)
        for path in oldest[: max(0, len(times) - MOST_MODELS)]:
            path.unlink(missing_ok=True)


def _state_folder() -> Path:
    folder = user_folder("XDG_STATE_HOME", ".local/state")
    if folder is None:
        hint = "set XDG_STATE_HOME to a folder of yours that nobody else may write to"
        raise MachineError("there is no folder for learned counts", hint=hint)
    learned = folder / "learned"
    try:
        learned.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise write_failure(error, learned, "`learn=False` goes without it") from None
    return learned
