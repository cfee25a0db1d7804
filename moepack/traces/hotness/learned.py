"""Learned counts: the selections of recent runs of a model, by window of time, without their order.

A window has the counts of many consecutive tokens, so the routing of a single token cannot be told
from it. There are few windows, and each new one joins two neighbours or replaces the oldest: the
file has a fixed size, and follows the use of the model.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import NamedTuple, NoReturn

import numpy as np

from moepack.common import digest
from moepack.common.errors import TraceError
from moepack.common.keys import ExpertKey
from moepack.traces.hotness import file
from moepack.traces.hotness.model import HeldOut, Hotness
from moepack.traces.hotness.ranking import hottest_first
from moepack.traces.model import Ints, Origin

MOST_WINDOWS = 8
LEAST_TOKENS = 32
"""Of a window that is saved."""
_MOST_TOKENS = 1 << 12
"""Of two windows to join."""
_MAGIC = b"MOEPLRN1"
_HEADER = struct.Struct("<8s32sII")
_LAYER = struct.Struct("<II")
_WINDOW = struct.Struct("<IIQQ")
_DIGEST = struct.Struct("<Q")
_MAX_COUNT = 0xFFFFFFFF
_LAST_DAY = 2_932_896
"""That of the year 9999."""
_FORMAT = "learned"


class LearnedWindow(NamedTuple):
    """Consecutive tokens, and the `counts` of their selections by place.

    `day` is that of the first, in days since 1970. `hit_count` of `lookup_count` lookups would have
    hit in LRU caches of a quarter of each layer.
    """

    day: int
    token_count: int
    lookup_count: int
    hit_count: int
    counts: Ints

    def join(self, other: LearnedWindow) -> LearnedWindow:
        """Return this window and a later one as one."""
        return LearnedWindow(
            self.day,
            self.token_count + other.token_count,
            self.lookup_count + other.lookup_count,
            self.hit_count + other.hit_count,
            self.counts + other.counts,
        )


class Learned:
    """The windows of a model, the oldest first; `expert_counts` are by layer.

    A place is an expert's number among all, in the order of layers.
    """

    def __init__(
        self, expert_counts: Mapping[int, int], windows: Iterable[LearnedWindow] = ()
    ) -> None:
        self.expert_counts = dict(sorted(expert_counts.items()))
        self.windows: list[LearnedWindow] = list(windows)

    @property
    def place_count(self) -> int:
        """The number of experts."""
        return sum(self.expert_counts.values())

    @property
    def token_count(self) -> int:
        """The number of tokens."""
        return sum(window.token_count for window in self.windows)

    @property
    def counts(self) -> Ints:
        """The selections of each expert, by place."""
        total = np.zeros(self.place_count, np.int64)
        for window in self.windows:
            total += window.counts
        return total

    @property
    def hit_rate(self) -> float | None:
        """The hit rate of LRU caches of a quarter of each layer."""
        lookup_count = sum(window.lookup_count for window in self.windows)
        hit_count = sum(window.hit_count for window in self.windows)
        return hit_count / lookup_count if lookup_count else None

    def add(self, windows: Iterable[LearnedWindow]) -> None:
        """Add later windows; too many are joined, or removed, the oldest first."""
        for window in windows:
            if self.windows and self.windows[-1].token_count < LEAST_TOKENS:
                window = self.windows.pop().join(window)
            self.windows.append(window)
            if len(self.windows) > MOST_WINDOWS:
                self._shrink()

    def end(self) -> None:
        """Join a last window of so few tokens that their routing could be told from it."""
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
        ends = np.cumsum([window.token_count for window in self.windows])[:-1]
        cut = int(np.argmin(np.abs(2 * ends - self.token_count))) + 1
        earlier, later = self.windows[:cut], self.windows[cut:]
        return Learned(self.expert_counts, earlier), Learned(self.expert_counts, later)

    def hottest_first(self) -> list[ExpertKey]:
        """Return the experts with any selections, the hottest first."""
        counts, keys = self.counts, self._keys()
        order = hottest_first(counts)[: np.count_nonzero(counts)]
        return [keys[place] for place in order.tolist()]

    def to_hotness(self, path: str) -> Hotness:
        """Return it as hotness, the later half held out; `path` is for messages.

        Raises TraceError without any selection.
        """
        if not self.counts.any():
            raise TraceError("nothing was counted yet", path=path)
        halves = self.halves()
        held_out = halves and HeldOut("time", halves[1].token_count, halves[1]._by_expert())
        origin = Origin(_FORMAT, _FORMAT, expert_counts=self.expert_counts)
        hotness = Hotness(
            path=path,
            counts=self._by_expert(),
            token_count=self.token_count,
            digest=0,
            held_out=held_out,
            origins=(origin.to_json(),),
        )
        return hotness._replace(digest=digest.xxh3(file.encode(hotness)))

    def _by_expert(self) -> dict[ExpertKey, int]:
        pairs = zip(self._keys(), self.counts.tolist(), strict=True)
        return {key: count for key, count in pairs if count}

    def _keys(self) -> list[ExpertKey]:
        return [
            ExpertKey(layer, expert)
            for layer, count in self.expert_counts.items()
            for expert in range(count)
        ]


def encode(learned: Learned, identity: bytes) -> bytes:
    """Return the bytes of a file; `identity` are 32 bytes that identify the model."""
    layers = learned.expert_counts
    parts = [_HEADER.pack(_MAGIC, identity, len(layers), len(learned.windows))]
    parts += [_LAYER.pack(*pair) for pair in layers.items()]
    for window in learned.windows:
        parts.append(_WINDOW.pack(*window[:4]))
        parts.append(np.minimum(window.counts, _MAX_COUNT).astype("<u4").tobytes())
    body = b"".join(parts)
    return body + _DIGEST.pack(digest.xxh3(body))


def most_length(expert_counts: Mapping[int, int]) -> int:
    """Return the length of the longest file of a model, in bytes."""
    length = _WINDOW.size + 4 * sum(expert_counts.values())
    return _HEADER.size + len(expert_counts) * _LAYER.size + MOST_WINDOWS * length + _DIGEST.size


def decode(data: bytes, identity: bytes, expert_counts: Mapping[int, int], path: str) -> Learned:
    """Decode a file that `encode` wrote for a model. Raises TraceError for any other."""

    def fail(problem: str) -> NoReturn:
        raise TraceError(f"learned counts that are {problem}", path=path)

    learned = Learned(expert_counts)
    body = data[: -_DIGEST.size]
    if len(data) < _HEADER.size + _DIGEST.size or data[-_DIGEST.size :] != _DIGEST.pack(
        digest.xxh3(body)
    ):
        fail("damaged")
    magic, of_model, layer_count, window_count = _HEADER.unpack_from(body)
    if magic != _MAGIC:
        fail("of another version")
    window_length = _WINDOW.size + 4 * learned.place_count
    start = _HEADER.size + layer_count * _LAYER.size
    layers = b"".join(_LAYER.pack(*pair) for pair in learned.expert_counts.items())
    if of_model != identity or body[_HEADER.size : start] != layers:
        fail("another model's")
    if not window_count <= MOST_WINDOWS or len(body) != start + window_count * window_length:
        fail("damaged")
    for at in range(start, len(body), window_length):
        counts = np.frombuffer(body, "<u4", learned.place_count, at + _WINDOW.size)
        numbers: tuple[int, int, int, int] = _WINDOW.unpack_from(body, at)
        window = LearnedWindow(*numbers, counts.astype(np.int64))
        if window.day > _LAST_DAY or window.hit_count > window.lookup_count:
            fail("damaged")
        learned.windows.append(window)
    return learned
