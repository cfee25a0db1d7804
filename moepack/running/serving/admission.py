"""Which texts are computed at once: together while that is faster, else in turn.

A call of the model for several texts needs the experts of all. If these are far more than the cache
holds, they are evicted before they are needed again, and the texts are slower in sum than in turn.
A text that has begun is never stopped: llama.cpp would have to compute its prompt again.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from moepack.running.streaming.control import CacheStatistics

_FIRST = 4
"""Calls after a change that say little of later ones: the new text's experts are read."""
_FEW, _MANY = 16, 64
"""Calls of a number of texts, after which one more may be tried, and by which it is judged."""
_MOST = 1.5
"""Of the cache's budget, what the experts of a call may take: the policy keeps the most used."""
_SHARE = 0.95
"""Of the speed of fewer texts, below which more are too many: speeds vary as much by themselves."""
_RECENT = 256
"""Calls after which earlier ones of as many texts count half."""
_LASTING = 4096
"""Tokens after which a judgement is forgotten: by then texts are others."""
_SECONDS_BETWEEN = 0.25
_NOTE = (
    "texts wait for each other: more of them at once are slower in sum, with so little memory for "
    "experts; -np N computes N at once"
)


@dataclass
class _Decoding:
    """Recent calls of the model with the same number of texts."""

    call_count: float = 0
    token_count: float = 0
    nanoseconds: float = 0
    length: float = 0
    at: int = 0
    """The tokens of all calls when the last of these ended."""

    def add(self, before: CacheStatistics, now: CacheStatistics) -> None:
        kept = 0.5 if self.call_count > _RECENT else 1.0
        self.call_count = kept * self.call_count + now.decoding_count - before.decoding_count
        self.token_count = kept * self.token_count + now.decoded_count - before.decoded_count
        elapsed = now.decoding_nanoseconds - before.decoding_nanoseconds
        self.nanoseconds = kept * self.nanoseconds + elapsed
        self.length = kept * self.length + now.decoded_length - before.decoded_length
        self.at = now.decoded_count

    @property
    def speed(self) -> float:
        """Tokens per nanosecond."""
        return self.token_count / max(1.0, self.nanoseconds)


class Admission:
    """Decides whether one more text is computed beside others, of `most`.

    It is if the experts of a call, which grow in proportion to its texts at most, will not be far
    more than the cache holds, and if as many texts were not slower in sum when they were last
    tried. docs/policies.md has the rule.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._by_count: dict[int, _Decoding] = {}
        self._last = CacheStatistics()
        self._count = self._first = 0

    def note(self, count: int, now: CacheStatistics) -> None:
        """Note what the cache has counted, of `count` texts since the last time."""
        before, self._last = self._last, now
        calls = now.decoding_count - before.decoding_count
        if count != self._count:
            self._count, self._first = count, _FIRST
        if self._first > 0:
            self._first -= calls
        elif calls > 0 and count > 0:
            if self._recent(count) is None:
                self._by_count[count] = _Decoding()
            self._by_count[count].add(before, now)

    def _recent(self, count: int) -> _Decoding | None:
        decoding = self._by_count.get(count)
        is_recent = decoding and self._last.decoded_count - decoding.at < _LASTING
        return decoding if is_recent else None

    def _known(self, count: int, calls: int = _FEW) -> _Decoding | None:
        decoding = self._recent(count)
        return decoding if decoding and decoding.call_count >= calls else None

    def allows(self, count: int) -> bool:
        """Return whether another text may join `count` others."""
        if count == 0 or count >= self._most or self._last.holds_all:
            return count < self._most
        return self._known(count) is not None and not self.refuses(count)

    def refuses(self, count: int) -> bool:
        """Return whether another text beside `count` is known to be too many."""
        now = self._known(count)
        if now is None or count >= self._most or self._last.holds_all:
            return False
        expected_length = now.length / now.call_count * (count + 1) / count
        more = self._known(count + 1, _MANY) or now
        fewer = [one for number in range(1, count) if (one := self._known(number))]
        fastest = max(one.speed for one in [now, *fewer])
        is_slower = min(now.speed, more.speed) < _SHARE * fastest
        return expected_length > _MOST * self._last.budget or is_slower


class Turns:
    """Has texts wait for their turn, in the order in which they came.

    `read` returns what the cache of experts has counted. Where it returns None, `most` texts have
    their turn at once. `log` is called with a sentence when texts wait for the sake of their sum.
    """

    def __init__(
        self, most: int, read: Callable[[], CacheStatistics | None], log: Callable[[str], None]
    ) -> None:
        self._most, self._read, self._log = most, read, log
        self._admission = Admission(most)
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._count = 0
        self._timer: asyncio.TimerHandle | None = None

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait for a turn, which lasts until the block ends."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        self._change(0)
        try:
            await waiter
            yield
        finally:
            if waiter in self._waiting:  # cancelled
                self._waiting.remove(waiter)
            else:
                self._change(-1)

    def _change(self, step: int) -> None:
        """Count a text that has ended, and have others begin."""
        if (statistics := self._read()) is not None:
            self._admission.note(self._count, statistics)
        self._count += step
        for waiter in [one for one in self._waiting if not one.done()]:
            if not self._allows(statistics is not None):
                break
            self._waiting.remove(waiter)
            waiter.set_result(None)
            self._count += 1
        if self._timer is None and self._count:
            self._timer = asyncio.get_running_loop().call_later(_SECONDS_BETWEEN, self._look)

    def _allows(self, has_statistics: bool) -> bool:
        if not has_statistics:
            return self._count < self._most
        if self._admission.refuses(self._count):
            self._log(_NOTE)
        return self._admission.allows(self._count)

    def _look(self) -> None:
        self._timer = None
        self._change(0)
