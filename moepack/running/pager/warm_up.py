"""Reads the experts that were used most in earlier runs, while a program loads."""

from collections import deque
from collections.abc import Mapping, Sequence
from itertools import accumulate, takewhile

from moepack.common.errors import MoepackError
from moepack.common.shape import ExpertKey
from moepack.running.pager.mapper import ExpertMapper

_PIECE_LENGTH = 32 << 20
"""The bytes that are read at once: demanded reads wait for these at most."""


class WarmUp:
    """Reads experts, the most used first, until a router selects any.

    `lengths` are their bytes in memory. The first are evicted last from then on, up to
    `pinned_length` bytes. Experts that cannot be read are left: demanding them raises the error.
    """

    def __init__(
        self,
        mapper: ExpertMapper,
        lengths: Mapping[ExpertKey, int],
        keys: Sequence[ExpertKey],
        pinned_length: int,
    ) -> None:
        self._mapper, self._lengths = mapper, lengths
        self._waiting = deque(keys)
        self._pinned_length = pinned_length
        self._read: list[ExpertKey] = []

    @property
    def is_due(self) -> bool:
        """Whether there is anything more to read."""
        return bool(self._waiting)

    def advance(self) -> None:
        """Read a piece."""
        piece: list[ExpertKey] = []
        length = 0
        while self._waiting and length < _PIECE_LENGTH:
            piece.append(self._waiting.popleft())
            length += self._lengths[piece[-1]]
        try:
            self._mapper.warm_up(piece)
        except MoepackError:
            self._waiting.clear()
        else:
            self._read += piece
        if not self._waiting:
            self.end()

    def end(self) -> None:
        """Stop reading. The most used are evicted after the others, though they came first."""
        self._waiting.clear()
        if self._read:
            cache = self._mapper.residents.cache
            for key in first_within(self._read, self._lengths, self._pinned_length):
                cache.favour(key)
            cache.refresh(reversed(self._read))
            self._read = []


def first_within(
    keys: Sequence[ExpertKey], lengths: Mapping[ExpertKey, int], limit: int
) -> Sequence[ExpertKey]:
    """Return the first experts that take up to `limit` bytes together."""
    ends = accumulate(lengths[key] for key in keys)
    return keys[: sum(1 for _ in takewhile(lambda end: end <= limit, ends))]
