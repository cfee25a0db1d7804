"""The time that measuring may take, and how much of it is over: what ends it is the clock alone."""

from collections.abc import Callable

from moepack.bench.timed_reads import Clock

MOST = 2
"""Times as long as planned that it may take where others disturb it."""


class Meter:
    """Tells `progress` the milliseconds since it was last told, and those in all.

    `seconds` are those of all of it, as far as they are known before `begin` says what is left.
    """

    def __init__(
        self,
        seconds: float,
        clock: Clock,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self._clock = clock
        self._progress = progress
        self._start = clock()
        self._end = self._start + seconds
        self._latest = self._end
        self._told = 0

    def begin(self, seconds: float) -> None:
        """Begin what may take so many seconds from now on."""
        self._end = self._clock() + seconds
        self._latest = self._end + (MOST - 1) * seconds

    @property
    def is_over(self) -> bool:
        """Whether the time is over."""
        return self._clock() >= self._end

    def put_off(self, seconds: float) -> None:
        """Give back what was disturbed, but for MOST times as long as planned in all."""
        self._end = min(self._end + seconds, self._latest)

    def advance(self) -> None:
        """Tell what went by since the last call."""
        self._tell(min(self._clock(), self._end))

    def finish(self) -> None:
        """Tell the rest."""
        self._tell(self._end)

    def _tell(self, until: float) -> None:
        count = max(0, int((until - self._start) * 1000) - self._told)
        self._told += count
        if self._progress is not None and count:
            self._progress(count, int((self._end - self._start) * 1000))
