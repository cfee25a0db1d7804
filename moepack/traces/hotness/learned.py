"""Learned counts: the selections of recent runs of a model, by window of time, without their order.

A window has the counts of many consecutive tokens, so the routing of a single token cannot be told
from it. There are few windows, and each new one joins two neighbours or replaces the oldest, so the
counts follow the use of the model. Their file is a hotness file: those of all windows, one after
another, below a line with a digest. The store has one for each model, in a private folder of the
user.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

from moepack.common import digest
from moepack.common.errors import MachineError, TraceError, read_failure, write_failure
from moepack.common.shape import ExpertKey, ModelShape
from moepack.pack.format.manifest import Manifest
from moepack.pack.reading.pack import Pack
from moepack.source.folder import SHARD_NAME
from moepack.storage.atomic import write_whole
from moepack.storage.folders import try_lock, user_folder
from moepack.storage.regular_file import read_back
from moepack.traces.hotness import file
from moepack.traces.hotness.model import HeldOut, Hotness
from moepack.traces.model import Origin

MOST_WINDOWS = 8
LEAST_TOKENS = 32
"""Of a window that is saved."""
MAX_LENGTH = 1 << 26
"""Of a file, in bytes: far more than the largest model's."""
_MOST_TOKENS = 1 << 12
"""Of two windows to join."""
_FORMAT = "learned"


class LearnedWindow(NamedTuple):
    """Consecutive tokens; `day` is that of the first, in days since 1970."""

    day: int
    token_count: int
    counts: Counter[ExpertKey]

    def join(self, other: LearnedWindow) -> LearnedWindow:
        """Return this window and a later one as one."""
        token_count = self.token_count + other.token_count
        return LearnedWindow(self.day, token_count, self.counts + other.counts)


class Learned:
    """The windows of a model, the oldest first; `expert_counts` are by layer."""

    def __init__(
        self, expert_counts: Mapping[int, int], windows: Iterable[LearnedWindow] = ()
    ) -> None:
        self.expert_counts = dict(sorted(expert_counts.items()))
        self.windows: list[LearnedWindow] = list(windows)

    @property
    def token_count(self) -> int:
        """The number of tokens."""
        return sum(window.token_count for window in self.windows)

    @property
    def counts(self) -> Counter[ExpertKey]:
        """The selections of each expert."""
        total: Counter[ExpertKey] = Counter()
        for window in self.windows:
            total.update(window.counts)
        return total

    def add(self, windows: Iterable[LearnedWindow]) -> None:
        """Add later windows; too many are joined, or removed, the oldest first."""
        for window in windows:
            if self.windows and self.windows[-1].token_count < LEAST_TOKENS:
                window = self.windows.pop().join(window)
            self.windows.append(window)
            if len(self.windows) > MOST_WINDOWS:
                self._shrink()

    def end(self) -> None:
        """Merge a final window too small to hide individual tokens."""
        if len(self.windows) > 1 and self.windows[-1].token_count < LEAST_TOKENS:
            last = self.windows.pop()
            self.windows[-1] = self.windows[-1].join(last)

    def _shrink(self) -> None:
        lengths = [one.token_count + other.token_count for one, other in pairwise(self.windows)]
        first = lengths.index(min(lengths))
        if lengths[first] <= _MOST_TOKENS:
            self.windows[first : first + 2] = [self.windows[first].join(self.windows[first + 1])]
        else:
            del self.windows[0]

    def halves(self) -> tuple[Learned, Learned] | None:
        """Return the earlier and the later half, as equal as windows are; None without two."""
        if len(self.windows) < 2:
            return None
        ends = list(accumulate(window.token_count for window in self.windows))
        cut = min(range(1, len(ends)), key=lambda cut: abs(2 * ends[cut - 1] - ends[-1]))
        earlier, later = self.windows[:cut], self.windows[cut:]
        return Learned(self.expert_counts, earlier), Learned(self.expert_counts, later)

    def shares(self) -> dict[ExpertKey, float]:
        """Return the shares of tokens that used each expert with any, the hottest first."""
        counts = self.counts
        hottest_first = sorted(counts, key=lambda key: (-counts[key], key))
        return {key: counts[key] / self.token_count for key in hottest_first}

    def to_hotness(self, path: str) -> Hotness:
        """Return it as hotness, the later half held out; `path` is for messages.

        Raises TraceError without any selection.
        """
        counts = self.counts
        if not counts:
            raise TraceError("nothing was counted yet", path=path)
        halves = self.halves()
        held_out = halves and HeldOut("time", halves[1].token_count, halves[1].counts)
        hotness = Hotness(path, counts, self.token_count, 0, None, held_out, (self._origin(),))
        return hotness._replace(digest=digest.xxh3(file.encode(hotness)))

    def _origin(self) -> dict[str, Any]:
        return Origin(_FORMAT, _FORMAT, expert_counts=self.expert_counts).to_json()


def encode(learned: Learned, model: str | None = None) -> bytes:
    """Return the bytes of a file; `model` is the name of the model."""
    body = b""
    for day, token_count, counts in learned.windows:
        origin = {**learned._origin(), "day": day, "model": model}
        body += file.encode(Hotness("", counts, token_count, 0, origins=(origin,)))
    return _heading(body) + body


def decode(data: bytes, shape: ModelShape, path: str) -> Learned:
    """Decode a file that `encode` wrote for a model. Raises TraceError for any other."""
    body = _body(data)
    if body is None:
        raise TraceError("learned counts that are damaged", path=path)
    learned = Learned(shape.expert_counts)
    for part in re.split(rb"^(?=# tokens=)", body, flags=re.MULTILINE)[1:]:
        hotness = file.decode(part, path)
        hotness.check_fits(shape)
        (origin,), token_count = hotness.origins, hotness.token_count
        assert token_count is not None, "each part begins with it"
        window = LearnedWindow(origin["day"], token_count, Counter(hotness.counts))
        learned.windows.append(window)
    return learned


def _body(data: bytes) -> bytes | None:
    """Return what follows the heading; None if the file is damaged."""
    body = data[data.find(b"\n") + 1 :]
    return body if data == _heading(body) + body else None


def _heading(body: bytes) -> bytes:
    return f"# moepack's learned counts 1, {digest.to_text(digest.xxh3(body))}\n".encode()


_SUFFIX = ".csv"
_FILE_NAME = re.compile(rf"[0-9a-f]{{32}}{re.escape(_SUFFIX)}(?:\.partial)?")
_MODEL = re.compile(rb"^# origin=(.*)$", re.MULTILINE)
_PAUSE = 0.05
"""Seconds between attempts to lock."""


class LearnedStore:
    """The learned counts of the model in `pack`, identified by its headers.

    Raises MachineError if the user has no state folder.
    """

    def __init__(self, pack: Pack) -> None:
        self._shape = pack.shape.without_mtp()
        name = pack.manifest.source.shards[0].name
        match = SHARD_NAME.match(name)
        self._model = match["prefix"] if match else name.removesuffix(".gguf")
        self.path = learned_path(pack.manifest)

    def new(self) -> Learned:
        """Return empty counts."""
        return Learned(self._shape.expert_counts)

    def read(self) -> Learned:
        """Return the counts; empty ones without a file.

        Raises TraceError for a damaged file, MachineError for one that cannot be read.
        """
        try:
            data = read_back(self.path, MAX_LENGTH, os.O_RDONLY | os.O_NOFOLLOW)
        except FileNotFoundError:
            return self.new()
        except OSError as error:
            raise read_failure(error, self.path, MachineError) from None
        return decode(data, self._shape, os.fspath(self.path))

    def add(self, windows: Sequence[LearnedWindow], seconds: float = 2.0) -> bool:
        """Add later windows; return whether they were written.

        They are not if there are too few tokens, or if other processes write for so many seconds. A
        damaged file is begun anew. Raises MachineError for system errors.
        """
        try:
            with _locked(self.path.parent, seconds) as is_locked:
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
                write_whole(self.path, encode(learned, self._model), mode=0o600)
        except OSError as error:
            raise write_failure(error, self.path, "`learn=False` goes without it") from None
        return True

    def forget(self) -> bool:
        """Remove the counts; return whether there were any. Raises MachineError."""
        return remove_learned(self.path)


@contextlib.contextmanager
def _locked(folder: Path, seconds: float) -> Iterator[bool]:
    """Lock a folder; yield whether that was possible within so many seconds."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    deadline = time.monotonic() + seconds
    try:
        while not (is_locked := try_lock(descriptor, folder)):
            if time.monotonic() >= deadline:
                break
            time.sleep(_PAUSE)
        yield is_locked
    finally:
        os.close(descriptor)


def learned_path(manifest: Manifest) -> Path:
    """Return the path of a model's counts, there or not.

    Raises MachineError if the user has no state folder.
    """
    headers = "".join(shard.header_sha256 for shard in manifest.source.shards)
    name = hashlib.sha256(headers.encode()).hexdigest()[:32]
    return _state_folder() / f"{name}{_SUFFIX}"


class LearnedFile(NamedTuple):
    """The counts of a model by their file: the `model` is None in older files, and damaged ones."""

    path: Path
    model: str | None
    is_whole: bool


def learned_files() -> list[LearnedFile]:
    """Return the counts of all models, unfinished files too. Raises MachineError."""
    paths = (path for path in sorted(_state_folder().iterdir()) if _FILE_NAME.fullmatch(path.name))
    return [_look_at(path) for path in paths]


def _look_at(path: Path) -> LearnedFile:
    try:
        body = _body(read_back(path, MAX_LENGTH, os.O_RDONLY | os.O_NOFOLLOW))
    except OSError:
        body = None
    origin = None if body is None else _MODEL.search(body)
    model = json.loads(origin[1]).get("model") if origin else None
    return LearnedFile(path, model, body is not None and path.suffix == _SUFFIX)


def remove_learned(path: Path) -> bool:
    """Remove the counts at a path; return whether there were any. Raises MachineError."""
    try:
        with _locked(path.parent, 2.0):
            is_there = path.exists()
            for one in (path, Path(f"{path}.partial")):
                one.unlink(missing_ok=True)
            return is_there
    except OSError as error:
        raise write_failure(error, path, "remove the file") from None


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
